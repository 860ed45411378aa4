"""The regime map of univariate ReLU networks as one sweep ("univariate ReLU", figure 5 and section 1.2)."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import meanflow as mf
from meanflow.experiments.outcome import Criterion, Outcome

DELTAS = (-np.inf, -100.0, -10.0, 0.0, 10.0, 100.0, np.inf)
OBSERVED = ("angle_displacement", "concentration", "on_sample_share", "predictions")


def square_law(key: jax.Array, width: int) -> mf.Cloud:
    """Angles of (a, b) uniform on a square, r uniform on (-3, 3)."""
    a, b, r = jax.random.uniform(key, (3, width), minval=-1.0, maxval=1.0)
    return mf.Cloud(mf.Polar(3 * r, jnp.arctan2(-b, a)))


def regime_map(
    widths: tuple[int, ...] = (200,),
    deltas: tuple[float, ...] = DELTAS,
    seeds: int = 6,
    steps: int = 10_000,
    every: int | None = None,
    observe: Mapping[str, Any] | None = None,
    **run: Any,
) -> Outcome:
    """Kernel, intermediate and adaptive regime of 20 samples of sin(2 pi x), alpha = sqrt m, kappa = 0.2.

    Args:
        widths: the criteria are those of width 200, which must be among them.
        deltas: must contain -inf, -100, -10, 0, 100 and inf.
        seeds, steps: of each cell.
        every: steps between saves; default start and end only.
        observe: observables to record beside those of the criteria.
        run: further arguments of ``sweep``, such as ``store``.
    """
    x = np.linspace(-1, 1, 20)
    data = mf.Dataset(x, np.sin(2 * np.pi * x), "sum")
    flow = mf.lifted(alpha="sqrt")
    defaults = flow.observables(data)
    ds = mf.sweep(
        flow,
        data,
        widths=widths,
        deltas=deltas,
        seeds=seeds,
        init=square_law,
        steps=steps,
        every=steps if every is None else every,
        step=mf.KernelStep(0.2),
        observe={name: None for name in defaults if name not in OBSERVED} | dict(observe or {}),
        **run,
    )
    end = ds.sel(width=200).median("seed")
    start, end = end.isel(step=0), end.isel(step=-1)

    def at(name: str, delta: float) -> float:
        return float(end[name].sel(delta=delta))

    frozen = float(np.abs(end.on_sample_share - start.on_sample_share).sel(delta=-np.inf))
    return Outcome(
        "004/figure-5-map",
        "delta << 0 is the kernel regime, delta >> 0 the adaptive one, with a smooth passage between them",
        "true; the passage lies between delta = -100 and 10, and neurons turn by 0.5 at most on both adaptive values",
        {"runs": ds, "samples": data},
        (
            Criterion("failed runs", float((ds.result != 0).sum()), 0, 0),
            Criterion("turn at -inf", at("angle_displacement", -np.inf), 0, 0),
            Criterion("change of on-sample share at -inf", frozen, 0, 0),
            Criterion("turn at -100 (sheet .0019)", at("angle_displacement", -100.0), 0.001, 0.004),
            Criterion("on-sample share at -100", at("on_sample_share", -100.0), 0, 0.2),
            Criterion("turn at -10 (sheet .067)", at("angle_displacement", -10.0), 0.04, 0.1),
            Criterion("turn at 0 (sheet .20)", at("angle_displacement", 0.0), 0.15, 0.25),
            Criterion("turn at 100 (sheet .49)", at("angle_displacement", 100.0), 0.4, 0.6),
            Criterion("turn at inf (sheet .49)", at("angle_displacement", np.inf), 0.4, 0.6),
            Criterion("concentration at -inf (sheet .34)", at("concentration", -np.inf), 0.25, 0.45),
            Criterion("concentration at -10 (sheet .79)", at("concentration", -10.0), 0.65, 0.9),
            Criterion("concentration at 0 (sheet .999)", at("concentration", 0.0), 0.95),
            Criterion("concentration at 100", at("concentration", 100.0), 0.99),
            Criterion("concentration at inf", at("concentration", np.inf), 0.99),
            Criterion("on-sample share at inf", at("on_sample_share", np.inf), 0.85),
        ),
    )
