"""Solutions on disk: one .npz file of plain arrays with a JSON header; nothing in it can run code.

The header describes how arrays make up the solution. Records of particles are stored by the name of their type, which
is looked up among the package's own records and those given to ``load``: a file never decides which code is called.
"""

import functools
import json
import operator
import pathlib
import re
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

from meanflow import _checks
from meanflow._files import atomic_write
from meanflow._identity import Json
from meanflow.flows._problem import Weighted
from meanflow.measures._cloud import Affine, BatchNormNeurons, Cloud, Neurons, Polar
from meanflow.solvers._solution import RESULTS, Settings, Solution, State, code_numbers, versions

FORMAT = 3
OWN = (Neurons, BatchNormNeurons, Polar, Affine, Weighted)  # records that every file may hold
PARTS = ("ts", "energy", "clouds", "observed", "final", "state", "stats", "settings")
CLOUD = ("particles", "weights", "labels", "width")
TREE = jax.Array | tuple | list | dict
KINDS = {  # what a file must hold, whatever its header says
    **dict.fromkeys(("ts", "energy", "final.weights", "final.width"), jax.Array),
    **dict.fromkeys(("state.t", "state.steps", "state.data"), jax.Array),
    **dict.fromkeys(("final.particles", "state.y"), TREE),
    **dict.fromkeys(("stats", "settings.numbers", "state.settings.numbers"), dict),
    "clouds": Cloud | None,
    "state.start": Cloud,
    "state.offset": Cloud | None,
    "final.labels": jax.Array | None,
    "state.leaves": tuple,
}
Kind = TypeVar("Kind", bound=Solution)
Records = Mapping[str, Any]  # NamedTuple classes by name, which have no type of their own


class _Refusal(ValueError):
    """A whole file that cannot be read here, as opposed to a damaged one."""


def write_solution(solution: Solution, path: pathlib.Path) -> pathlib.Path:
    """Write a solution and return the path of its file; a crash never leaves half a file under that name."""
    path = _with_suffix(path)
    layout, arrays = _describe_parts(solution)
    names = {number: name for name, number in code_numbers().items()}
    numbers = np.asarray(solution.result._value)  # the integer behind the enumeration
    layout["result"] = np.vectorize(lambda n: names[int(n)], otypes=[object])(numbers).tolist()
    header = json.dumps({"format": FORMAT, "layout": layout, "versions": versions()})
    plain = {name: np.asarray(value) for name, value in arrays.items()}
    with atomic_write(path) as part:
        np.savez(part, header=np.frombuffer(header.encode(), np.uint8), **plain)  # type: ignore[arg-type]
    return path


def read_solution(kind: type[Kind], path: pathlib.Path, records: Sequence[type]) -> Kind:
    """Read a solution that ``write_solution`` wrote; ValueError says what is wrong with any other file."""
    path = _with_suffix(path)
    if not path.exists():
        raise ValueError(f"path must name a saved solution, got {path}, which does not exist")
    try:
        # opened here: numpy leaves a file open that it cannot read
        with open(path, "rb") as raw, np.load(raw, allow_pickle=False) as file:
            arrays = dict(file)
        header = json.loads(arrays.pop("header").tobytes().decode())
        form, layout = header["format"], header["layout"]
    except Exception as problem:  # damaged archives raise whatever they like
        raise ValueError(
            f"path must name a file written by Solution.save, got {path}: {type(problem).__name__}: {problem}"
        ) from problem
    if form != FORMAT:
        wrote = header.get("versions")
        wrote = (
            wrote.get("meanflow", "of an unknown version")
            if isinstance(wrote, dict)
            else "of an unknown version"
        )
        raise ValueError(
            f"{path} has format {_checks.show(form)}, written by meanflow {wrote}; this version reads format "
            f"{FORMAT}: read the file with the version that wrote it, or run again"
        )
    known = {_type_name(record): record for record in (*OWN, *records)}
    try:
        return _build(kind, layout, arrays, known)
    except _Refusal as problem:
        raise ValueError(f"{path} {problem}") from None
    except Exception as problem:  # so do damaged headers
        raise ValueError(f"{path} is damaged: {type(problem).__name__}: {problem}") from problem


def _with_suffix(path: pathlib.Path) -> pathlib.Path:
    """Append .npz to a name that does not end with it; ``with_suffix`` would turn run_0.1 into run_0.npz."""
    return path if path.name.endswith(".npz") else path.with_name(f"{path.name}.npz")


