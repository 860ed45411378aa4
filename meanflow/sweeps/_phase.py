"""Phase diagrams: how observables scale with the width, over the output scale, the balance and the initial scale."""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Key, Num
from scipy import optimize

from meanflow import _checks
from meanflow.flows._flow import Flow
from meanflow.measures._cloud import Cloud, Polar
from meanflow.measures._dataset import DATA, Dataset
from meanflow.solvers._step import KernelStep
from meanflow.sweeps import _results as results
from meanflow.sweeps._networks import sweep
from meanflow.sweeps._plan import FINITE, NUMBERS, SEEDS
from meanflow.univariate._models import lifted

if TYPE_CHECKING:  # slow to import
    import xarray

COLLAPSE = ("a", "a_error", "b", "b_error", "quality", "raw")
NO_OVERLAP = 1e6
VARIABLES = ("angle_displacement", "kernel_drift", "energy")


def sweep_result(name: str, value: object) -> object:
    """Accept an ``xarray.Dataset``, such as ``sweep`` returns."""
    import xarray

    return _checks.instance(xarray.Dataset, hint="pass what sweep returned")(name, value)


NAMES = _checks.sequence(_checks.text)
LEVEL = _checks.optional(_checks.number(above=0.0))


@_checks.arguments(
    data=DATA,
    widths=_checks.sequence(_checks.count(1), least=2),
    alphas=FINITE,
    deltas=_checks.optional(NUMBERS),
    scales=_checks.optional(FINITE),
    seeds=SEEDS,
    variables=NAMES,
    level=LEVEL,
    init=_checks.optional(_checks.function),
    settings=_checks.unchecked("sweep checks each of them"),
)
def phase_diagram(
    data: Dataset,
    *,
    widths: Sequence[int],
    alphas: Sequence[float] = (0.0, 0.5, 1.0),
    deltas: Sequence[float] | None = None,
    scales: Sequence[float] | None = None,
    seeds: int | Sequence[int] = 4,
    variables: Sequence[str] = VARIABLES,
    level: float | None = None,
    init: Callable[..., Cloud] | None = None,
    **settings: Any,
) -> "xarray.Dataset":
    """Fit exponents in the width of univariate ReLU networks with output scale alpha(m) = m^alpha.

    One sweep over width x alpha x delta x scale x seed of ``lifted`` flows, on the lazy clock, so that all cells
    are compared at the same stage of training; the exponent itself is a number of the program, not a reason to compile.

    By default weights are of order one at every width, |c| |(a, b)| = 1, as in networks that people train: neurons of
    amplitude r = +-m/alpha, in pairs of opposite sign, so that f_0 = 0 (widths must be even), with uniform directions.
    Then all weights move by O(alpha/m) and the exponent of the turn is alpha - 1: lazy below 1, feature learning at 1.
    A start whose r does not know alpha shows none of this: at delta = 0 alpha then drops out of the equations.

    Args:
        data: training data.
        widths: at least two.
        alphas: exponents: 1 is the mean-field scale, 1/2 the NTK scale, 0 no normalisation.
        deltas: as in ``sweep``; None for balanced neurons, delta = 0.
        scales, seeds, settings: as in ``sweep``. Without ``steps`` and ``t1``, 600 steps of ``KernelStep(0.5)``, saved
            every 10 steps.
        init: (key, width, **axes) -> Cloud instead of the start above; it may take ``alpha``, the exponent.
        variables: observables whose final values are fitted; ``"t"`` is the time of the comparison.
        level: compare runs where their loss falls to this fraction of its start, interpolated between saves, and not
            at the end. Neurons go on turning after the fit, faster in the adaptive regime, so a common end time
            flattens the exponents; a common loss gives those of the theory. Runs that never get there are left out.

    Returns:
        ``xarray.Dataset`` of ``fit_exponents``: for each variable the exponent, its standard error and the prefactor,
        over (alpha, delta, scale); the sweep itself under ``sweep_<name>``. With three or more finite ``deltas`` also
        the finite-size collapse along delta, ``collapse_<name>`` over (alpha, scale), with the numbers of ``collapse``.
    """
    named = [name for name in variables if name not in ("energy", "t")]
    if "steps" not in settings and "t1" not in settings:
        settings = {"steps": 600, "every": 10, "step": KernelStep(0.5)} | settings
    runs = sweep(
        _scaled,
        data,
        widths=widths,
        axes={"alpha": [float(a) for a in alphas]},
        deltas=(0.0,) if deltas is None else deltas,
        scales=scales,
        seeds=seeds,
        init=_unit_weights if init is None else init,
        observe=named,
        **settings,
    )
    fitted = fit_exponents(runs, variables, level)
    ends = {name: _compared(runs, name, level) for name in variables}
    more = {f"sweep_{name}": value for name, value in ends.items()}
    if all(_can_collapse(value, "delta") for value in ends.values()):
        more |= {f"collapse_{name}": _collapsed(value) for name, value in ends.items()}
    return fitted.assign(more).assign_attrs(runs.attrs)


