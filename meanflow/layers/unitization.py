"""Unitization layers: samples scaled towards unit norm, alone or inside batch norm.

The unitization paper trains the *linear* interpolation (10) but proves its Theorem 3.3 for the *harmonic* one
(9); only the latter bounds the outputs, and only while alpha stays in (0, 1].
"""

import math
import warnings
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from meanflow import _checks
from meanflow.layers import functional
from meanflow.layers.normalization import Initializer as Initializer
from meanflow.layers.normalization import Normalization


class Fixed(nnx.Variable):
    """A constant of a layer that is saved with it but not trained."""


UNITIZE = ("alpha_init", "alpha_shape", "alpha_constraint", "train_alpha", "interpolation", "n", "sample")
"""Arguments that ``UnitizedBatchNorm`` passes on to ``Interpolation``."""


class Interpolation(nnx.Module):
    """The trainable alpha and the map x -> unitize(x, alpha) on dense or image batches.

    Args:
        num_features: length of the feature axis.
        alpha_init: initial alpha, a number.
        alpha_shape: ``"vector"`` (one a feature) or ``"scalar"``.
        alpha_constraint: ``"none"``, ``"clip"`` (alpha = clip(parameter, 0, 1)) or ``"sigmoid"`` (alpha =
            sigmoid(parameter), needs 0 < alpha_init < 1).
        train_alpha: False keeps alpha at its initial value (``Fixed`` instead of ``nnx.Param``).
        interpolation: ``"linear"`` (10) or ``"harmonic"`` (9); the harmonic form has a pole at negative alpha
            and so needs a constraint or a fixed alpha.
        n: divisor of the squared norm. An integer, ``"features"`` (the number C of features) or ``"pixels"``
            (HW, as in the paper). None means 1 for dense batches (Algorithm 1) and C for images, where p is
            then about 1 at any width and resolution. With ``"pixels"`` the map changes with the resolution:
            at another one pass the training value as an integer.
        sample: for image batches, ``"image"`` (Algorithm 2: one norm an image, mean over pixels) or
            ``"pixel"`` (Figure 1(b): one norm a location).
        axis: the feature axis. Axis 0 is the batch.
        epsilon: added to the squared norm.
        param_dtype: of alpha.
    """

    def __init__(
        self,
        num_features: int,
        *,
        alpha_init: float = 0.0,
        alpha_shape: str = "vector",
        alpha_constraint: str = "none",
        train_alpha: bool = True,
        interpolation: str = "linear",
        n: int | str | None = None,
        sample: str = "image",
        axis: int = -1,
        epsilon: float = 1e-5,
        param_dtype: Any = jnp.float32,
    ):
        _checks.whole("num_features", num_features, 1)
        _checks.one_of("alpha_shape", alpha_shape, ("vector", "scalar"))
        _checks.one_of("alpha_constraint", alpha_constraint, ("none", "clip", "sigmoid"))
        _checks.one_of("interpolation", interpolation, ("linear", "harmonic"))
        _checks.one_of("sample", sample, ("image", "pixel"))
        _checks.at_least("epsilon", epsilon, 0.0)
        if isinstance(n, str):
            _checks.one_of("n", n, ("features", "pixels"))
        elif n is not None:
            _checks.whole("n", n, 1)
        alpha_init = float(alpha_init)
        if alpha_constraint == "sigmoid" and not 0 < alpha_init < 1:
            raise ValueError(
                f"alpha_init must lie in (0, 1) for alpha_constraint='sigmoid', got {alpha_init}"
            )
        if alpha_constraint == "clip" and not 0 <= alpha_init <= 1:
            raise ValueError(f"alpha_init must lie in [0, 1] for alpha_constraint='clip', got {alpha_init}")
        if interpolation == "harmonic" and alpha_constraint == "none" and (train_alpha or alpha_init < 0):
            raise ValueError(
                "interpolation='harmonic' has a pole at negative alpha: set alpha_constraint to 'clip' or "
                "'sigmoid', or train_alpha=False with alpha_init >= 0"
            )
        if train_alpha and alpha_constraint == "clip" and interpolation == "linear" and alpha_init == 0:
            warnings.warn(
                "alpha clipped at its initial 0 tends to stay there (gradients of the linear form usually "
                "push it down), which leaves plain batch norm; start from alpha_init > 0",
                stacklevel=3,
            )
        if alpha_constraint == "sigmoid":
            alpha_init = math.log(alpha_init / (1 - alpha_init))
        shape = (num_features,) if alpha_shape == "vector" else ()
        self.raw = (nnx.Param if train_alpha else Fixed)(jnp.full(shape, alpha_init, param_dtype))
        self.num_features, self.constraint, self.interpolation = num_features, alpha_constraint, interpolation
        self.n, self.sample, self.axis, self.epsilon = n, sample, axis, epsilon

    @property
    def alpha(self) -> jax.Array:
        """The constrained alpha, () or (features,)."""
        raw = self.raw[...]
        if self.constraint == "sigmoid":
            return jax.nn.sigmoid(raw)
        if self.constraint == "clip":
            # gradient 1 on the closed interval, so that alpha can leave an end point it starts from
            return jnp.where((raw >= 0) & (raw <= 1), raw, jnp.clip(jax.lax.stop_gradient(raw), 0, 1))
        return raw

    def divisor(self, shape: tuple[int, ...]) -> float:
        """What the sum of squares over one sample is divided by, for a batch of this shape."""
        pixels = math.prod(shape) // (shape[0] * self.num_features)
        if self.n is None:
            n = 1 if len(shape) == 2 else self.num_features
        else:
            n = (
                {"features": self.num_features, "pixels": pixels}[self.n]
                if isinstance(self.n, str)
                else self.n
            )
        return float(n * pixels if self.sample == "image" else n)

    def __call__(self, x: jax.Array) -> jax.Array:
        """Unitizes each sample of the batch."""
        feature = self.axis % x.ndim
        axes = (feature,) if self.sample == "pixel" else tuple(range(1, x.ndim))
        alpha = self.alpha
        if alpha.ndim:
            alpha = functional.along(alpha, x.ndim, feature)
        return functional.unitize(
            x, alpha, axes, interpolation=self.interpolation, epsilon=self.epsilon, n=self.divisor(x.shape)
        )


