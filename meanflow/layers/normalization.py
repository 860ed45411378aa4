"""Recenter, Rescale and BatchNorm as flax NNX layers, with the conventions of ``nnx.BatchNorm``.

There are two differences from flax. The variance is always computed in two passes: float32 data of mean 1e4 and
standard deviation 0.1 come out with standard deviation 1, where flax's default is off by a factor of 30, up or down
with the rounding. And the running moments keep their dtype.
"""

from typing import TypedDict, Unpack

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from meanflow import _checks
from meanflow.layers import functional
from meanflow.layers.initializers import Initializer


class NormalizationOptions(TypedDict, total=False):
    """Keyword arguments that every layer passes on to ``Normalization``, where they are described."""

    use_running_average: bool | None
    axis: int
    momentum: float
    epsilon: float
    dtype: DTypeLike | None
    param_dtype: DTypeLike
    use_bias: bool
    use_scale: bool
    bias_init: Initializer
    scale_init: Initializer
    axis_name: str | None
    rngs: nnx.Rngs | None


class Normalization(nnx.Module):
    """Base of Recenter, Rescale, BatchNorm and UnitizedBatchNorm: moments, running averages and the affine map.

    In training the layer normalizes by the moments of the batch and updates its running averages of them; in
    inference it normalizes by the running averages. Then it multiplies by gamma and adds beta.

    Args:
        num_features: length of the feature axis.
        center: whether to subtract the mean.
        moment: divide by the root of the second moment about the mean (``"std"``) or about zero (``"rms"``), or do not
            divide (None).
        use_running_average: True normalizes by the running averages (inference), False by the batch (training).
            ``model.train()`` and ``model.eval()`` change it too, and an argument of the call has the last word.
        axis: the feature axis; all other axes are averaged over.
        momentum: after each training batch, running <- momentum * running + (1 - momentum) * batch.
        epsilon: positive number that is added to the second moment.
        dtype: dtype of the result. By default it is promoted from input and parameters.
        param_dtype: dtype of gamma and beta. Running moments are at least float32.
        use_bias: whether to add beta.
        use_scale: whether to multiply by gamma.
        bias_init: initializer of beta.
        scale_init: initializer of gamma.
        axis_name: mesh axis over which the moments of the batch are synchronized (under ``shard_map`` or ``vmap``).
            Arrays that jit shards by itself do not need it.
        rngs: keys for the initializers.
    """

    def __init__(
        self,
        num_features: int,
        *,
        center: bool,
        moment: str | None,
        use_running_average: bool | None = False,
        axis: int = -1,
        momentum: float = 0.99,
        epsilon: float = 1e-5,
        dtype: DTypeLike | None = None,
        param_dtype: DTypeLike = jnp.float32,
        use_bias: bool = True,
        use_scale: bool = True,
        bias_init: Initializer = nnx.initializers.zeros,
        scale_init: Initializer = nnx.initializers.ones,
        axis_name: str | None = None,
        rngs: nnx.Rngs | None = None,
    ):
        shape = (_checks.whole("num_features", num_features, 1),)
        _checks.at_least("epsilon", epsilon, 0.0, strict=True)
        _checks.at_least("momentum", momentum, 0.0)
        _checks.at_least("1 - momentum", 1 - momentum, 0.0)
        # half-precision averages would stall: an update of 1 % is lost to rounding
        stat_dtype = jnp.promote_types(param_dtype, jnp.float32)
        keys = rngs or nnx.Rngs(0)
        self.mean = nnx.BatchStat(jnp.zeros(shape, stat_dtype)) if center else nnx.data(None)
        self.var = nnx.BatchStat(jnp.ones(shape, stat_dtype)) if moment else nnx.data(None)
        self.scale = nnx.Param(scale_init(keys.params(), shape, param_dtype)) if use_scale else nnx.data(None)
        self.bias = nnx.Param(bias_init(keys.params(), shape, param_dtype)) if use_bias else nnx.data(None)
        self.num_features, self.center, self.moment = num_features, center, moment
        self.use_running_average, self.axis, self.momentum = use_running_average, axis, momentum
        self.epsilon, self.dtype, self.param_dtype, self.axis_name = epsilon, dtype, param_dtype, axis_name

    def __call__(
        self, x: Float[Array, "*shape"], use_running_average: bool | None = None
    ) -> Float[Array, "*shape"]:
        """Normalize a batch, apply gamma and beta, and in training update the running moments."""
        return self.affine(self.normalized(x, use_running_average))

    def normalized(
        self, x: Float[Array, "*shape"], use_running_average: bool | None = None
    ) -> Float[Array, "*shape"]:
        """Normalize a batch as ``__call__`` does, but leave gamma and beta out."""
        x, average, axes = self._enter(x, use_running_average)
        mean, var = self._moments(x, average, axes)
        if mean is not None:
            x = x - mean.astype(x.dtype)
        if var is not None:
            x = x / jnp.sqrt(var + self.epsilon).astype(x.dtype)
        return x

    def affine(self, x: Float[Array, "*shape"]) -> Float[Array, "*shape"]:
        """Return gamma x + beta, the second half of ``__call__``."""
        if self.scale is not None:
            x = x * functional.along(self.scale[...], x.ndim, self.axis)
        if self.bias is not None:
            x = x + functional.along(self.bias[...], x.ndim, self.axis)
        return x if self.dtype is None else x.astype(self.dtype)

    def set_view(self, use_running_average: bool | None = None) -> None:
        """Switch between training and inference; ``nnx.view`` calls this."""
        if use_running_average is not None:
            self.use_running_average = use_running_average

    def _enter(
        self, x: jax.Array, use_running_average: bool | None
    ) -> tuple[jax.Array, bool, tuple[int, ...]]:
        """Check the input; return it in its dtype, whether to use running averages, and the averaged axes."""
        x = jnp.asarray(x) if self.dtype is None else jnp.asarray(x, self.dtype)
        if x.ndim < 2 or x.shape[self.axis] != self.num_features:
            raise ValueError(
                f"x must be a batch with {self.num_features} features on axis {self.axis}, got {x.shape}"
            )
        average = self.use_running_average if use_running_average is None else use_running_average
        if average is None:
            raise ValueError("use_running_average must be given to the layer or to the call, got None twice")
        axes = tuple(i for i in range(x.ndim) if i != self.axis % x.ndim)
        return x, average, axes

    def _moments(
        self, x: jax.Array, average: bool, axes: tuple[int, ...]
    ) -> tuple[jax.Array | None, jax.Array | None]:
        """Return mean and second moment to normalize by, along the feature axis; update the running ones."""
        if average:
            laid = lambda stat: None if stat is None else functional.along(stat[...], x.ndim, self.axis)
            return laid(self.mean), laid(self.var)
        wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
        about = jnp.zeros((1,) * x.ndim, wide.dtype) if self.moment == "rms" else None
        mean, var = functional.batch_moments(wide, axes, self.axis_name, about=about)
        for stat, batch in ((self.mean, mean), (self.var, var)):
            if stat is not None:
                new = self.momentum * stat[...] + (1 - self.momentum) * batch.reshape(-1)
                stat[...] = jax.lax.stop_gradient(new).astype(stat[...].dtype)
        return (mean if self.center else None), (var if self.moment else None)


