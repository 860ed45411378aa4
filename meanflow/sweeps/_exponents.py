"""How observables scale with the width: exponents and their errors, phase diagrams, the coordinate check."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Key, Num
from scipy import optimize

from meanflow import _boundary
from meanflow._boundary import Positive, checked, count, function, sequence, text, unchecked
from meanflow._numerics import loglog_slope
from meanflow.flows._features import TwoLayer
from meanflow.flows._flow import Flow
from meanflow.measures._cloud import Cloud, Polar
from meanflow.measures._dataset import Dataset
from meanflow.solvers._step import KernelStep
from meanflow.sweeps import _grid as grids
from meanflow.sweeps._plan import SEEDS, Seeds
from meanflow.sweeps._sweep import AMPLITUDES, BALANCES, Counts, sweep
from meanflow.univariate._models import lifted

if TYPE_CHECKING:  # slow to import
    import xarray

COLLAPSE = ("a", "a_error", "b", "b_error", "quality", "raw")
NO_OVERLAP = 1e6  # stands for the deviation of curves that do not overlap
SIZES = ("output", "change", "preactivation")
VARIABLES = ("angle_displacement", "kernel_drift", "energy")


def sweep_result(name: str, value: object) -> object:
    """Accept an ``xarray.Dataset``, such as ``sweep`` returns."""
    import xarray

    return _boundary.instance(xarray.Dataset, hint="pass what sweep returned")(name, value)


Names = Annotated[Sequence[str], sequence(text)]


@checked
def phase_diagram(
    data: Dataset,
    *,
    widths: Annotated[Sequence[int], sequence(count(1), least=2)],
    alphas: Annotated[Sequence[float], AMPLITUDES] = (0.0, 0.5, 1.0),
    deltas: Annotated[Sequence[float], BALANCES] = (0.0,),
    seeds: Seeds = 4,
    init: Annotated[Callable[..., Cloud] | None, function] = None,
    variables: Names = VARIABLES,
    level: Positive | None = None,
    **settings: Annotated[Any, unchecked("sweep checks each of them")],
) -> "xarray.Dataset":
    """Fit exponents in the width of univariate ReLU networks with output scale alpha(m) = m^alpha.

    One sweep over width x delta x alpha x further axes x seed of ``lifted`` flows, on the lazy clock, so that all cells
    are compared at the same stage of training; the exponent itself is a number of the program, not a reason to compile.

    By default weights are of order one at every width, |c| |(a, b)| = 1, as in networks that people train: neurons of
    amplitude r = +-m/alpha, in pairs of opposite sign, so that f_0 = 0 (widths must be even), with uniform directions.
    Then all weights move by O(alpha/m) and the exponent of the turn is alpha - 1: lazy below 1, feature learning at 1.
    A start whose r does not know alpha shows none of this: at delta = 0 alpha then drops out of the equations.

    Args:
        data: training data.
        widths: at least two.
        alphas: exponents: 1 is the mean-field scale, 1/2 the NTK scale, 0 no normalisation.
        deltas: balances as in ``sweep``; 0 are balanced neurons.
        seeds: number of seeds, or their list.
        init: (key, width, **axes) -> Cloud instead of the start above; it may take ``alpha``, the exponent.
        variables: observables whose final values are fitted; ``"t"`` is the time of the comparison.
        level: compare runs where their loss falls to this fraction of its start, interpolated between saves, and not
            at the end. Neurons go on turning after the fit, faster in the adaptive regime, so a common end time
            flattens the exponents; a common loss gives those of the theory. Runs that never get there are left out.
        settings: further arguments of ``sweep``, such as ``axes={"scale": [0.5, 2.0]}``. Without ``steps`` and ``t1``,
            600 steps of ``KernelStep(0.5)``, saved every 10 steps.

    Returns:
        ``xarray.Dataset`` of ``fit_exponents``: for each variable the exponent, its standard error, the prefactor and
        what kept it from being fitted, over (delta, alpha, ...); the sweep itself under ``sweep_<name>``. With three or
        more finite ``deltas`` also the finite-size collapse along delta, ``collapse_<name>`` over (alpha, ...), with
        the numbers of ``COLLAPSE``.
    """
    if "steps" not in settings and "t1" not in settings:
        settings = {"steps": 600, "every": 10, "step": KernelStep(0.5)} | settings
    runs = sweep(
        _scaled,
        data,
        widths=widths,
        deltas=deltas,
        axes={"alpha": [float(a) for a in alphas], **settings.pop("axes", {})},
        seeds=seeds,
        init=_unit_weights if init is None else init,
        observe=[name for name in variables if name not in ("energy", "t")],
        compute=True,
        **settings,
    )
    ends = {name: _compared(runs, name, level) for name in variables}
    more = {f"sweep_{name}": value for name, value in ends.items()}
    if np.isfinite(runs.delta).sum() >= 3:
        more |= {f"collapse_{name}": collapse(value) for name, value in ends.items()}
    return fit_exponents(runs, variables, level).assign(more).assign_attrs(runs.attrs)


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


def _compared(runs: "xarray.Dataset", name: str, level: float | jax.Array | None) -> "xarray.DataArray":
    """Return the value with which a run enters a fit; NaN for runs that failed or never reached the level."""
    import xarray

    found = grids.final(runs, name)
    if level is not None:
        series = runs.energy, runs[name]
        along = [list({"time", "step"} & set(runs.energy.dims))] * 2
        found = xarray.apply_ufunc(partial(_at_level, level), *series, input_core_dims=along, vectorize=True)
    return found.where(~grids.failed(runs))


def _at_level(level: float | jax.Array, energy: np.ndarray, value: np.ndarray) -> float:
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


@checked
def fit_exponents(
    runs: Annotated["xarray.Dataset", sweep_result],
    variables: Names = VARIABLES,
    level: Positive | None = None,
) -> "xarray.Dataset":
    """Fit value ~ prefactor * width^exponent at the end of every run of a sweep, or where its loss reaches ``level``.

    The logarithms are averaged over seeds and fitted by least squares over widths. The standard error joins the scatter
    of the fit around a power law (three widths or more) with the scatter over seeds (two or more).

    Args:
        runs: a data set of ``sweep``.
        variables: names of scalar observables; only positive values can be fitted.
        level: fraction of the initial loss at which runs are compared, as in ``phase_diagram``; None for the end.

    Returns:
        ``exponent_<name>``, ``error_<name>`` and ``prefactor_<name>`` over the other axes of the sweep. Where no seed
        can be fitted these are NaN, ``problem_<name>`` says why, and a warning lists the cells.

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
    fitted: dict[str, Any] = {}
    for name in variables:
        if name not in runs:
            raise ValueError(f"variables must be among {sorted(map(str, runs.data_vars))}, got {name!r}")
        value, failed = _compared(runs, name, level), grids.failed(runs)
        other = [d for d in value.dims if d not in ("width", "seed")]
        found = xarray.apply_ufunc(
            _fit,
            np.log(value.width.astype(float)),
            value,
            failed,
            input_core_dims=[["width"], ["width", "seed"], ["width", "seed"]],
            output_core_dims=[[], [], [], []],
            vectorize=True,
            output_dtypes=[float, float, float, object],
        )
        for kind, part in zip(("exponent", "error", "prefactor", "problem"), found, strict=True):
            fitted[f"{kind}_{name}"] = part.transpose(*other)
        _warn(name, fitted[f"problem_{name}"])
    return xarray.Dataset(fitted)


