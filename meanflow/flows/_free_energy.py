"""Free energy of a cloud at a temperature: F = E + tau int rho log rho dvol, with an estimate of the entropy."""

from __future__ import annotations

from typing import Annotated, NamedTuple

import numpy as np

from meanflow._boundary import Count, checked, choice, number
from meanflow.flows._flow import Flow, bind_and_check, energy
from meanflow.measures._cloud import Cloud
from meanflow.measures._dataset import Dataset


class FreeEnergy(NamedTuple):
    """A free energy and its parts.

    Attributes:
        value: E + tau entropy.
        energy: E.
        entropy: int rho log rho dvol, estimated; minus the usual differential entropy.
        error: standard error of ``entropy``.
        fisher: int rho |grad log rho|^2 dvol of the Gaussian fit; None for nearest neighbors, which have no gradient.
    """

    value: float
    energy: float
    entropy: float
    error: float
    fisher: float | None


@checked
def free_energy(
    flow: Flow,
    cloud: Cloud,
    data: Dataset,
    temperature: Annotated[float, number(low=0, static=True)],
    *,
    estimator: Annotated[str, choice("neighbors", "gaussian")] = "neighbors",
    neighbors: Count = 4,
) -> FreeEnergy:
    """Estimate F = E + tau int rho log rho dvol, which noisy flows descend, from a cloud of equal weights; on the host.

    Args:
        flow, cloud, data: model, particles, training data.
        temperature: tau >= 0.
        estimator: ``"neighbors"`` (Kozachenko and Leonenko): from the distance of each particle to its k-th neighbor.
            Its bias falls as (k/m)^(2/D) in D dimensions, its standard error is ``error``. ``"gaussian"``: the closed
            form for the Gaussian of the same mean and covariance, right for Gaussian clouds; only in flat spaces.
        neighbors: k.

    >>> import jax, jax.numpy as jnp, meanflow as mf
    >>> data = mf.Dataset(jnp.zeros((1, 1)), jnp.zeros(1))
    >>> a, b = jax.random.normal(jax.random.key(0), (2, 4000))
    >>> found = mf.flows.free_energy(mf.vanilla("tanh"), mf.Cloud(mf.Neurons(a, b[:, None])), data, 1.0)
    >>> bool(abs(found.entropy + jnp.log(2 * jnp.pi * jnp.e)) < 4 * found.error)
    True
    """
    bound = bind_and_check(flow, cloud, data)
    weights = np.asarray(cloud.weights, np.float64)
    real = weights > 0
    if np.ptp(weights[real]) > 1e-6 * np.max(weights):
        raise ValueError("cloud must have equal weights, got unequal ones; call cloud.resample(key) first")
    places = np.asarray(bound.space.embedding(cloud), np.float64)[real]
    # what is frozen at one value has no entropy
    moving = np.ptp(places, axis=0) > 0
    places = places[:, moving]
    size = places.shape[0]
    dimension = bound.space.dimension(cloud) - int(np.sum(~moving))
    if dimension < 1 or size <= max(neighbors, dimension):
        raise ValueError(
            f"cloud must have more than {max(neighbors, dimension)} particles that differ, got {size}"
        )
    if estimator == "gaussian":
        if dimension != places.shape[1]:
            raise ValueError(f"estimator='gaussian' needs a flat space, got {type(bound.space).__name__}")
        covariance = np.atleast_2d(np.cov(places.T))
        entropy = -0.5 * (np.linalg.slogdet(covariance)[1] + dimension * (1 + np.log(2 * np.pi)))
        error = np.sqrt(dimension / (2 * size))
        fisher = float(np.trace(np.linalg.inv(covariance)))
    else:
        (entropy, error), fisher = _nearest(places, dimension, neighbors), None
    first = float(energy(flow, cloud, data))
    return FreeEnergy(first + temperature * entropy, first, float(entropy), float(error), fisher)


def _nearest(places: np.ndarray, dimension: int, k: int) -> tuple[float, float]:
    """Return the estimate psi(k) - psi(m) - log(volume of the unit ball) - D <log r_k>, and its standard error."""
    from scipy.spatial import cKDTree
    from scipy.special import digamma, gammaln

    reach = cKDTree(places).query(places, k + 1)[0][:, k]
    if np.any(reach <= 0):
        raise ValueError(f"cloud must hold particles at different places, got {k + 1} at one place")
    logs = dimension * np.log(reach)
    ball = 0.5 * dimension * np.log(np.pi) - gammaln(0.5 * dimension + 1)
    entropy = digamma(k) - digamma(places.shape[0]) - ball - logs.mean()
    return float(entropy), float(logs.std(ddof=1) / np.sqrt(places.shape[0]))