class Recenter(Normalization):
    """Subtract the mean over the batch, and keep a running mean for inference.

    Gamma and beta are switched off by default. Further arguments are those of ``BatchNorm``.

    >>> print(Recenter(2)(jnp.array([[1.0, 2.0], [3.0, 6.0]])))
    [[-1. -2.]
     [ 1.  2.]]
    """

    def __init__(self, num_features: int, **options: Unpack[NormalizationOptions]):
        options = {"use_bias": False, "use_scale": False, **options}
        super().__init__(num_features, center=True, moment=None, **options)


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

    def __init__(self, num_features: int, *, mode: str = "std", **options: Unpack[NormalizationOptions]):
        _checks.one_of("mode", mode, ("std", "rms"))
        options = {"use_bias": False, "use_scale": False, **options}
        super().__init__(num_features, center=False, moment=mode, **options)


class BatchNorm(Normalization):
    """Batch normalization: recenter and rescale each feature over the batch, then gamma x + beta.

    It stands in for ``nnx.BatchNorm``: the arguments and the variables (mean, var, scale, bias) have the same names and
    defaults. Left out are use_fast_variance (the variance is always exact), axis_index_groups, promote_dtype, metadata
    and the mask at call time.

    Args:
        num_features: length of the feature axis.
        **options: use_running_average (False: training), axis (-1, the feature axis), momentum (0.99, of the running
            moments), epsilon (1e-5, added to the variance), dtype, param_dtype (float32), use_bias and use_scale
            (whether there is a beta and a gamma), bias_init and scale_init (their initializers), axis_name (mesh axis
            over which moments are synchronized) and rngs. ``normalization.Normalization`` describes each.

    >>> layer = BatchNorm(1, epsilon=1e-12)
    >>> print(layer(jnp.array([[1.0], [3.0]])).ravel())
    [-1.  1.]
    """

    def __init__(self, num_features: int, **options: Unpack[NormalizationOptions]):
        super().__init__(num_features, center=True, moment="std", **options)
