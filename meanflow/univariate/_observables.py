"""What is worth recording about a univariate ReLU network: predictions on a grid, and where its knots are."""

from typing import TYPE_CHECKING, cast

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from meanflow._boundary import concrete
from meanflow._numerics import safe_divide
from meanflow._observable import Observable
from meanflow.flows._observables import FunctionObservable, Predictions
from meanflow.measures._cloud import Affine, Cloud
from meanflow.measures._dataset import Dataset
from meanflow.univariate import knots

if TYPE_CHECKING:
    from meanflow.flows._flow import Flow
    from meanflow.univariate._features import Univariate


def neurons(flow: "Flow", cloud: Cloud) -> Affine:
    """Return the neurons of a univariate flow as c relu(a x - b)."""
    return cast("Univariate", flow.feature).affine(cloud)


def _knots(a: Float[Array, " m"], b: Float[Array, " m"]) -> Float[Array, " m"]:
    """Return b/a, where a neuron bends; infinite for one that is constant in x."""
    return jnp.where(a != 0, safe_divide(b, a), jnp.inf)


def concentration(flow: "Flow", cloud: Cloud, data: Dataset) -> Float[Array, ""]:
    """Return which share of sum |c a| is in the 8 fullest of 110 bins over the data, and 5 % beyond at each end."""
    a, b, c = neurons(flow, cloud)
    low, high = jnp.min(data.x), jnp.max(data.x)
    # the paper's samples fill [-1, 1] and its window is [-1.1, 1.1]
    place = 2 * (_knots(a, b) - low) / (high - low) - 1
    return knots.concentration(place, cloud.weights * jnp.abs(c * a), 8)


def on_sample_share(flow: "Flow", cloud: Cloud, data: Dataset) -> Float[Array, ""]:
    """Return the share of the knots within 5 % of the mean spacing of a sample; see ``univariate.knots``."""
    a, b, _ = neurons(flow, cloud)
    real = (cloud.weights > 0).astype(a.dtype)
    x = jnp.sort(data.x)
    spacing = (x[-1] - x[0]) / jnp.maximum(data.real - 1, 1)  # padding repeats a sample
    return knots._share_near(_knots(a, b), x, real, spacing)


def dead_share(flow: "Flow", cloud: Cloud, data: Dataset) -> Float[Array, ""]:
    """Return the share of the neurons that are active on no sample."""
    a, b, _ = neurons(flow, cloud)
    return knots.dead_share(a, b, data.x, weights=cloud.weights)


def slope_variation(flow: "Flow", cloud: Cloud, data: Dataset) -> Float[Array, ""]:
    """Return the total variation of f', equation (17) of "univariate ReLU"; coinciding knots are merged."""
    a, b, c = neurons(flow, cloud)
    return knots.total_variation(knots.piecewise_linear(a, b, c, weights=cloud.weights))


def prediction_grid(data: Dataset, points: int = 101) -> Float[Array, " {points}"]:
    """Return inputs for predictions, equispaced over the range of the data and 10 % beyond at each end."""
    known = concrete(data.x)
    # on the host, where the inputs are known: nothing is compiled for it
    array = jnp if known is None else np
    low, high = (pick(data.x if known is None else known) for pick in (array.min, array.max))
    margin = 0.1 * (high - low)
    return jnp.asarray(array.linspace(low - margin, high + margin, points), data.x.dtype)


def univariate_observables(data: Dataset) -> dict[str, Observable]:
    """Return the observables of univariate flows, by name."""
    grid = prediction_grid(data)
    chosen: dict[str, Observable] = {
        "predictions": Predictions(grid, dims=("x",), coords={"x": grid}, about="f on a grid"),
        "dead_share": FunctionObservable(dead_share, about="share of neurons active on no sample"),
        "slope_variation": FunctionObservable(slope_variation, about="total variation of f'", usual=False),
    }
    if data.size > 1:
        chosen["on_sample_share"] = FunctionObservable(
            on_sample_share, about="share of knots at a sample", usual=False
        )
        chosen["concentration"] = FunctionObservable(
            concentration, about="share of sum |c a| in the 8 fullest of 110 bins", usual=False
        )
    return chosen