class Unitize(Interpolation):
    """Unitization without batch statistics: train and eval mode are the same map.

    ``alpha_init=1, train_alpha=False`` is the paper's vanilla unitization x / |x|; a scalar alpha its (8); a
    vector alpha its (9) or (10). Arguments as in ``Interpolation``.

    >>> layer = Unitize(2, alpha_init=1.0, train_alpha=False, epsilon=0.0)
    >>> print(layer(jnp.array([[3.0, 4.0], [0.0, 0.0]])))
    [[0.6 0.8]
     [0.  0. ]]
    """


class UnitizedBatchNorm(Normalization):
    """Batch standardisation, unitization of each standardised sample, then gamma x + beta.

    Algorithm 1 of the unitization paper for dense batches (N, d), Algorithm 2 (or Figure 1(b) with
    ``sample="pixel"``) for images (N, H, W, C). In inference the moments are the running ones while the norm
    still comes from the sample itself. With alpha = 0, the paper's initial value, it is batch norm.

    Args:
        num_features: length of the feature axis.
        **options: of ``Interpolation`` (alpha_init, alpha_shape, alpha_constraint, train_alpha,
            interpolation, n, sample) and of ``Normalization``; axis, epsilon and param_dtype serve both.
    """

    def __init__(self, num_features: int, **options: Any):
        unitize = {name: options.pop(name) for name in UNITIZE if name in options}
        super().__init__(num_features, centre=True, moment="std", **options)
        shared = {"axis": self.axis, "epsilon": self.epsilon, "param_dtype": self.param_dtype}
        self.unitize = Interpolation(num_features, **unitize, **shared)

    @property
    def alpha(self) -> jax.Array:
        """The constrained alpha, () or (features,)."""
        return self.unitize.alpha

    def normalized(self, x: jax.Array, use_running_average: bool | None = None) -> jax.Array:
        """The unitized output before gamma and beta: the quantity the theorems bound."""
        return self.unitize(super().normalized(x, use_running_average))
