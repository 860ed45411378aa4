"""A solution as a labelled data set: save times, energies, observables and neurons under their names."""

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING

import jax
import numpy as np

from meanflow._observable import Observables
from meanflow.files import versions
from meanflow.solvers._solution import RESULTS, Solution

if TYPE_CHECKING:  # slow to import
    import xarray

_Variable = tuple[str, str, tuple[str, ...], jax.Array]  # name, where it comes from, axes, values
AXES = "axes of "  # how the axes of an observable are kept among the names of the settings


def axis_names(observe: Observables | None) -> tuple[tuple[str, str], ...]:
    """Return the names of the axes of what is observed, in the form in which ``Settings`` keep names."""
    if observe is None:
        return ()
    named = observe if isinstance(observe, Mapping) else {"observed": observe}
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
    found: list[_Variable] = [("energy", "energy", ("time",), solution.energy)]
    for path, name, value in _leaves("observed", solution.observed):
        own = _own_axes(path, name, value.ndim - 1, given)
        found.append((name, _source("observed", path), ("time", *own), value))
    if solution.clouds is not None:
        for path, name, value in _leaves("particles", solution.clouds.particles):
            own = tuple(f"{name}_{k}" for k in range(value.ndim - 2))
            found.append((name, _source("clouds.particles", path), ("time", "particle", *own), value))
        for name in ("weights", "labels"):  # weights move where there is reaction
            value = getattr(solution.clouds, name)
            if value is not None:
                found.append((name, f"clouds.{name}", ("time", "particle"), value))
    variables: dict[str, tuple[tuple[str, ...], np.ndarray]] = {}
    sources = {"time": "ts"}
    for name, source, dims, value in found:
        if name in sources:
            raise ValueError(
                f"to_xarray needs a name for each variable, got {name!r} for {sources[name]} and for {source}; "
                "name one of them differently"
            )
        sources[name] = source
        variables[name] = (dims, np.asarray(value))
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


def _leaves(name: str, tree: object) -> list[tuple[jax.tree_util.KeyPath, str, jax.Array]]:
    """Return the arrays of a pytree with their ways into it, and these joined by underscores as their names."""
    found = jax.tree_util.tree_flatten_with_path(tree)[0]
    join = jax.tree_util.keystr
    return [(path, join(path, simple=True, separator="_") or name, leaf) for path, leaf in found]


def _source(name: str, path: jax.tree_util.KeyPath) -> str:
    return name + jax.tree_util.keystr(path)


def _own_axes(path: jax.tree_util.KeyPath, name: str, count: int, given: dict[str, str]) -> tuple[str, ...]:
    """Return names for the axes of an observable behind the save axis: its own, else made from its name."""
    observable = jax.tree_util.keystr(path[:1], simple=True)  # the parts of one that is a dict share its axes
    axes = given.get(AXES + observable, given.get(AXES + "observed", "")).split()
    if len(axes) >= count:  # names at the end stand for axes that not every model has
        return tuple(axes[:count])
    return tuple(f"{name}_{k}" for k in range(count))