def _type_name(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


def _describe_parts(solution: Solution) -> tuple[Json, dict[str, object]]:
    """Return the JSON layout of a solution without its result, and its arrays by name."""
    arrays: dict[str, object] = {}
    return {name: _describe(getattr(solution, name), name, arrays) for name in PARTS}, arrays


def _describe(node: object, name: str, arrays: dict[str, object]) -> object:
    """Return a JSON layout of ``node``; its arrays go into ``arrays`` under dotted names."""
    inside = lambda key, value: _describe(value, f"{name}.{key}", arrays)
    if node is None:
        return None
    if isinstance(node, Cloud):
        return {"cloud": [inside(key, getattr(node, key)) for key in CLOUD]}
    if isinstance(node, Settings):
        return {"settings": _describe(node.numbers, name, arrays), "names": [list(u) for u in node.names]}
    if isinstance(node, State):
        return {"state": [inside(key, value) for key, value in node._asdict().items()]}
    if isinstance(node, tuple) and hasattr(node, "_fields"):
        values = [inside(key, value) for key, value in zip(node._fields, node, strict=True)]
        return {"record": _type_name(type(node)), "fields": list(node._fields), "values": values}
    if type(node) is dict and all(type(key) in (str, int) for key in node):
        return {"dict": [[key, inside(key, value)] for key, value in node.items()]}
    if isinstance(node, tuple | list):  # no others are nodes of a pytree
        return {type(node).__name__: [inside(k, value) for k, value in enumerate(node)]}
    dtype = node.dtype if isinstance(node, jax.Array) else np.asarray(node).dtype
    if getattr(dtype, "kind", "O") not in "biufc":  # numpy would pickle it, or lose its type
        raise ValueError(
            f"{name} must be an array of numbers, or tuples, lists and dicts of them with keys that are texts or "
            f"integers, got {_checks.show(node)}, which cannot be saved"
        )
    name = re.sub(r"[^\w.]", "_", name)  # an archive changes some characters of its names
    while name in arrays:  # {"a.b": u, "a": {"b": v}}
        name += "_"
    arrays[name] = node
    return name


def _build(kind: type[Kind], layout: Json, arrays: Mapping[str, np.ndarray], known: Records) -> Kind:
    """Return the solution of a layout; any exception but ``_Refusal`` means that the layout is damaged."""
    parts: Json = {name: _restore(layout[name], arrays, known) for name in PARTS}
    numbers = code_numbers()
    named = layout["result"]
    unknown = {name for name in np.ravel(named).tolist() if name not in numbers}
    if unknown:
        raise _Refusal(f"has the result code {sorted(unknown)}, which this version does not know")
    code = np.vectorize(numbers.__getitem__, otypes=[np.int32])(np.asarray(named, object))
    result = eqx.tree_at(lambda r: r._value, RESULTS.successful, jnp.asarray(code))
    solution = kind(**parts, result=result)
    for place, wanted in KINDS.items():
        found = operator.attrgetter(place)(solution)
        if not isinstance(found, wanted):
            raise TypeError(f"{place} is described as {_checks.show(found)}")
    state = solution.state
    held = (solution.stats, solution.settings.numbers, state.settings.numbers, dict(enumerate(state.leaves)))
    if not all(isinstance(value, jax.Array) for part in held for value in part.values()):
        raise TypeError("stats, settings and state.leaves must hold arrays alone")
    if code.shape != state.t.shape:
        raise TypeError(f"result has shape {code.shape}, the runs have {state.t.shape}")
    kinds = {jax.tree.structure(cloud) for cloud in (solution.final, solution.clouds) if cloud is not None}
    if len(kinds) > 1:
        raise TypeError("clouds and final are not of one kind")
    # what else may be wrong, such as arrays in another's place: it would not be described in this way
    again, used = _describe_parts(solution)
    if again | {"result": named} != layout or used.keys() != arrays.keys():
        raise TypeError("the header does not describe the arrays")
    return solution


def _restore(node: object, arrays: Mapping[str, np.ndarray], known: Records) -> Any:
    inside = functools.partial(_restore, arrays=arrays, known=known)
    match node:
        case None:
            return None
        case str():
            return _as_stored(node, arrays[node])
        case {"cloud": list(parts)}:
            return _cloud(*map(inside, parts))
        case {"settings": numbers, "names": list(names)}:
            return Settings(inside(numbers), tuple((str(k), str(v)) for k, v in names))
        case {"state": list(parts)}:
            return State(*map(inside, parts))
        case {"record": str(name), "fields": list(fields), "values": list(values)}:
            return _find_record(name, fields, known)._make(map(inside, values))
        case {"dict": list(pairs)}:
            return {key: inside(value) for key, value in pairs}
        case {"list": list(items)}:
            return [inside(item) for item in items]
        case {"tuple": list(items)}:
            return tuple(inside(item) for item in items)
    raise TypeError(f"{_checks.show(node)} describes no part of a solution")


def _find_record(name: str, fields: list[object], known: Records) -> Any:
    found = known.get(name)
    if found is None or list(found._fields) != fields:
        raise _Refusal(
            f"holds a record {name} with fields {fields}, which is not known here; pass records=[...] with this "
            "NamedTuple to Solution.load"
        )
    return found


def _as_stored(name: str, array: np.ndarray) -> jax.Array:
    """Return the array in the precision in which it was stored, or refuse: half of its digits must not vanish."""
    if array.dtype == np.float64 and jnp.result_type(float) != np.float64:
        raise _Refusal(
            f"holds {name}, which was stored in float64, which is switched off; "
            "call jax.config.update('jax_enable_x64', True) before loading"
        )
    return jnp.asarray(array)


def _cloud(particles: object, weights: object, labels: object, width: object) -> Cloud:
    """Build a cloud of stored parts, which may be stacked over save times and are therefore not checked again."""
    blank = Cloud(Polar(jnp.zeros(1), jnp.zeros(1)))
    parts = (particles, weights, labels, width)
    return eqx.tree_at(
        lambda c: (c.particles, c.weights, c.labels, c.width), blank, parts, is_leaf=lambda x: x is None
    )
