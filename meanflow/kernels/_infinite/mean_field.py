"""Order parameters of wide random networks.

A network has L weight layers of widths N_0, ..., N_L; hidden layers 1 .. L-1 apply phi; weights W^l ~ N(0, sw2/N_{l-1})
and biases b^l ~ N(0, sb2). Then, for a pair of samples and with (u, v) Gaussian of covariance r^l,

    r^l = sw2 p^{l-1} + sb2,   p^l = E[phi(u) phi(v)]                 forward
    q^L = 1,   q^l = sw2 q^{l+1} E[phi'(u) phi'(v)]                   backward
    K = sum_l (N_{l-1} p^{l-1} + 1) q^l                               tangent kernel

These are "BN NTK" A.5-A.14 with three corrections: the bias variance, the index of p, and the weight N_0 of the first
layer.
"""

from __future__ import annotations

import math
from typing import Annotated, NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, ArrayLike, Float

from meanflow import _boundary
from meanflow._boundary import Count, Rate, checked
from meanflow._matrices import grams
from meanflow.activations import AnyActivation
from meanflow.kernels._infinite.dual import dual_activation


class OrderParameters(NamedTuple):
    """Order parameters for every pair of samples, layers along the first axis.

    Attributes:
        p: p^0 .. p^{L-1}, (L, T, S): mean product of activations.
        r: r^1 .. r^L, (L, T, S): covariance of pre-activations; r^L is the output's.
        q: q^1 .. q^L, (L, T, S): products of back-propagated gradients.
    """

    p: Float[Array, "L T S"]
    r: Float[Array, "L T S"]
    q: Float[Array, "L T S"]


VARIANCES = _boundary.sequence(_boundary.array((None,), low=0.0), least=2)


@checked
def order_parameters(
    gram: Float[ArrayLike, "T S"],
    *,
    depth: Count,
    activation: AnyActivation = "relu",
    weight_variance: Rate = 2.0,
    bias_variance: Rate = 0.0,
    variances: Annotated[tuple[Float[Array, " T"], Float[Array, " S"]], VARIANCES] | None = None,
) -> OrderParameters:
    """Return the order parameters of a network with ``depth`` weight layers, for every pair of samples.

    Args:
        gram: p^0 = X X'/N_0, (T, T); or (T, S) between two sets together with ``variances``.
        depth: L >= 1, the number of weight matrices (one more than hidden layers).
        activation: phi, a name or a function that maps arrays elementwise; quadrature where there is no closed form.
        weight_variance: sw2.
        bias_variance: sb2.
        variances: diagonals of the two sets' own Gram matrices, (T,) and (S,).

    Returns:
        ``OrderParameters`` p, r, q, each (L, T, S): mean products of activations, covariances of pre-activations (the
        last is the NNGP kernel), products of back-propagated gradients. Time O(L T S), times 201^2 where the dual needs
        quadrature.

    >>> import jax.numpy as jnp
    >>> out = order_parameters(jnp.eye(2), depth=3)
    >>> out.p.shape, round(float(out.p[1, 0, 1]), 4)
    ((3, 2, 2), 0.3183)
    """
    gram = jnp.asarray(gram)
    if variances is None:
        if gram.ndim != 2 or gram.shape[0] != gram.shape[1]:
            raise ValueError(f"gram must be square unless variances are given, got shape {gram.shape}")
        gram = grams()("gram", gram)
        variances = (jnp.diagonal(gram), jnp.diagonal(gram))
    for name, values, rows in zip(("variances[0]", "variances[1]"), variances, gram.shape, strict=True):
        _boundary.shape(name, values, (rows,))
    wide = lambda a, c: (jnp.broadcast_to(a[:, None], gram.shape), jnp.broadcast_to(c[None, :], gram.shape))
    # by Cauchy and Schwarz, up to the rounding of sums of products
    most, known = (_boundary.concrete(u) for u in (math.prod(map(jnp.sqrt, wide(*variances))), gram))
    if (
        most is not None
        and known is not None
        and np.any(np.abs(known) > (1 + 1e3 * np.finfo(most.dtype).eps) * most)
    ):
        raise ValueError("gram must be possible with its variances, got |g_ij|^2 > v_i w_j for some pair")
    dual = dual_activation(activation)
    grow = lambda p: weight_variance * p + bias_variance
    p, r, slopes = [gram], [grow(gram)], []
    # the variances of both sets go along: the dual needs them beside the covariance
    one, two = (grow(v) for v in variances)
    for _ in range(depth - 1):
        pair = dual(*wide(one, two), r[-1])
        one, two = grow(dual(one, one, one).value), grow(dual(two, two, two).value)
        p.append(pair.value)
        slopes.append(pair.slope)
        r.append(grow(pair.value))
    # backward from the output, where the gradient is 1
    q = [jnp.ones_like(gram)]
    for slope in reversed(slopes):
        q.append(weight_variance * q[-1] * slope)
    found = OrderParameters(jnp.stack(p), jnp.stack(r), jnp.stack(q[::-1]))
    for name, values in found._asdict().items():
        _boundary.finite(f"{name}, which follows from the activation and the variances,", values)
    return found
