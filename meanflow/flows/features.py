"""Features phi(w; x): what one neuron contributes to the prediction f(x) = sum_i p_i phi(w_i; x)."""

from collections.abc import Callable
from typing import Any, Self

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

from meanflow import _checks
from meanflow.activations import Activation
from meanflow.geometry import omega
from meanflow.measures.cloud import Cloud, Neurons
from meanflow.measures.dataset import Dataset

Pull = Callable[[jax.Array], Any]


def _average(weights: jax.Array, features: jax.Array) -> jax.Array:
    """sum_i p_i phi_i; a fused reduction, which spares writing the (n, m) features that a product would need."""
    return jnp.sum(features * weights[None, :], axis=1)


class Feature(eqx.Module):
    """Base class. A feature supplies ``__call__(cloud, x)``, phi(w_i; x_j) of shape (n, m); it may override
    ``linearize`` with a faster exact form."""

    record: type = eqx.field(static=True)

    def __call__(self, cloud: Cloud, x: jax.Array) -> jax.Array:
        """phi(w_i; x_j) as an (n, m) array; weights do not enter."""
        raise NotImplementedError

    def bind(self, data: Dataset) -> Self:
        """Fixes what the feature takes from the data (mean and covariance, under batch norm)."""
        return self

    def chart(self, flow: Any, cloud: Cloud) -> tuple[Any, Cloud, Callable[[Any], Any]]:
        """Coordinates in which ``flow``, of this feature, steps fastest; see ``Flow.chart``. Default: its own."""
        return flow, cloud, lambda particles: particles

    def check(self, cloud: Cloud, x: jax.Array) -> None:
        """Raises ValueError if cloud and inputs do not fit this feature."""
        if not isinstance(cloud.particles, self.record):
            raise ValueError(
                f"cloud.particles must be {self.record.__name__}, got {type(cloud.particles).__name__}"
            )

    def linearize(self, cloud: Cloud, x: jax.Array) -> tuple[jax.Array, Pull]:
        """Predictions f (n,) and the map g -> grad_w sum_j g_j phi(w; x_j), one covector per particle.

        The map never involves the weights p_i: it is the differential of the potential at each particle, not
        the derivative of the loss, so particles of weight zero need no special care.
        """
        features, pullback = jax.vjp(lambda w: self(cloud.at(w), x), cloud.particles)

        def pull(g: jax.Array) -> Any:
            return pullback(jnp.broadcast_to(g[:, None], features.shape))[0]

        return _average(cloud.weights, features), pull

    def predict(self, cloud: Cloud, x: jax.Array) -> jax.Array:
        """f(x_j) = sum_i p_i phi(w_i; x_j), shape (n,)."""
        return _average(cloud.weights, self(cloud, x))


class TwoLayer(Feature):
    """phi = a s(b . x) for inputs x (n, d). Cost O(n m d)."""

    activation: Activation = eqx.field(static=True)

    def __init__(self, activation: Activation) -> None:
        self.record = Neurons
        self.activation = activation

    def check(self, cloud: Cloud, x: jax.Array) -> None:
        """Shapes of a, b and x must agree."""
        super().check(cloud, x)
        _checks.shape("particles.a", cloud.particles.a, (cloud.size,))
        _checks.shape("particles.b", cloud.particles.b, (cloud.size, None))
        _checks.shape("x", x, (None, cloud.particles.b.shape[1]))

    def __call__(self, cloud: Cloud, x: jax.Array) -> jax.Array:
        """a_i s(b_i . x_j)."""
        a, b = cloud.particles
        return self.activation(x @ b.T) * a[None, :]


class BatchNormed(TwoLayer):
    """phi = a s(bb . (x - mean)) with bb = b/|b|_S (raw neurons) or bb = b (neurons on the manifold).

    Attributes:
        mean: (d,), sigma: (d, d): statistics of the inputs, or None until ``bind`` freezes those of the data.
        raw: whether b is normalised here.
    """

    mean: Any
    sigma: Any
    raw: bool = eqx.field(static=True)

    def __init__(self, activation: Activation, mean: Any, sigma: Any, raw: bool) -> None:
        super().__init__(activation)
        self.mean, self.sigma, self.raw = mean, sigma, raw

    def bind(self, data: Dataset) -> Self:
        """Takes mean and covariance (1/N) of the data where they were not given."""
        if self.mean is not None and self.sigma is not None:
            return self
        if data.x.ndim != 2:
            raise ValueError(f"x must have shape (n, d) under batch norm, got {data.x.shape}")
        n, d = data.x.shape
        if self.sigma is None and n <= d:
            raise ValueError(
                f"x must have more than d = {d} points for a regular covariance, got n = {n}; or pass covariance="
            )
        mean, sigma = data.moments()
        return type(self)(
            self.activation,
            mean if self.mean is None else self.mean,
            sigma if self.sigma is None else self.sigma,
            self.raw,
        )

    def check(self, cloud: Cloud, x: jax.Array) -> None:
        """Needs bound statistics of the right shape, d >= 2, a regular covariance and b != 0."""
        super().check(cloud, x)
        if self.mean is None or self.sigma is None:
            raise ValueError(
                "this batch-norm flow has no statistics yet; call flow.bind(data) first or pass mean= and covariance="
            )
        d = x.shape[1]
        if d < 2:
            raise ValueError(
                "batch norm needs inputs of dimension d >= 2 (for d = 1 Omega is two points), got d = 1"
            )
        _checks.shape("mean", self.mean, (d,))
        _checks.shape("covariance", self.sigma, (d, d))
        _checks.finite("mean", self.mean)
        _checks.finite("covariance", self.sigma)
        sigma = _checks.concrete(self.sigma)
        if sigma is not None:
            spectrum = np.linalg.eigvalsh(sigma.astype(np.float64))
            if spectrum[0] <= d * np.finfo(sigma.dtype).eps * spectrum[-1]:
                raise ValueError(
                    f"covariance must be positive definite, "
                    f"got eigenvalues from {spectrum[0]:.3g} to {spectrum[-1]:.3g}"
                )
        b = _checks.concrete(cloud.particles.b)
        if b is not None and not np.all(np.any(b != 0, axis=-1)):
            raise ValueError("particles.b must be nonzero under batch norm, got a zero vector")

    def __call__(self, cloud: Cloud, x: jax.Array) -> jax.Array:
        """a_i s(bb_i . (x_j - mean))."""
        a, b = cloud.particles
        bb = omega.normalize(b, self.sigma) if self.raw else b
        return self.activation((x - self.mean[None, :]) @ bb.T) * a[None, :]