def _fit(x: np.ndarray, value: np.ndarray, failed: np.ndarray) -> tuple[float, float, float, str]:
    """Fit the seed means of log(value) (width, seed) against ``x``.

    Returns:
        Slope, its standard error, exp(intercept), and what kept it from being fitted ("" if nothing did).
    """
    positive = value > 0  # NaN is not
    good = positive.all(axis=0)  # a seed counts if it succeeded at every width
    if not good.any():
        counts = {
            "failed": failed.sum(),
            "have no value (they never reached the level?)": (np.isnan(value) & ~failed).sum(),
            "have a value that is not positive": (~positive & ~np.isnan(value)).sum(),
        }
        listed = ", ".join(f"{count} {what}" for what, count in counts.items() if count)
        return np.nan, np.nan, np.nan, f"no seed can be fitted at every width: of {value.size} runs {listed}"
    logs, centered = np.log(value[:, good]), x - x.mean()
    weight = centered / np.sum(centered**2)
    slopes = weight @ logs
    slope, mean = float(slopes.mean()), logs.mean(axis=1)
    rest = mean - mean.mean() - slope * centered
    error = np.sum(rest**2) / (len(x) - 2) * np.sum(weight**2) if len(x) > 2 else 0.0
    if slopes.size > 1:
        error += slopes.var(ddof=1) / slopes.size
    known = len(x) > 2 or slopes.size > 1
    prefactor = float(np.exp(mean.mean() - slope * x.mean()))
    return slope, float(np.sqrt(error)) if known else np.nan, prefactor, ""


def _warn(name: str, problems: "xarray.DataArray") -> None:
    """Say which cells have no exponent of a variable, and why."""
    lost = []
    for one in map(problems.__getitem__, np.ndindex(problems.shape)):
        where = ", ".join(f"{d} = {one[d].item()}" for d in problems.dims) or "all runs"
        lost += [f"{where}: {one.item()}"] if one.item() else []
    if lost:
        listed = "\n  ".join(lost[:8])
        warnings.warn(
            f"{len(lost)} of {problems.size} exponents of {name} are NaN:\n  {listed}", stacklevel=3
        )


