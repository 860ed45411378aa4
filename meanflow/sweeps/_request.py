"""Sweeps written down as tables, for configuration files and the command line.

    store = "runs/regimes"

    [flow]
    name = "lifted"            # any model of the package; further keys are its arguments
    alpha = "sqrt"

    [data]
    name = "sine"              # or file = "data.npz" with arrays x and y, or x = [...], y = [...]
    points = 20

    [grid]
    widths = [50, 100, 200]
    deltas = [-inf, -10, 0, 10, inf]
    seeds = 4

    [run]
    steps = 2000
    every = 200
    step = {kernel = 0.2}      # or a number, or {rtol = 1e-6} for adaptive steps
    observe = ["default", "neurons"]    # some names, "default" for the usual ones; neurons for the animation
    dynamics = {temperature = 0.1}      # noise; or {reaction = 1.0}, with conserve = false for free mass
    batches = {size = 10}      # minibatches

Every table is checked: an unknown or misspelt key is an error that names the nearest known one.
"""

import dataclasses
import difflib
import inspect
import pathlib
import tomllib
from collections.abc import Callable, Iterable, Mapping
from typing import Annotated, TypeAlias

import numpy as np
from jaxtyping import ArrayLike, Float

from meanflow import _boundary
from meanflow._boundary import FilePath, checked, function
from meanflow._identity import Json
from meanflow.flows import _models as models
from meanflow.flows._flow import Flow
from meanflow.measures._dataset import Dataset
from meanflow.solvers._batches import Batches
from meanflow.solvers._dynamics import Noise, Reaction
from meanflow.solvers._step import Adaptive, KernelStep
from meanflow.sweeps._networks import Sweep
from meanflow.sweeps._plan import Execution
from meanflow.sweeps._store import StoreError, read_config
from meanflow.sweeps._sweep import sweep
from meanflow.univariate import _models as univariate

FLOWS: dict[str, Callable[..., Flow]] = {
    make.__name__: make
    for make in (
        *(models.vanilla, models.batchnorm, models.batchnorm_manifold),
        *(univariate.canonical, univariate.lifted, univariate.planar, univariate.radial, univariate.full),
    )
}
# whose further arguments a constructor passes on
OPTIONS: dict[str, Callable[..., Flow]] = {
    "batchnorm_manifold": models.batchnorm,
    "planar": univariate.lifted,
    "radial": univariate.lifted,
}
Stop: TypeAlias = Annotated[Callable[[], bool], function]


def shard_kind(name: str, value: object) -> tuple[int, int]:
    """Accept (k, n) with 0 <= k < n."""
    if not isinstance(value, tuple | list) or len(value) != 2:
        raise ValueError(f"{name} must be two integers (k, n), got {_boundary.show(value)}")
    count = _boundary.whole(f"{name}[1]", value[1], 1)
    return _boundary.whole(f"{name}[0]", value[0], 0, count - 1), count


TABLES = ("store", "flow", "data", "grid", "run", "mesh")
DATA_KEYS = ("name", "points", "dim", "seed", "file", "x", "y", "weights")
GRID_KEYS = ("widths", "deltas", "scales", "seeds", "axes")
RUN_KEYS = (
    *("t1", "ts", "steps", "every", "step", "solver", "clock", "steady", "dynamics", "batches"),
    *("observe", "chunk", "waste", "key", "precision"),
)
PRECISIONS = ("float32", "float64")


def read_request(path: str | pathlib.Path) -> Json:
    """Return the tables of a TOML file, checked."""
    path = pathlib.Path(path)
    try:
        tables = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as problem:
        raise ValueError(f"configuration {path} cannot be read: {problem}") from problem
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as problem:
        raise ValueError(f"configuration {path} is not valid TOML: {problem}") from problem
    return check_request(tables)


