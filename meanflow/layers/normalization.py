"""Recenter, Rescale and BatchNorm as flax NNX layers, with the conventions of ``nnx.BatchNorm``.

Differences from flax: the variance is always computed in two passes, so float32 data of mean 1e4 and spread
0.1 come out with spread 1 (flax's default is off by a factor of 30, up or down with the rounding), and
running moments keep their dtype.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from meanflow import _checks
from meanflow.layers import functional

Initializer = Callable[..., jax.Array]


class Normalization(nnx.Module):
    """What Recenter, Rescale, BatchNorm and UnitizedBatchNorm share: moments, running averages, affine map.

    Args:
        num_features: length of the feature axis.
        centre: subtract the mean.
        moment: divide by the root of the second moment about the mean (``"std"``) or zero (``"rms"``); or
            None.
        use_running_average: normalise by the stored moments (inference) instead of the batch's; also set by
            ``model.train()`` / ``model.eval()`` and overridden at call time.
        axis: the feature axis; all others are averaged over.
        momentum: running <- momentum running + (1 - momentum) batch.
        epsilon: > 0, added to the second moment.
        dtype: of the result; by default promoted from input and parameters.
        param_dtype: of the parameters; running moments are at least float32.
        use_bias: add beta.
        use_scale: multiply by gamma.
        bias_init: initialiser of beta.
        scale_init: initialiser of gamma.
        axis_name: mesh axis over which batch moments are synchronised (under ``shard_map`` or ``vmap``); not
            needed with automatic sharding under jit.
        rngs: keys for the initialisers.
    """

    def __init__(
        self,
        num_features: int,
        *,
        centre: bool,
        moment: str | None,
        use_running_average: bool | None = False,
        axis: int = -1,
        momentum: float = 0.99,
        epsilon: float = 1e-5,
        dtype: Any = None,
        param_dtype: Any = jnp.float32,
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
        stat_dtype = jnp.promote_types(param_dtype, jnp.float32)
        keys = rngs or nnx.Rngs(0)
        self.mean = nnx.BatchStat(jnp.zeros(shape, stat_dtype)) if centre else nnx.data(None)
        self.var = nnx.BatchStat(jnp.ones(shape, stat_dtype)) if moment else nnx.data(None)
        self.scale = nnx.Param(scale_init(keys.params(), shape, param_dtype)) if use_scale else nnx.data(None)
        self.bias = nnx.Param(bias_init(keys.params(), shape, param_dtype)) if use_bias else nnx.data(None)
        self.num_features, self.centre, self.moment = num_features, centre, moment
        self.use_running_average, self.axis, self.momentum = use_running_average, axis, momentum
        self.epsilon, self.dtype, self.param_dtype, self.axis_name = epsilon, dtype, param_dtype, axis_name

    def __call__(self, x: jax.Array, use_running_average: bool | None = None) -> jax.Array:
        """Normalises x and, in training mode, updates the running moments."""
        return self.affine(self.normalized(x, use_running_average))

    def normalized(self, x: jax.Array, use_running_average: bool | None = None) -> jax.Array:
        """The output before gamma and beta."""
        x, average, axes = self._enter(x, use_running_average)
        mean, var = self._moments(x, average, axes)
        if mean is not None:
            x = x - mean.astype(x.dtype)
        if var is not None:
            x = x / jnp.sqrt(var + self.epsilon).astype(x.dtype)
        return x

    def affine(self, x: jax.Array) -> jax.Array:
        """gamma x + beta."""
        if self.scale is not None:
            x = x * functional.along(self.scale[...], x.ndim, self.axis)
        if self.bias is not None:
            x = x + functional.along(self.bias[...], x.ndim, self.axis)
        return x if self.dtype is None else x.astype(self.dtype)

    def set_view(self, use_running_average: bool | None = None) -> None:
        """Hook of ``nnx.view``."""
        if use_running_average is not None:
            self.use_running_average = use_running_average

    def _enter(
        self, x: jax.Array, use_running_average: bool | None
    ) -> tuple[jax.Array, bool, tuple[int, ...]]:
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
        """Mean and second moment to normalise by, laid along the feature axis; updates the running ones."""
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
        return (mean if self.centre else None), (var if self.moment else None)


class Recenter(Normalization):
    """Subtracts the mean over the batch; keeps a running mean. Arguments as in ``Normalization``.

    >>> print(Recenter(2)(jnp.array([[1.0, 2.0], [3.0, 6.0]])))
    [[-1. -2.]
     [ 1.  2.]]
    """

    def __init__(self, num_features: int, *, use_bias: bool = False, use_scale: bool = False, **options: Any):
        super().__init__(
            num_features, centre=True, moment=None, use_bias=use_bias, use_scale=use_scale, **options
        )


class Rescale(Normalization):
    """Divides by the root of the second moment over the batch, without recentring.

    ``mode="std"`` takes the moment about the mean, ``"rms"`` about zero; after ``Recenter`` they agree in
    training. Other arguments as in ``Normalization``.
    """

    def __init__(
        self,
        num_features: int,
        *,
        mode: str = "std",
        use_bias: bool = False,
        use_scale: bool = False,
        **options: Any,
    ):
        _checks.one_of("mode", mode, ("std", "rms"))
        super().__init__(
            num_features, centre=False, moment=mode, use_bias=use_bias, use_scale=use_scale, **options
        )


class BatchNorm(Normalization):
    """Batch normalisation: Rescale after Recenter, then gamma x + beta.

    Stands in for ``nnx.BatchNorm``: the arguments of ``Normalization`` have its names and defaults, the
    variables (mean, var, scale, bias) too. Left out are use_fast_variance (the variance is exact),
    axis_index_groups, promote_dtype, metadata and the mask at call time.

    >>> layer = BatchNorm(1, epsilon=1e-12)
    >>> print(layer(jnp.array([[1.0], [3.0]])).ravel())
    [-1.  1.]
    """

    def __init__(self, num_features: int, **options: Any):
        super().__init__(num_features, centre=True, moment="std", **options)