def _collapsed(value: "xarray.DataArray") -> "xarray.DataArray":
    """Return the numbers of ``COLLAPSE`` for final values over (width, delta, seed) and further axes, which stay."""
    import xarray

    found = xarray.apply_ufunc(
        _collapse,
        value.width,
        value.delta,
        value,
        input_core_dims=[["width"], ["delta"], ["width", "delta", "seed"]],
        output_core_dims=[["number"]],
        vectorize=True,
    )
    return found.assign_coords(number=list(COLLAPSE))


def _scaled(width: float | Num[Array, ""], alpha: float | Num[Array, ""]) -> Flow:
    """Return the model with output scale width^alpha."""
    return lifted(alpha=width**alpha)


def _unit_weights(key: Key[Array, ""], width: int, alpha: float) -> Cloud:
    """Return neurons with |c| |(a, b)| = 1, in pairs c = +-1, and uniform directions; their labels are set later."""
    if width % 2:
        raise ValueError(f"widths must be even for neurons that start in pairs, got {width}; or pass init=")
    theta = jax.random.uniform(key, (width // 2,), minval=-jnp.pi, maxval=jnp.pi)
    sign = jnp.where(jnp.arange(width) % 2 == 0, 1.0, -1.0)
    return Cloud(Polar(width ** (1.0 - alpha) * sign, jnp.repeat(theta, 2)))


def _final(runs: "xarray.Dataset", name: str) -> "xarray.DataArray":
    """Return the last save of a variable; failed cells become NaN."""
    return results.final(runs, name).where(~results.failed(runs))


def _compared(runs: "xarray.Dataset", name: str, level: float | None) -> "xarray.DataArray":
    """Return the value with which a run enters a fit; NaN for runs that failed or never reached the level."""
    if level is None:
        return _final(runs, name)
    along = next(d for d in ("time", "step") if d in runs.energy.dims)
    import xarray

    found = xarray.apply_ufunc(
        _at_level,
        runs.energy,
        runs[name],
        input_core_dims=[[along], [along]],
        kwargs={"level": level},
        vectorize=True,
    )
    return found.where(~results.failed(runs))


def _at_level(energy: np.ndarray, value: np.ndarray, level: float) -> float:
    """Return ``value`` where ``energy`` first falls to ``level`` times its start, linear in log energy."""
    below = np.flatnonzero(energy <= level * energy[0])
    if not below.size:
        return np.nan
    k = int(below[0])
    if k == 0:
        return float(value[0])
    before, after = np.log(energy[k - 1]), np.log(max(energy[k], np.finfo(float).tiny))
    share = (before - np.log(level * energy[0])) / (before - after)
    return float(value[k - 1] + share * (value[k] - value[k - 1]))


@_checks.arguments(runs=sweep_result, variables=NAMES, level=LEVEL)
def fit_exponents(
    runs: "xarray.Dataset", variables: Sequence[str] = VARIABLES, level: float | None = None
) -> "xarray.Dataset":
    """Fit value ~ prefactor * width^exponent at the end of every run of a sweep, or where its loss reaches ``level``.

    The logarithms are averaged over seeds and fitted by least squares over widths. The standard error joins the scatter
    of the fit around a power law (three widths or more) with the scatter over seeds (two or more).

    Args:
        runs: a data set of ``sweep``.
        variables: names of scalar observables; values must be positive (zero gives NaN: no power law).
        level: fraction of the initial loss at which runs are compared, as in ``phase_diagram``; None for the end.

    Returns:
        ``exponent_<name>``, ``error_<name>`` and ``prefactor_<name>`` over the other axes of the sweep.

    >>> import numpy as np, xarray
    >>> widths = np.array([10, 20, 40])
    >>> runs = xarray.Dataset(
    ...     {"speed": (("width", "seed"), 3.0 / widths[:, None]), "result": (("width", "seed"), np.zeros((3, 1)))},
    ...     {"width": widths},
    ... )
    >>> round(float(fit_exponents(runs, ["speed"]).exponent_speed), 6)
    -1.0
    """
    import xarray

    if runs.sizes.get("width", 0) < 2:
        raise ValueError("runs must hold at least two widths")
    fitted = {}
    for name in variables:
        if name not in runs:
            raise ValueError(f"variables must be among {sorted(map(str, runs.data_vars))}, got {name!r}")
        value = _compared(runs, name, level)
        logs: Any = np.log(value.where(value > 0))  # a DataArray again, which numpy's types do not say
        other = [d for d in logs.dims if d not in ("width", "seed")]
        slope, error, prefactor = xarray.apply_ufunc(
            _fit,
            np.log(logs.width.astype(float)),
            logs,
            input_core_dims=[["width"], ["width", "seed"]],
            output_core_dims=[[], [], []],
            vectorize=True,
        )
        fitted[f"exponent_{name}"] = slope.transpose(*other)
        fitted[f"error_{name}"] = error.transpose(*other)
        fitted[f"prefactor_{name}"] = prefactor.transpose(*other)
    return xarray.Dataset(fitted)


def _fit(x: np.ndarray, logs: np.ndarray) -> tuple[float, float, float]:
    """Return slope, its standard error and exp(intercept) of the seed means of ``logs`` (width, seed) against ``x``."""
    good = np.isfinite(logs).all(axis=0)  # a seed counts if it succeeded at every width
    if not good.any():
        return np.nan, np.nan, np.nan
    logs = logs[:, good]
    centered = x - x.mean()
    weight = centered / np.sum(centered**2)
    slopes = weight @ logs
    slope, mean = float(slopes.mean()), logs.mean(axis=1)
    rest = mean - mean.mean() - slope * centered
    error = np.sum(rest**2) / (len(x) - 2) * np.sum(weight**2) if len(x) > 2 else 0.0
    if slopes.size > 1:
        error += slopes.var(ddof=1) / slopes.size
    known = len(x) > 2 or slopes.size > 1
    return slope, float(np.sqrt(error)) if known else np.nan, float(np.exp(mean.mean() - slope * x.mean()))


def collapse(
    runs: "xarray.Dataset",
    variable: str = "angle_displacement",
    *,
    along: str = "delta",
    level: float | None = None,
) -> dict[str, float]:
    """Fit the finite-size collapse: exponents (a, b) with value * m^b a function of along * m^a alone.

    The curves of all widths are put on one another: (a, b) minimise the mean square deviation, in logarithms of the
    value, of the points of each width from the interpolated curve of every other width, where they overlap.
    For neurons of fixed r the theory predicts the scaling variable k = delta m/(2 alpha |r|).

    Args:
        runs: a data set of ``sweep`` in which only width, seed and ``along`` vary.
        variable: a positive observable.
        along: the axis; infinite values are left out.
        level: fraction of the initial loss at which runs are compared, as in ``phase_diagram``; None for the end.

    Returns:
        ``a`` and ``b`` with standard errors ``a_error`` and ``b_error`` (jackknife over seeds; NaN for a single one),
        ``quality`` (rms deviation of the logarithms) and ``raw`` (the same without rescaling). NaN if no exponents make
        the curves overlap.
    """
    value = _compared(runs, variable, level).squeeze(
        [d for d in runs.result.dims if d not in ("width", "seed", along) and runs.sizes[d] == 1], drop=True
    )
    if set(value.dims) != {"width", "seed", along}:
        raise ValueError(f"runs must vary along width, seed and {along} only, got the axes {value.dims}")
    if not _can_collapse(value, along):
        raise ValueError(f"a collapse needs two widths and three finite values of {along}")
    numbers = _collapse(
        value.width.values, value[along].values, value.transpose("width", along, "seed").values
    )
    return dict(zip(COLLAPSE, map(float, numbers), strict=True))


def _can_collapse(value: "xarray.DataArray", along: str) -> bool:
    return value.sizes["width"] >= 2 and int(np.isfinite(value[along].values).sum()) >= 3


def _collapse(widths: np.ndarray, control: np.ndarray, values: np.ndarray) -> np.ndarray:
    """Return the numbers of ``COLLAPSE`` for ``values`` (width, along, seed)."""
    order = np.argsort(control)
    order = order[np.isfinite(control[order])]
    m, control = np.log(widths.astype(float)), control[order]
    with np.errstate(divide="ignore", invalid="ignore"):
        logs = np.where(values > 0, np.log(values), np.nan)[:, order]
    starts = [np.array([a, b]) for a in (-0.5, 0.0, 0.5) for b in (0.0, 0.5)]
    best, quality = _best_overlap(m, control, _seed_mean(logs), starts)
    if not quality < NO_OVERLAP:
        return np.full(len(COLLAPSE), np.nan)
    raw = _gap(np.zeros(2), m, control, _seed_mean(logs))
    seeds, error = logs.shape[2], np.full(2, np.nan)
    if seeds > 1:
        without = [_seed_mean(np.delete(logs, k, axis=2)) for k in range(seeds)]
        found = np.array([_best_overlap(m, control, some, [best])[0] for some in without])
        error = np.sqrt((seeds - 1) * found.var(axis=0))
    return np.array([best[0], error[0], best[1], error[1], np.sqrt(quality), np.sqrt(raw)])


def _seed_mean(logs: np.ndarray) -> np.ndarray:
    """Return the mean over the last axis of what is finite, NaN where nothing is."""
    good = np.isfinite(logs)
    count = good.sum(axis=-1)
    return np.where(count > 0, np.where(good, logs, 0.0).sum(axis=-1) / np.maximum(count, 1), np.nan)


def _best_overlap(
    m: np.ndarray, control: np.ndarray, curves: np.ndarray, starts: Sequence[np.ndarray]
) -> tuple[np.ndarray, float]:
    """Return the exponents with the least gap between curves (width, along), and that gap."""
    options = {"xatol": 1e-4, "fatol": 1e-10}
    found = [
        optimize.minimize(_gap, s, (m, control, curves), method="Nelder-Mead", options=options)
        for s in starts
    ]
    best = min(found, key=lambda r: r.fun)
    return best.x, float(best.fun)


def _gap(p: np.ndarray, m: np.ndarray, control: np.ndarray, curves: np.ndarray) -> float:
    """Return the mean square deviation of the rescaled curves from one another, at exponents p = (a, b)."""
    rows = [np.flatnonzero(np.isfinite(row)) for row in curves]
    places = [
        np.arcsinh(control[row] * np.exp(np.clip(p[0] * (m[k] - m.mean()), -200, 200)))
        for k, row in enumerate(rows)
    ]
    heights = [curves[k, row] + p[1] * m[k] for k, row in enumerate(rows)]
    gaps = []
    for i in range(len(rows)):
        for j in range(len(rows)):
            if i == j or len(places[j]) < 2 or not len(places[i]):
                continue
            inside = (places[i] >= places[j][0]) & (places[i] <= places[j][-1])
            gaps.append(heights[i][inside] - np.interp(places[i][inside], places[j], heights[j]))
    joined = np.concatenate(gaps) if gaps else np.array([])
    # an exponent so large that no curves overlap explains nothing
    return float(np.mean(joined**2)) if joined.size >= len(control) else NO_OVERLAP