def check_request(tables: Json) -> Json:
    """Return a copy of the tables; refuse unknown tables and keys, and what is missing."""
    _known("configuration", tables, TABLES)
    for name in ("flow", "data", "grid", "run"):
        if not isinstance(tables.get(name), Mapping):
            raise ValueError(f"configuration needs the table [{name}]")
    flow = tables["flow"]
    if (name := flow.get("name")) not in FLOWS:
        raise ValueError(f"flow.name must be one of {sorted(FLOWS)}, got {name!r}{_near(name, FLOWS)}")
    makers = FLOWS[name], OPTIONS.get(name, FLOWS[name])
    _known("[flow]", flow, ("name", *(key for make in makers for key in inspect.signature(make).parameters)))
    _known("[data]", tables["data"], DATA_KEYS)
    _known("[grid]", tables["grid"], GRID_KEYS)
    _known("[run]", tables["run"], RUN_KEYS)
    _known("[mesh]", tables.get("mesh", {}), ("sweep", "particles"))
    if not isinstance(tables.get("store", ""), str):
        raise ValueError(f"store must be the name of a directory, got {tables['store']!r}")
    # everything else has a default
    if "widths" not in tables["grid"]:
        raise ValueError("[grid] needs widths, a list of integers")
    _boundary.one_of("run.precision", tables["run"].get("precision", "float64"), PRECISIONS)
    # a copy: what is filled in later must not reach the tables of the caller
    return {name: dict(t) if isinstance(t, Mapping) else t for name, t in tables.items()}


def build(request: Json) -> Sweep:
    """Return the plan of the sweep that a checked request describes; it keeps the request for its store."""
    flow = dict(request["flow"])
    make = FLOWS[flow.pop("name")]
    run = {k: v for k, v in request["run"].items() if k != "precision" and v is not None}
    for name, build_one in SETTINGS.items():
        if isinstance(run.get(name), Mapping):
            run[name] = build_one(f"run.{name}", dict(run[name]))
    grid = dict(request["grid"])
    for name in ("deltas", "scales"):
        given = grid.get(name, [])
        if not isinstance(given, list) or not all(type(v) in (int, float) for v in given):
            raise ValueError(f"grid.{name} must be a list of numbers, got {given!r}")
    if "scales" in grid:
        grid["axes"] = {"scale": grid.pop("scales")} | grid.get("axes", {})
    mesh = request.get("mesh", {})
    execution = Execution(
        **{name: run.pop(name) for name in ("chunk", "waste") if name in run},
        mesh=(mesh.get("sweep"), mesh.get("particles", 1)) if mesh else None,
    )
    data = named_data(**request["data"])
    plan = sweep(make(**flow), data, execution=execution, compute=False, **grid, **run)
    return dataclasses.replace(plan, request=dict(request))


def stored_request(store: str | pathlib.Path) -> Json:
    """Return the tables that the plan of a store was made from."""
    request = read_config(store).get("request")
    if request is None:
        raise StoreError(
            f"store {store} was not planned from a configuration, and a store runs no code: let every job run the same "
            "script, which calls meanflow.sweep with this store"
        )
    return check_request(request)


@checked
def work(
    store: FilePath, *, shard: Annotated[tuple[int, int], shard_kind] = (0, 1), stop: Stop | None = None
) -> bool:
    """Take part in a planned sweep until it is whole: claim chunks, compute them and store them.

    Any number of workers do this at the same time, on any number of hosts. The sweep is what ``meanflow plan`` or
    ``meanflow sweep`` has written down. One with functions of the user is shared by calling ``meanflow.sweep`` with the
    same store in every process.

    Args:
        store: run directory with a plan.
        shard: (k, n) for every n-th chunk, beginning with number k, and no others.
        stop: function that says whether to stop now. It is asked several times a second. What this worker has claimed
            is given back then, and the chunk that it is computing is lost.

    Returns:
        Whether all chunks, or those of the shard, are finished.
    """
    return build(stored_request(store)).work(store, shard=shard, stop=stop)


def _step(where: str, table: Json) -> KernelStep | Adaptive:
    """Return the rule behind {kernel = kappa, every = n} or {rtol = r, atol = a}."""
    keys = ("kernel", "every") if "kernel" in table else ("rtol", "atol")
    if not table or "every" in table and "kernel" not in table:
        raise ValueError(
            f"{where} must be a number, {{kernel = kappa, every = n}} or {{rtol = r, atol = a}}, got {table}"
        )
    _known(where, table, (*keys, "max_steps"))
    return KernelStep(table.pop("kernel"), **table) if "kernel" in table else Adaptive(**table)


def _dynamics(where: str, table: Json) -> Noise | Reaction:
    """Return the dynamics behind {temperature = tau} or {reaction = beta, conserve = true}."""
    if ("temperature" in table) == ("reaction" in table):
        raise ValueError(f"{where} must hold one of temperature and reaction, got {table}")
    _known(where, table, ("temperature",) if "temperature" in table else ("reaction", "conserve"))
    return Noise(**table) if "temperature" in table else Reaction(table.pop("reaction"), **table)


