"""A solution as a labelled data set: save times, energies, observables and neurons under their names."""

import json
from typing import TYPE_CHECKING

import jax
import numpy as np

from meanflow.flows.observables import Observable
from meanflow.solvers.solution import RESULTS, Solution, versions

if TYPE_CHECKING:  # slow to import
    import xarray

AXES = "axes of "  # how the axes of an observable are kept among the names of the settings


def axis_names(observe: Observable | dict[str, Observable] | None) -> tuple[tuple[str, str], ...]:
    """Return the names of the axes of what is observed, in the form in which ``Settings`` keep names."""
    if observe is None:
        return ()
    named = observe if isinstance(observe, dict) else {"observed": observe}
    return tuple((AXES + name, " ".join(one.dims)) for name, one in named.items() if one.dims)


def as_dataset(solution: Solution) -> "xarray.Dataset":
    """Return the data set behind ``Solution.to_xarray``."""
    import xarray

    if solution.ts.ndim != 1:
        raise ValueError(
            f"to_xarray needs a single run, got save times of shape {solution.ts.shape}; take one of the batch "
            "first, for instance with jax.tree.map(lambda u: u[0], sol)"
        )
    given = dict(solution.settings.names)
    variables: dict[str, tuple[tuple[str, ...], np.ndarray]] = {
        "energy": (("time",), np.asarray(solution.energy))
    }
    for name, value in _named("observed", solution.observed).items():
        variables[name] = (("time", *_own_axes(name, value.ndim - 1, given)), value)
    if solution.clouds is not None:
        for name, value in _coordinates(solution.clouds.particles).items():
            own = tuple(f"{name}_{k}" for k in range(value.ndim - 2))
            variables[name] = (("time", "particle", *own), value)
        for name in ("weights", "labels"):
            value = getattr(solution.clouds, name)
            if value is not None:
                variables[name] = (("particle",), np.asarray(value[0]))
    attributes = {
        "title": "meanflow run",
        "clock": given.get("clock", ""),
        "settings": json.dumps({n: text for n, text in given.items() if not n.startswith(AXES)}),
        "numbers": json.dumps({n: np.asarray(u).tolist() for n, u in solution.settings.numbers.items()}),
        "stats": json.dumps({n: np.asarray(u).tolist() for n, u in solution.stats.items()}),
        "ok": int(np.asarray(solution.ok)),
        "message": RESULTS[solution.result],  # type: ignore[misc]
        "versions": json.dumps(versions()),
    }
    return xarray.Dataset(variables, {"time": np.asarray(solution.ts)}, attributes)


def _named(name: str, tree: object) -> dict[str, np.ndarray]:
    """Return the arrays of a pytree by names that join their way into it by underscores."""
    found = {}
    for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]:
        way = jax.tree_util.keystr(path, simple=True, separator="_")
        found[way or name] = np.asarray(leaf)
    return found


def _own_axes(name: str, count: int, given: dict[str, str]) -> tuple[str, ...]:
    """Return names for the axes of an observable behind the save axis: its own, else made from its name."""
    parts = name.split("_")
    for k in range(len(parts), 0, -1):  # the parts of an observable that is a dict share its axes
        axes = given.get(AXES + "_".join(parts[:k]), given.get(AXES + "observed", "")).split()
        if len(axes) >= count:  # names at the end stand for axes that not every model has
            return tuple(axes[:count])
    return tuple(f"{name}_{k}" for k in range(count))


def _coordinates(particles: object) -> dict[str, np.ndarray]:
    return _named("particles", particles)
