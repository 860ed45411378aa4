"""Unitization layers: samples are scaled towards unit norm, alone or inside batch norm.

The unitization paper trains the *linear* interpolation (10) but proves its Theorem 3.3 for the *harmonic* one (9). Only
the harmonic interpolation bounds the outputs, and only while alpha stays in (0, 1].
"""

from __future__ import annotations

import math
import warnings
from typing import Annotated, Unpack

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, ArrayLike, Float

from meanflow import _boundary
from meanflow._boundary import Count, checked, choice, count, either, number
from meanflow.layers import functional
from meanflow.layers._normalization import Normalization, Options
from meanflow.layers._standardize import Own, affine


class Fixed(nnx.Variable):
    """A constant of a layer: it is saved with the layer but not trained."""


class Unitize(Normalization):
    """Scale each sample towards unit norm by a trainable share alpha, without batch statistics.

    The layer applies ``functional.unitize`` with its alpha, so training and inference are the same map. It starts as
    the identity, at alpha = 0, unless ``alpha_init`` says otherwise. With ``alpha_init=1, train_alpha=False`` it is the
    vanilla unitization x / |x| of the unitization paper; a scalar alpha gives the paper's (8), a vector alpha its (10)
    or, with the harmonic interpolation, its (9).

    Args:
        num_features: length of the feature axis.
        alpha_init: initial alpha, a number.
        alpha_shape: ``"vector"`` for one alpha a feature, ``"scalar"`` for a single one.
        clip_alpha: whether alpha is the parameter clipped to [0, 1].
        train_alpha: False keeps alpha at its initial value: it is then a ``Fixed`` instead of an ``nnx.Param``.
        interpolation: ``"linear"`` (10) or ``"harmonic"`` (9), which has a pole at negative alpha and so needs an alpha
            that is clipped or fixed.
        n: divisor of the squared norm. An integer; or ``"features"`` for the number C of features; or ``"pixels"`` for
            the number HW of pixels, as in the paper. None means 1 for dense batches (Algorithm 1) and C for images,
            where the norm is then about 1 at any width and resolution. With ``"pixels"`` the map changes with the
            resolution: to run at another resolution, pass the training value as an integer.
        sample: what one norm is taken over in a batch of images: ``"image"`` (Algorithm 2: one norm an image, mean
            over pixels) or ``"pixel"`` (Figure 1(b): one norm a location).
        **options: as in ``BatchNorm`` (axis, a single one, epsilon, which is added to the squared norm and may be 0
            here, param_dtype, that of alpha too), so that this layer fits wherever that one does; gamma and beta are
            switched off by default. There are no batch statistics: use_running_average, momentum, axis_name and a
            mask change nothing.

    >>> layer = Unitize(2, alpha_init=1.0, train_alpha=False, epsilon=0.0)
    >>> print(layer(jnp.array([[3.0, 4.0], [0.0, 0.0]])))
    [[0.6 0.8]
     [0.  0. ]]
    """

    center = False
    moment: str | None = None
    with_affine = False

    @checked
    def __init__(
        self,
        num_features: Count,
        *,
        alpha_init: Annotated[float, number(static=True)] = 0.0,
        alpha_shape: Annotated[str, choice("vector", "scalar")] = "vector",
        clip_alpha: bool = False,
        train_alpha: bool = True,
        interpolation: Annotated[str, choice("linear", "harmonic")] = "linear",
        n: Annotated[int | str, either(choice("features", "pixels"), count(1))] | None = None,
        sample: Annotated[str, choice("image", "pixel")] = "image",
        **options: Unpack[Options],
    ):
        super().__init__(num_features, **options)
        _boundary.whole("axis", self.axis, -(2**31))
        if clip_alpha:
            _boundary.bounds("alpha_init", alpha_init, low=0.0, high=1.0)
        elif interpolation == "harmonic" and (train_alpha or alpha_init < 0):
            raise ValueError(
                "interpolation='harmonic' has a pole at negative alpha: set clip_alpha=True, or train_alpha=False with "
                f"alpha_init >= 0, got alpha_init={alpha_init}"
            )
        if train_alpha and clip_alpha and interpolation == "linear" and alpha_init == 0:
            warnings.warn(
                "alpha clipped at its initial 0 tends to stay there (gradients of the linear form usually "
                "push it down), which leaves plain batch norm; start from alpha_init > 0",
                stacklevel=4,
            )
        shape = (num_features,) if alpha_shape == "vector" else ()
        self.raw = (nnx.Param if train_alpha else Fixed)(jnp.full(shape, alpha_init, self.param_dtype))
        self.clip_alpha, self.interpolation, self.n, self.sample = clip_alpha, interpolation, n, sample

    @property
    def alpha(self) -> Float[Array, "*features"]:
        """Alpha, clipped if asked; a number, or one number a feature."""
        raw = self.raw[...]
        if not self.clip_alpha:
            return raw
        # gradient 1 on the closed interval, so that alpha can leave an end point it starts from
        return jnp.where((raw >= 0) & (raw <= 1), raw, jnp.clip(jax.lax.stop_gradient(raw), 0, 1))

    def divisor(self, shape: tuple[int, ...]) -> float:
        """Return the number that divides the sum of squares of one sample, for a batch of this shape."""
        # 1 for dense batches (N, C), HW for images (N, H, W, C)
        pixels = math.prod(shape) // (shape[0] * self.num_features)
        usual = 1 if len(shape) == 2 else self.num_features
        named = {None: usual, "features": self.num_features, "pixels": pixels}
        n = self.n if isinstance(self.n, int) else named[self.n]
        return float(n * pixels if self.sample == "image" else n)

    def _normalize(
        self, x: jax.Array, use_running_average: bool | None, mask: ArrayLike | None, own: Own
    ) -> jax.Array:
        """Unitize each sample of a dense or image batch, in at least single precision."""
        # standardized first where the class has a center and a moment; gamma and beta come last, since the theorems
        # bound what comes before them
        x = super()._normalize(x, use_running_average, mask, (None, None))
        if x.size == 0:
            return x
        (feature,) = self._feature_axes(x)
        # one norm a location, or one a sample over all axes but the first
        axes = (feature,) if self.sample == "pixel" else tuple(range(1, x.ndim))
        alpha = self._laid(self.alpha, x) if self.alpha.ndim else self.alpha
        out = functional.unitize(
            x, alpha, axes, interpolation=self.interpolation, epsilon=self.epsilon, n=self.divisor(x.shape)
        )
        return affine(out, *own)


class UnitizedBatchNorm(Unitize):
    """Standardize each feature over the batch, unitize each standardized sample, then apply gamma and beta.

    This is Algorithm 1 of the unitization paper for dense batches (N, d) and Algorithm 2, or Figure 1(b) with
    ``sample="pixel"``, for images (N, H, W, C). In inference the moments are the running averages, while the norm still
    comes from the sample itself. With alpha = 0, which is the paper's initial value, the layer is batch norm.

    The arguments are those of ``Unitize``; epsilon is added to the variance too, gamma and beta are there by default.

    >>> layer = UnitizedBatchNorm(2, alpha_init=1.0, train_alpha=False)
    >>> print(jnp.linalg.norm(layer(jnp.array([[0.0, 5.0], [2.0, 1.0], [9.0, 3.0]])), axis=1).round(3))
    [1. 1. 1.]
    """

    center = True
    moment = "std"
    with_affine = True
