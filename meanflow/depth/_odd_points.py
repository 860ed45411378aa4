"""The odd point: recenter + ReLU sends one sample away from all the others.

At infinite width the layer K <- J(HKH) is bistable from n = 7 samples on. Besides the symmetric state, in which all
pairwise cosines are kappa(-1/(n-1)), it has a state with one long sample that is nearly orthogonal to a cluster of the
others. The cluster does not collapse to a point, as the invariant representation of "BN decomposed" (Definition 12)
has it: its angles tend to about 540/n degrees.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array, ArrayLike, Bool, Float, Int

from meanflow import _checks
from meanflow._checks import count, number, optional, precision
from meanflow._matrices import grams
from meanflow.depth import _observables as observables


class OddPoint(NamedTuple):
    """How far the longest sample of a batch is from all the others.

    Attributes:
        sample: index of the longest sample.
        norm_ratio: its length over that of the second longest.
        odd_angle: mean angle in degrees between it and the others.
        cluster_angle: mean angle in degrees among the others.
        escaped: whether norm_ratio is above the threshold.
    """

    sample: Int[Array, "*lead"]
    norm_ratio: Float[Array, "*lead"]
    odd_angle: Float[Array, "*lead"]
    cluster_angle: Float[Array, "*lead"]
    escaped: Bool[Array, "*lead"]


@_checks.arguments(gram=grams(3), threshold=optional(number(above=0)))
def odd_point(gram: Float[ArrayLike, "*lead n n"], threshold: float | None = None) -> OddPoint:
    """Find the sample that has escaped from the others, and measure how far.

    Args:
        gram: Gram matrix of n >= 3 samples; leading axes such as (seeds, layers) are kept.
        threshold: the norm ratio that counts as an escape. The default sqrt(n - 1) is the geometric mean of 1, the
            ratio of the symmetric state, and n - 1, the ratio of Definition 12.

    >>> import jax.numpy as jnp, meanflow as mf
    >>> batch = mf.depth.invariant_representation(20)
    >>> odd = mf.depth.odd_point(batch @ batch.T)
    >>> int(odd.sample), round(float(odd.norm_ratio), 3), float(odd.odd_angle)
    (0, 19.0, 90.0)
    """
    gram = jnp.asarray(gram)
    n = gram.shape[-1]
    length = observables.norms(gram)
    known = _checks.concrete(length)
    if known is not None and not np.all(np.sum(known > 0, axis=-1) >= 2):
        raise ValueError("gram must have at least two samples that are not zero, got fewer")
    top, index = jax.lax.top_k(length, 2)
    ratio = top[..., 0] / top[..., 1]
    odd = jax.nn.one_hot(index[..., 0], n, dtype=gram.dtype)
    rest = 1 - odd
    angle = observables.angles(gram)
    # means of angles over pairs (odd, other) and over ordered pairs of two others, picked out by weights 0 and 1, so
    # that the index of the odd sample may differ along the leading axes
    across = jnp.sum(angle * odd[..., :, None] * rest[..., None, :], axis=(-1, -2)) / (n - 1)
    itself = jnp.broadcast_to(jnp.eye(n, dtype=gram.dtype), gram.shape)
    pairs = rest[..., :, None] * rest[..., None, :] * (1 - itself)
    within = jnp.sum(angle * pairs, axis=(-1, -2)) / ((n - 1) * (n - 2))
    limit = jnp.sqrt(n - 1.0) if threshold is None else threshold
    return OddPoint(index[..., 0], ratio, across, within, ratio > limit)


@_checks.arguments(n=count(3), features=count(2), dtype=optional(precision))
def invariant_representation(
    n: int, features: int = 2, dtype: DTypeLike | None = None
) -> Float[Array, "{n} {features}"]:
    """Return a batch whose expected Gram matrix recenter + ReLU reproduces (Definition 12 of "BN decomposed").

    Sample 0 has length 1 and lies on the first axis; all others coincide at distance 1/(n-1) on the second axis.

    Args:
        n: number of samples, at least 3.
        features: number of features, at least 2.
        dtype: of the batch; by default the default float.

    >>> import meanflow as mf
    >>> mf.depth.invariant_representation(3).tolist()
    [[1.0, 0.0], [0.0, 0.5], [0.0, 0.5]]
    """
    x = jnp.zeros((n, features), dtype or jnp.result_type(float))
    return x.at[0, 0].set(1.0).at[1:, 1].set(1.0 / (n - 1))
