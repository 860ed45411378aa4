"""Order parameters of wide random networks, and the kernels and spectra they predict.

L weight layers of widths N_0, ..., N_L; hidden layers 1 .. L-1 apply phi; W^l ~ N(0, sw2/N_{l-1}), b^l ~
    N(0, sb2). r^l = sw2 p^{l-1} + sb2,   p^l = E[phi(u) phi(v)],  cov(u, v) from r^l       forward
    q^L = 1,   q^l = sw2 q^{l+1} E[phi'(u) phi'(v)]                              backward
    K = sum_l (N_{l-1} p^{l-1} + 1) q^l                                          tangent kernel, "BN NTK"
    A.5-A.14
with the corrections: the bias variance, the index of p, and the weight N_0 of the first layer.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from meanflow import _checks
from meanflow.activations import Activation
from meanflow.kernels.dual import dual_activation


class OrderParameters(NamedTuple):
    """Order parameters for every pair of samples, layers along the first axis.

    Attributes:
        p: p^0 .. p^{L-1}, (L, T, S): mean product of activations.
        r: r^1 .. r^L, (L, T, S): covariance of pre-activations; r^L is the output's.
        q: q^1 .. q^L, (L, T, S): products of back-propagated gradients.
    """

    p: jax.Array
    r: jax.Array
    q: jax.Array


def order_parameters(
    gram: jax.Array,
    *,
    depth: int,
    activation: str | Activation = "relu",
    weight_variance: float = 2.0,
    bias_variance: float = 0.0,
    variances: tuple[jax.Array, jax.Array] | None = None,
) -> OrderParameters:
    """All order parameters of a network with ``depth`` weight layers.

    Args:
        gram: p^0 = X X'/N_0, (T, T); or (T, S) between two sets together with ``variances``.
        depth: L >= 1, the number of weight matrices (one more than hidden layers).
        activation: phi; closed forms or quadrature, see ``dual_activation``.
        weight_variance: sw2.
        bias_variance: sb2.
        variances: diagonals of the two sets' own Gram matrices, (T,) and (S,).

    Returns:
        ``OrderParameters``. Time O(L T S), times 201^2 where the dual needs quadrature.

    >>> import jax.numpy as jnp
    >>> out = order_parameters(jnp.eye(2), depth=3)
    >>> out.p.shape, round(float(out.p[1, 0, 1]), 4)
    ((3, 2, 2), 0.3183)
    """
    depth = _checks.whole("depth", depth, 1)
    _checks.at_least("weight_variance", weight_variance, 0.0)
    _checks.at_least("bias_variance", bias_variance, 0.0)
    gram = jnp.asarray(gram)
    if variances is None:
        if gram.ndim != 2 or gram.shape[0] != gram.shape[1]:
            raise ValueError(f"gram must be square unless variances are given, got shape {gram.shape}")
        variances = (jnp.diagonal(gram), jnp.diagonal(gram))
    dual = dual_activation(activation)
    wide = lambda a, c: (
        jnp.broadcast_to(a[:, None], gram.shape),
        jnp.broadcast_to(c[None, :], gram.shape),
    )
    grow = lambda p: weight_variance * p + bias_variance
    p, r, slopes = [gram], [grow(gram)], []
    one, two = (grow(v) for v in variances)
    for _ in range(depth - 1):
        pair = dual(*wide(one, two), r[-1])
        one, two = grow(dual(one, one, one).value), grow(dual(two, two, two).value)
        p.append(pair.value)
        slopes.append(pair.slope)
        r.append(grow(pair.value))
    q = [jnp.ones_like(gram)]
    for slope in reversed(slopes):
        q.append(weight_variance * q[-1] * slope)
    return OrderParameters(jnp.stack(p), jnp.stack(r), jnp.stack(q[::-1]))


class Kappas(NamedTuple):
    """K_tt ~ (L-1) N kappa_1 for equal samples and K_st ~ (L-1) N kappa_2 for different ones."""

    one: jax.Array
    two: jax.Array


def kappas(
    *,
    depth: int,
    alpha_0: float,
    activation: str | Activation = "relu",
    weight_variance: float = 2.0,
    bias_variance: float = 0.0,
    p_tt: float = 1.0,
    p_st: float = 0.0,
    alphas: tuple[float, ...] | None = None,
) -> Kappas:
    """(1/(L-1)) sum_{l=1..L} alpha_{l-1} p^{l-1} q^l, with alpha_l = N_l/N; L terms over L-1 ("BN NTK" A.12,
    A.14).

    Args:
        alpha_0: N_0/N, which has no default: 1 for inputs as wide as the network, about 0 for coordinates.
        depth, activation, weight_variance, bias_variance: as in ``order_parameters``.
        p_tt: |x_t|^2/N_0.
        p_st: x_s.x_t/N_0. It can vanish for all pairs only if T <= N_0.
        alphas: (alpha_1, ..., alpha_{L-1}), default all 1.
    """
    _checks.whole("depth", depth, 2)
    gram = jnp.array([[p_tt, p_st], [p_st, p_tt]])
    order = order_parameters(
        gram,
        depth=depth,
        activation=activation,
        weight_variance=weight_variance,
        bias_variance=bias_variance,
    )
    alpha = jnp.asarray([alpha_0, *(alphas if alphas is not None else (1.0,) * (depth - 1))], gram.dtype)
    total = jnp.sum(alpha[:, None, None] * order.p * order.q, axis=0) / (depth - 1)
    return Kappas(total[0, 0], total[0, 1])


def _order(x: jax.Array, z: jax.Array | None, **kwargs: Any) -> OrderParameters:
    x = jnp.asarray(x)
    z = x if z is None else jnp.asarray(z)
    if x.ndim != 2 or z.ndim != 2 or x.shape[1] != z.shape[1]:
        raise ValueError(f"x and z must be (T, N_0) and (S, N_0), got {x.shape} and {z.shape}")
    size = x.shape[1]
    square = lambda a: jnp.sum(a**2, axis=1) / size
    product = jnp.matmul(x, z.T, precision=jax.lax.Precision.HIGHEST) / size
    return order_parameters(product, variances=(square(x), square(z)), **kwargs)


def infinite_ntk(
    x: jax.Array,
    z: jax.Array | None = None,
    *,
    depth: int,
    activation: str | Activation = "relu",
    weight_variance: float = 2.0,
    bias_variance: float = 0.0,
    parametrisation: str = "ntk",
    widths: tuple[int, ...] | None = None,
    biases: bool = True,
) -> jax.Array:
    """Tangent kernel of an infinitely wide network at initialisation, (T, S).

    Args:
        x, z: inputs (T, N_0), (S, N_0); z defaults to x.
        depth, activation, weight_variance, bias_variance: as in ``order_parameters``.
        parametrisation: "ntk": weights sqrt(sw2/N) w and biases sqrt(sb2) b with w, b ~ N(0, 1) trained,
            which gives sum_l (sw2 p^{l-1} + sb2) q^l. "standard": weights and biases themselves trained,
            which gives sum_l (N_{l-1} p^{l-1} + 1) q^l, of order the width.
        widths: N_0, ..., N_{L-1}, required for "standard".
        biases: whether biases are trained.

    On a dense grid of coordinates use float64: in float32 the smallest eigenvalues are lost to the angle.
    """
    _checks.one_of("parametrisation", parametrisation, ("ntk", "standard"))
    order = _order(
        x,
        z,
        depth=depth,
        activation=activation,
        weight_variance=weight_variance,
        bias_variance=bias_variance,
    )
    if parametrisation == "ntk":
        inner = order.r if biases else order.r - bias_variance
        return jnp.sum(inner * order.q, axis=0)
    if widths is None or len(widths) != depth:
        raise ValueError(
            f'widths must list N_0, ..., N_{depth - 1} for parametrisation="standard", got {widths}'
        )
    sizes = jnp.asarray(widths, order.p.dtype)[:, None, None]
    return jnp.sum((sizes * order.p + (1.0 if biases else 0.0)) * order.q, axis=0)


def nngp(
    x: jax.Array,
    z: jax.Array | None = None,
    *,
    depth: int,
    activation: str | Activation = "relu",
    weight_variance: float = 2.0,
    bias_variance: float = 0.0,
) -> jax.Array:
    """Covariance of the outputs of an infinitely wide random network, r^L, (T, S); the same in both
    parametrisations.

    >>> import jax.numpy as jnp
    >>> nngp(jnp.ones((1, 2)), depth=3).tolist()
    [[2.0]]
    """
    return _order(
        x,
        z,
        depth=depth,
        activation=activation,
        weight_variance=weight_variance,
        bias_variance=bias_variance,
    ).r[-1]


class Prediction(NamedTuple):
    """Mean ``m`` and variance ``v`` of the eigenvalues, the largest, and the repeated one (the bulk)."""

    m: jax.Array
    v: jax.Array
    top: jax.Array
    bulk: jax.Array


def predict_spectrum(kappa: Kappas, *, depth: int, width: int, samples: int) -> Prediction:
    """Spectrum of (L-1) N M, M = (k1 - k2) I + k2 11' (T, T): exact for that matrix ("BN NTK" A.21-A.27)."""
    scale = (depth - 1) * width
    return Prediction(
        scale * kappa.one,
        scale**2 * (samples - 1) * kappa.two**2,
        scale * (kappa.one + (samples - 1) * kappa.two),
        scale * (kappa.one - kappa.two),
    )


