"""Recenter, Rescale and BatchNorm as flax NNX layers that inherit from ``nnx.BatchNorm``.

What differs from flax and torch is in the table of the reference page. In short: everything is computed in at least
single precision, whatever the type of input and result; the variance is taken in two passes, so that float32 data of
mean 1e4 and standard deviation 0.1 come out with standard deviation 1, where flax's default is off by a factor of 30;
and a batch that is empty or not finite does not enter the running moments.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Annotated, Any, TypedDict, Unpack

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, ArrayLike, Float

from meanflow import _boundary
from meanflow._boundary import Count, checked
from meanflow.layers import _standardize as arithmetic
from meanflow.layers._standardize import Batch, Mode, Own


def _check_axis(name: str, value: object) -> object:
    """Accept an integer or a sequence of distinct integers."""
    kind = lambda name, entry: _boundary.whole(name, entry, -(2**31))
    if isinstance(value, int | np.integer):
        return kind(name, value)
    axes = _boundary.sequence(kind)(name, value)
    if len(set(axes)) != len(axes):
        raise ValueError(f"{name} must hold distinct axes, got {axes}")
    return axes if len(axes) > 1 else axes[0]


Metadata = Annotated[
    dict[str, Any], _boundary.mapping(_boundary.unchecked("flax keeps it beside the variable"))
]


class Options(TypedDict, total=False):
    """What every layer takes beside the number of features: ``unbiased``, and the arguments of ``nnx.BatchNorm``."""

    unbiased: bool
    rngs: nnx.Rngs | None
    use_running_average: bool | None
    axis: Annotated[int | Sequence[int], _check_axis]
    momentum: Annotated[float, _boundary.number(low=0, high=1, static=True)]
    epsilon: Annotated[float, _boundary.number(low=0, static=True)]
    dtype: Annotated[DTypeLike, _boundary.precision] | None
    param_dtype: Annotated[DTypeLike, _boundary.precision]
    use_bias: bool
    use_scale: bool
    bias_init: Callable[..., jax.Array]
    scale_init: Callable[..., jax.Array]
    axis_name: str | None
    axis_index_groups: (
        Annotated[Sequence[Sequence[int]], _boundary.sequence(_boundary.sequence(_boundary.count(0)))] | None
    )
    use_fast_variance: bool
    promote_dtype: Callable[..., Any] | None
    bias_metadata: Metadata
    scale_metadata: Metadata


class Normalization(nnx.BatchNorm):
    """Base of all layers: moments, running averages and the affine map, with flax's constructor.

    In training the layer normalizes by the moments of the batch and updates its running averages of them; in
    inference it normalizes by the running averages. Then it multiplies by gamma and adds beta.

    Attributes:
        center: whether to subtract the mean.
        moment: divide by the root of the second moment about the mean (``"std"``) or about zero (``"rms"``), or do not
            divide (None).
        with_affine: whether gamma and beta are there unless ``use_scale`` and ``use_bias`` say otherwise.
    """

    center: bool = True
    moment: str | None = "std"
    with_affine: bool = True

    @checked
    def __init__(self, num_features: Count, **options: Unpack[Options]):
        # flax's constructor draws gamma and beta; our defaults differ from flax's in these
        usual = {"use_scale": self.with_affine, "use_bias": self.with_affine, "unbiased": False}
        given: dict[str, Any] = {**usual, "use_fast_variance": False, "promote_dtype": None, **options}
        self.unbiased = given.pop("unbiased")
        super().__init__(num_features, **given | {"rngs": options.get("rngs") or nnx.Rngs(0)})
        if self.moment is not None:
            _boundary.bounds("epsilon", self.epsilon, above=0.0)
        if self.axis_index_groups is not None and self.axis_name is None:
            raise ValueError("axis_index_groups needs axis_name, got axis_name=None")
        # half-precision averages would stall: an update of 1 % is lost to rounding
        dtype = jnp.promote_types(self.param_dtype, jnp.float32)
        shape = (num_features,)
        none: Any = nnx.data(None)
        self.mean = nnx.BatchStat(jnp.zeros(shape, dtype)) if self.center else none
        self.var = nnx.BatchStat(jnp.ones(shape, dtype)) if self.moment else none

    def __call__(
        self, x: Batch, use_running_average: bool | None = None, *, mask: ArrayLike | None = None
    ) -> Batch:
        """Normalize a batch, apply gamma and beta, and in training update the running moments.

        Args:
            x: the batch.
            use_running_average: True for inference, False for training; default is what the layer is set to.
            mask: zeros and ones, or booleans, that broadcast against x: the entries over which moments are taken.
        """
        x = self._read(x)
        return self._normalize(x, use_running_average, mask, self._own(x)).astype(self._result(x))

    def normalized(self, x: Batch, use_running_average: bool | None = None) -> Batch:
        """Normalize a batch as ``__call__`` does, but leave gamma and beta out."""
        x = self._read(x)
        return self._normalize(x, use_running_average, None, (None, None)).astype(self._result(x))

    def affine(self, x: Batch) -> Batch:
        """Return gamma x + beta, the second half of ``__call__``."""
        x = self._read(x)
        return arithmetic.affine(arithmetic.widen(x), *self._own(x)).astype(self._result(x))

    def _read(self, x: ArrayLike) -> jax.Array:
        """Return a batch as an array of floats with the right number of features, or refuse it."""
        if not isinstance(x, jax.Array | np.ndarray):
            x = _boundary.array(least=0, infinite=True)("x", x)
        _boundary.numeric("x", x)
        x = _boundary.floating(x)
        features = self._feature_axes(x)
        if x.ndim < 2 or math.prod(x.shape[i] for i in features) != self.num_features:
            raise ValueError(
                f"x must be a batch with {self.num_features} features on axis {self.axis}, got {x.shape}"
            )
        return x

    def _result(self, x: jax.Array) -> DTypeLike:
        """Return the dtype of the result for an input x."""
        if self.dtype is not None:
            return self.dtype
        # as flax does: the widest of input and parameters
        parts = [part[...] for part in (self.scale, self.bias) if part is not None]
        return jnp.result_type(x, *parts)

    def _own(self, x: jax.Array) -> Own:
        """Return gamma and beta such that they lie along the feature axes of x; None where there is none."""
        found = (self.scale, self.bias)
        return tuple(None if u is None else self._laid(u[...], x) for u in found)  # type: ignore[return-value]

    def _normalize(
        self, x: jax.Array, use_running_average: bool | None, mask: ArrayLike | None, own: Own
    ) -> jax.Array:
        """Return the normalized batch times gamma plus beta, in at least single precision; update the moments."""
        given = _boundary.optional(_boundary.flag)("use_running_average", use_running_average)
        average = self.use_running_average if given is None else given
        if average is None:
            raise ValueError("use_running_average must be given to the layer or to the call, got None twice")
        axes = tuple(i for i in range(x.ndim) if i not in self._feature_axes(x))
        if x.size == 0 and not average and (self.center or self.moment):
            raise ValueError(f"x must not be empty in training: it has no moments, got shape {x.shape}")
        x = arithmetic.widen(x)
        weights = None if mask is None else self._mask(mask, x)
        if not self.center and not self.moment:
            return arithmetic.affine(x, *own)
        # moments that do not come from this batch are constants; those of the batch have a derivative
        fixed = self._running(x) if average else self.given_moments(x)
        if fixed is not None:
            x = x - fixed[0] if self.center else x
            x = x / jnp.sqrt(fixed[1] + self.epsilon) if self.moment else x
            return arithmetic.affine(x, *own)
        wide = lambda u: None if u is None else u.astype(x.dtype)
        how = arithmetic.Standardization(
            axes, self.epsilon, self.center, self.moment, self.axis_name, self.axis_index_groups
        )
        out, mean, second = arithmetic.standardize(x, *map(wide, own), weights, how)
        self._update(x, weights, axes, mean, second)
        return out

    def given_moments(self, x: Float[Array, "*shape"]) -> tuple[Array, Array] | None:
        """Return mean and second moment to use in training, laid along the feature axis of x.

        None, as here, takes those of the batch. Whoever treats them as variables of their own overrides this method,
        as the tangent kernels do.
        """
        return None

    def _running(self, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Return the running moments along the feature axes of x; 0 and 1 where none are kept."""
        laid = lambda stat, other: other if stat is None else self._laid(stat[...], x)
        one = jnp.ones((1,) * x.ndim, x.dtype)
        return laid(self.mean, 0 * one), laid(self.var, one)

    def _feature_axes(self, x: jax.Array) -> tuple[int, ...]:
        """Return the feature axes as nonnegative numbers in increasing order."""
        return arithmetic.axes_of(x, self.axis if isinstance(self.axis, int) else tuple(self.axis))

    def _mask(self, mask: ArrayLike, x: jax.Array) -> jax.Array:
        """Return the mask as zeros and ones in the type of x."""
        found = _boundary.array(low=0, high=1, least=0)("mask", mask)
        arithmetic.fits("mask", found, x)
        known = _boundary.concrete(found)
        if known is not None and not np.all((known == 0) | (known == 1)):
            raise ValueError(f"mask must hold zeros and ones, got {_boundary.show(mask)} with other numbers")
        return found.reshape((1,) * (x.ndim - found.ndim) + found.shape).astype(x.dtype)

    def _laid(self, vector: jax.Array, x: jax.Array) -> jax.Array:
        """Return a vector of the features such that it lies along the feature axes of x."""
        features = self._feature_axes(x)
        return jnp.reshape(vector, [n if i in features else 1 for i, n in enumerate(x.shape)])

    def _update(
        self, x: jax.Array, mask: jax.Array | None, axes: tuple[int, ...], mean: jax.Array, second: jax.Array
    ) -> None:
        """Move the running moments towards those of a batch; features without entries or with NaN stay as they are."""
        # NaN in a feature makes its moments NaN; under jit there is no one to tell
        known = _boundary.concrete(mean + second)
        if known is not None and not np.all(np.isfinite(known)):
            raise ValueError(
                "x must be finite in training, and so must its squares, got NaN or infinity in "
                f"{np.count_nonzero(~np.isfinite(known))} of {self.num_features} features; the running moments were "
                "left as they are"
            )
        count = self._count(x, mask, axes)
        # the batch has normalized by its own variance; only the running average is corrected
        if self.unbiased and self.moment == "std":
            second = second * (count / jnp.maximum(count - 1, 1))
        for stat, batch in ((self.mean, mean), (self.var, second)):
            if stat is not None:
                new = self.momentum * stat[...] + (1 - self.momentum) * batch.reshape(-1)
                good = jnp.isfinite(batch.reshape(-1)) & (jnp.reshape(count, -1) > 0)
                # in the type of the average, so that a scan can carry it
                kept = jnp.where(good, new.astype(stat[...].dtype), stat[...])
                stat[...] = jax.lax.stop_gradient(kept)

    def _count(self, x: jax.Array, mask: jax.Array | None, axes: tuple[int, ...]) -> jax.Array:
        """Return how many entries a mean was taken over: (1, ...), or one number a feature under a mask."""
        if mask is None:
            count = jnp.full((1,) * x.ndim, math.prod(x.shape[i] for i in axes), x.dtype)
        else:
            count = jnp.sum(jnp.broadcast_to(mask, x.shape), axis=axes, keepdims=True)
        if self.axis_name is None:
            return count
        return jax.lax.psum(count, self.axis_name, axis_index_groups=self.axis_index_groups)


