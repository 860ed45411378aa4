"""The coordinate check: how network and preactivations scale with the width, from one sweep."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float

from meanflow import _checks
from meanflow._checks import number, unchecked
from meanflow._numerics import loglog_slope
from meanflow.flows._features import TwoLayer
from meanflow.flows._flow import FLOW, Flow
from meanflow.measures._cloud import Cloud
from meanflow.measures._dataset import DATA, Dataset
from meanflow.sweeps._networks import WIDTHS, Counts, sweep
from meanflow.sweeps._plan import SEEDS
from meanflow.sweeps._results import failed


class CoordinateCheck(NamedTuple):
    """Root mean squares over samples, neurons and seeds for each width, and their exponents in the width.

    Attributes:
        widths: (k,).
        output: of f at the start, (k,).
        change: of the change of f until the end, (k,).
        preactivation: of the change of b . x until the end, (k,).
        slopes: exponents in the width, by those three names. Mean field, which is the maximal update parametrization of
            two layers, has -1/2, 0, 0; the NTK scaling alpha = sqrt(m) has 0, 0, -1/2.
    """

    widths: Float[np.ndarray, " k"]
    output: Float[np.ndarray, " k"]
    change: Float[np.ndarray, " k"]
    preactivation: Float[np.ndarray, " k"]
    slopes: dict[str, float]


def _sizes(flow: Flow, cloud: Cloud, data: Dataset, start: Cloud) -> dict[str, jax.Array]:
    feature = flow.feature
    assert isinstance(feature, TwoLayer)
    x = data.x
    if feature.bias:
        x = jnp.concatenate([x, jnp.ones_like(x[:, :1])], axis=1)
    first, last = (feature.predict(one, data.x) for one in (start, cloud))
    turn = x @ (cloud.particles.b - start.particles.b).T
    return {
        "output": jnp.mean(first**2),
        "change": jnp.mean((last - first) ** 2),
        "preactivation": jnp.mean(jnp.sum(turn**2 * cloud.weights[None, :], axis=1)),
    }


@_checks.arguments(
    flow=FLOW,
    data=DATA,
    widths=WIDTHS,
    seeds=SEEDS,
    t1=number(above=0),
    settings=unchecked("sweep checks each of them"),
)
def coordinate_check(
    flow: Flow, data: Dataset, *, widths: Counts, seeds: int | Counts = 4, t1: float = 1.0, **settings: Any
) -> CoordinateCheck:
    """Fit how f_0, the change of f and the change of b . x grow with the width, on the clock on which f moves alike.

    Args:
        flow: a two-layer flow without batch norm.
        data: training data.
        widths: at least two widths.
        seeds: number of random starts of each width.
        t1: end time on the lazy clock (mean-field time for alpha = m).
        settings: further arguments of ``sweep``, such as ``step``.

    >>> import jax, jax.numpy as jnp, meanflow as mf
    >>> x = jax.random.normal(jax.random.key(0), (8, 3))
    >>> found = mf.sweeps.coordinate_check(mf.vanilla("tanh"), mf.Dataset(x, x[:, 0]), widths=[8, 32], step=0.25)
    >>> sorted(found.slopes)
    ['change', 'output', 'preactivation']
    """
    if type(flow.feature) is not TwoLayer:
        raise ValueError(
            f"flow must be a vanilla two-layer flow, got the feature {type(flow.feature).__name__}"
        )
    known = sorted({int(w) for w in widths})
    if len(known) < 2:
        raise ValueError(f"widths must hold at least two different widths, got {list(widths)}")
    seen = {"check": _sizes} | dict.fromkeys(flow.observables(data))
    # a name mapped to None is left out
    found = sweep(flow, data, widths=known, seeds=seeds, t1=t1, ts=[t1], observe=seen, **settings)
    lost = failed(found)
    if bool(lost.any()):
        raise ValueError(f"t1 must be reached by all runs, got {int(lost.sum())} of {lost.size} that failed")
    rms = {
        name: np.sqrt(found[f"check_{name}"].isel(time=-1).mean("seed").values)
        for name in ("output", "change", "preactivation")
    }
    numbers = np.asarray(known, float)
    slopes = {name: loglog_slope(numbers, values) for name, values in rms.items()}
    return CoordinateCheck(numbers, **rms, slopes=slopes)