def collapse(value: "xarray.DataArray") -> "xarray.DataArray":
    """Fit the finite-size collapse along delta: exponents (a, b) with value * m^b a function of delta * m^a alone.

    The curves of all widths are put on one another: (a, b) minimise the mean square deviation, in logarithms of the
    value, of the points of each width from the interpolated curve of every other width, where they overlap.
    For neurons of fixed r the theory predicts the scaling variable k = delta m/(2 alpha |r|).

    Args:
        value: positive values over (width, delta, seed) and further axes, which stay; infinite deltas are left out.

    Returns:
        Along the axis ``number``: ``a`` and ``b`` with standard errors ``a_error`` and ``b_error`` (jackknife over
        seeds; NaN for a single one), ``quality`` (rms deviation of the logarithms) and ``raw`` (the same without
        rescaling). NaN if no exponents make the curves overlap.
    """
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


def _collapse(widths: np.ndarray, control: np.ndarray, values: np.ndarray) -> np.ndarray:
    """Return the numbers of ``COLLAPSE`` for ``values`` (width, delta, seed)."""
    order = np.argsort(control)
    order = order[np.isfinite(control[order])]
    m, control = np.log(widths.astype(float)), control[order]
    logs = np.ma.log(np.ma.masked_invalid(values[:, order]))  # what is not positive is left out
    curves = logs.mean(axis=2).filled(np.nan)
    starts = [np.array([a, b]) for a in (-0.5, 0.0, 0.5) for b in (0.0, 0.5)]
    best, quality = _best_overlap(m, control, curves, starts)
    if not quality < NO_OVERLAP:
        return np.full(len(COLLAPSE), np.nan)
    raw = _gap(np.zeros(2), m, control, curves)
    seeds, error = values.shape[2], np.full(2, np.nan)
    if seeds > 1:
        without = [np.delete(np.arange(seeds), k) for k in range(seeds)]
        means = [logs[:, :, rest].mean(axis=2).filled(np.nan) for rest in without]
        found = np.array([_best_overlap(m, control, some, [best])[0] for some in means])
        error = np.sqrt((seeds - 1) * found.var(axis=0))
    return np.array([best[0], error[0], best[1], error[1], np.sqrt(quality), np.sqrt(raw)])


def _best_overlap(
    m: np.ndarray, control: np.ndarray, curves: np.ndarray, starts: Sequence[np.ndarray]
) -> tuple[np.ndarray, float]:
    """Return the exponents with the least gap between curves (width, along), and that gap."""
    options = {"xatol": 1e-4, "fatol": 1e-10}
    given = (m, control, curves)
    found = [optimize.minimize(_gap, s, given, method="Nelder-Mead", options=options) for s in starts]
    best = min(found, key=lambda r: r.fun)
    return best.x, float(best.fun)


def _gap(p: np.ndarray, m: np.ndarray, control: np.ndarray, curves: np.ndarray) -> float:
    """Return the mean square deviation of the rescaled curves from one another, at exponents p = (a, b)."""
    points = []
    for k, curve in enumerate(curves):
        row = np.flatnonzero(np.isfinite(curve))
        stretched = control[row] * np.exp(np.clip(p[0] * (m[k] - m.mean()), -200, 200))
        points.append((np.arcsinh(stretched), curve[row] + p[1] * m[k]))
    gaps = [np.array([])]
    for (x, y), (others, heights) in itertools.permutations(points, 2):
        if len(others) >= 2:
            inside = (x >= others[0]) & (x <= others[-1])
            gaps.append(y[inside] - np.interp(x[inside], others, heights))
    joined = np.concatenate(gaps)
    # an exponent so large that no curves overlap explains nothing
    return float(np.mean(joined**2)) if joined.size >= len(control) else NO_OVERLAP


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
    """Return the squares whose roots ``CoordinateCheck`` holds."""
    feature, x = flow.feature, data.x
    assert isinstance(feature, TwoLayer)
    first, last = (feature.predict(one, x) for one in (start, cloud))
    if feature.bias:
        x = jnp.concatenate([x, jnp.ones_like(x[:, :1])], axis=1)
    turn = x @ (cloud.particles.b - start.particles.b).T
    means = jnp.mean(first**2), jnp.mean((last - first) ** 2), jnp.mean(turn**2 @ cloud.weights)
    return dict(zip(SIZES, means, strict=True))


@checked
def coordinate_check(
    flow: Flow,
    data: Dataset,
    *,
    widths: Counts,
    seeds: Annotated[int | Counts, SEEDS] = 4,
    t1: Positive = 1.0,
    **settings: Annotated[Any, unchecked("sweep checks each of them")],
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
    lost = grids.failed(found)
    if bool(lost.any()):
        raise ValueError(f"t1 must be reached by all runs, got {int(lost.sum())} of {lost.size} that failed")
    rms = {name: np.sqrt(found[f"check_{name}"][:, :, -1].mean("seed").values) for name in SIZES}
    numbers = np.asarray(known, float)
    slopes = {name: loglog_slope(numbers, values) for name, values in rms.items()}
    return CoordinateCheck(numbers, **rms, slopes=slopes)