class Recenter(Normalization):
    """Subtract the mean over the batch, and keep a running mean for inference.

    Gamma and beta are switched off by default. Further arguments are those of ``BatchNorm``.

    >>> print(Recenter(2)(jnp.array([[1.0, 2.0], [3.0, 6.0]])))
    [[-1. -2.]
     [ 1.  2.]]
    """

    moment: str | None = None
    with_affine = False


class Rescale(Normalization):
    """Divide by the root of the second moment over the batch, without recentering.

    Args:
        num_features: length of the feature axis.
        mode: ``"std"`` takes the second moment about the mean, ``"rms"`` about zero. After ``Recenter`` the two agree
            in training.
        **options: as in ``BatchNorm``; gamma and beta are switched off by default.

    >>> print(Rescale(1, mode="rms", epsilon=1e-12)(jnp.array([[3.0], [3.0]])).ravel())
    [1. 1.]
    """

    center = False
    with_affine = False

    @checked
    def __init__(self, num_features: Count, *, mode: Mode = "std", **options: Unpack[Options]):
        self.moment = mode
        super().__init__(num_features, **options)


class BatchNorm(Normalization):
    """Batch normalization: recenter and rescale each feature over the batch, then gamma x + beta.

    It stands in for ``nnx.BatchNorm``, from which it inherits: arguments and variables (mean, var, scale, bias) have
    the same names and defaults, and all other layers of this room take them too.

    Args:
        num_features: number of features, the product of the lengths of the feature axes.
        unbiased: whether the running variance is that of the batch times n/(n - 1), as in torch.
        rngs: keys for the initializers.
        **options: those of ``nnx.BatchNorm``: use_running_average (False: training), axis (-1, or several feature
            axes), momentum (0.99: running <- momentum * running + (1 - momentum) * batch), epsilon (1e-5, added to the
            variance), dtype of the result, param_dtype (float32; running moments are at least float32), use_bias and
            use_scale (whether there is a beta and a gamma), bias_init and scale_init, bias_metadata and scale_metadata,
            axis_name (mesh axis over which moments are synchronized under ``shard_map`` or ``vmap``; arrays that jit
            shards by itself do not need it), axis_index_groups (groups of its devices). Two have no effect:
            use_fast_variance (the variance is always taken in two passes) and promote_dtype (sums are always in at
            least float32).

    >>> layer = BatchNorm(1, epsilon=1e-12)
    >>> print(layer(jnp.array([[1.0], [3.0]])).ravel())
    [-1.  1.]
    """