def predict_batchnorm_bulk(kappa: Kappas, *, depth: int, width: int, variance: Any) -> jax.Array:
    """The T-2 equal eigenvalues of B (L-1) N M B, (L-1) N (k1 - k2)/sigma^2; the other two are 0.

    The matrix is a scaled projection, not the identity ("BN NTK" A.19-A.20), and for T comparable to N the
    real kernel's fluctuations are as large as its mean spectrum.
    """
    return (depth - 1) * width * (kappa.one - kappa.two) / variance


class HiddenBatchNorm(NamedTuple):
    """K ~ N [diagonal I + common 11'] for batch norm before every activation."""

    diagonal: jax.Array
    common: jax.Array


def hidden_batchnorm(*, depth: int, activation: str | Activation = "relu") -> HiddenBatchNorm:
    """Kernel, per unit of width, of a network with batch norm before every activation and a plain linear
    output.

    Orthogonal inputs, N_0 = N, many samples: independent of the weight variance. The common part is (E
    phi)^2, so batch norm in front of the activations leaves the outlying eigenvalue, of order N T, in place.
    """
    depth = _checks.whole("depth", depth, 2)
    dual = dual_activation(activation)
    one = jnp.ones(())
    square, slope = dual(one, one, one)  # E phi^2, E phi'^2 at unit variance
    common = dual(one, one, jnp.zeros(())).value  # independent: (E phi)^2
    variance = square - common
    total, q = square, jnp.ones(())
    for layer in range(depth - 1, 0, -1):
        inner = one if layer == 1 else variance
        q = q * slope / inner
        total = total + inner * q
    return HiddenBatchNorm(total - common, common)


def exponent(sizes: Any, values: Any) -> float:
    """Least-squares slope of log value against log size."""
    return float(np.polyfit(np.log(np.asarray(sizes, float)), np.log(np.asarray(values, float)), 1)[0])