def _batches(where: str, table: Json) -> Batches:
    """Return the minibatches behind {size = n, replace = false, statistics = "frozen"}."""
    _known(where, table, ("size", "replace", "statistics"))
    if "size" not in table:
        raise ValueError(f"{where} needs a size, got {table}")
    return Batches(**table)


# settings that are tables
SETTINGS = {"step": _step, "dynamics": _dynamics, "batches": _batches}


def named_data(
    name: str | None = None,
    *,
    points: int | None = None,
    dim: int = 2,
    seed: int = 0,
    file: str | None = None,
    x: Float[ArrayLike, "n *d"] | None = None,
    y: Float[ArrayLike, "n"] | None = None,
    weights: str | Float[ArrayLike, "n"] | None = None,
) -> Dataset:
    """Return training data by name, from a file, or as given.

    Args:
        name: ``"sine"`` (sin 2 pi x on [-1, 1]), ``"square"`` (the square wave of "univariate ReLU"), or ``"ridge"``
            (x normal in ``dim`` dimensions with variances 5, 1, ..., 1; y = |x_1|).
        points: number of samples of a named set.
        dim, seed: of ``"ridge"``.
        file: .npz file with arrays x, y and perhaps weights.
        x, y: the data themselves.
        weights: ``"sum"``, an array, or None for an average; univariate named sets are sums by default.
    """
    given = [k for k, v in (("name", name), ("file", file), ("x", x)) if v is not None]
    if len(given) != 1:
        raise ValueError(f"[data] needs exactly one of name, file and x with y, got {given or 'none'}")
    if file is not None:
        return _read_data(file, weights)
    if x is not None:
        if y is None:
            raise ValueError("[data] needs y beside x, got none")
        read = _boundary.array(rank=1)
        return Dataset(read("data.x", x), read("data.y", y), weights)
    _boundary.one_of("data.name", name, ("ridge", "sine", "square"))
    count = _boundary.whole(
        "data.points", {"sine": 20, "square": 10}.get(str(name), 100) if points is None else points, 1
    )
    if name == "ridge":
        dim, seed = _boundary.whole("data.dim", dim, 1), _boundary.whole("data.seed", seed, 0)
        # numpy's generator: a named data set must not depend on the precision or the version of jax
        normal = np.random.default_rng(seed).normal(size=(count, dim))
        normal[:, 0] *= np.sqrt(5.0)
        return Dataset(normal, np.abs(normal[:, 0]), weights)
    inputs, wave = np.linspace(-1, 1, count), np.array([1.0, 1, 1, -1, -1, -1, 1, 1, 1, -1])
    if name == "square" and count != wave.size:
        raise ValueError(f"data.points of the square wave must be {wave.size}, got {points}")
    targets = wave if name == "square" else np.sin(2 * np.pi * inputs)
    return Dataset(inputs, targets, "sum" if weights is None else weights)


def _read_data(file: str, weights: str | Float[ArrayLike, "n"] | None) -> Dataset:
    """Return the data in a file of numpy with arrays x, y and perhaps weights."""
    try:
        # opened here, since np.load would leave a damaged file open
        with open(_boundary.path("data.file", file), "rb") as raw, np.load(raw, allow_pickle=False) as arrays:
            stored = dict(arrays)
    except Exception as problem:  # damaged archives raise whatever they like
        raise ValueError(
            f"data.file {file} cannot be read as .npz: {type(problem).__name__}: {problem}"
        ) from problem
    if not {"x", "y"} <= set(stored):
        raise ValueError(f"data.file {file} must hold x and y, got {sorted(stored)}")
    return Dataset(stored["x"], stored["y"], stored.get("weights", weights))


def _known(where: str, table: object, allowed: tuple[str, ...]) -> None:
    """Refuse what is no table, and keys that are not among the allowed ones."""
    if not isinstance(table, Mapping):
        raise ValueError(f"{where} must be a table, got {table!r}")
    for key in table:
        if key not in allowed:
            raise ValueError(
                f"{where} has no key {key!r}{_near(key, allowed)}; allowed are {sorted(allowed)}"
            )


def _near(word: object, allowed: Iterable[str]) -> str:
    """Return a question that names the allowed word nearest to a misspelt one; "" if there is none."""
    close = difflib.get_close_matches(str(word), list(allowed), 1)
    return f" (did you mean {close[0]!r}?)" if close else ""
