"""Solutions on disk: one .npz file of plain arrays with a JSON header; nothing in it can run code.

The header describes how arrays make up the solution. Records of particles are stored by the name of their type and
found again among the package's own, those given to ``load``, and those of modules that are imported already: reading a
file never imports anything.
"""

import json
import pathlib
import sys
from collections.abc import Sequence
from typing import TypeVar

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

from meanflow._files import atomic_write
from meanflow.measures._cloud import Affine, BatchNormNeurons, Cloud, Neurons, Polar
from meanflow.solvers._solution import RESULTS, Settings, Solution, State, code_numbers, versions

FORMAT = 3
PARTS = ("ts", "energy", "clouds", "observed", "final", "state", "stats", "settings")
Kind = TypeVar("Kind", bound=Solution)


def write_solution(solution: Solution, path: pathlib.Path) -> pathlib.Path:
    """Write a solution and return the path of its file; a crash never leaves half a file under that name."""
    path = _with_suffix(path)
    arrays: dict[str, np.ndarray] = {}
    layout = {name: _describe(getattr(solution, name), name, arrays) for name in PARTS}
    names = {number: name for name, number in code_numbers().items()}
    numbers = np.asarray(solution.result._value)  # the integer behind the enumeration
    layout["result"] = np.vectorize(lambda n: names[int(n)], otypes=[object])(numbers).tolist()
    header = json.dumps({"format": FORMAT, "layout": layout, "versions": versions()})
    arrays["header"] = np.frombuffer(header.encode(), np.uint8)
    with atomic_write(path) as part:
        np.savez(part, **arrays)  # type: ignore[arg-type]
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
        header = json.loads(arrays["header"].tobytes().decode())
        layout = header["layout"]
    except Exception as problem:  # damaged archives raise whatever they like
        raise ValueError(
            f"path must name a file written by Solution.save, got {path}: {problem}"
        ) from problem
    if header.get("format") != FORMAT:
        wrote = header.get("versions", {}).get("meanflow", "of an unknown version")
        raise ValueError(
            f"{path} has format {header.get('format')}, written by meanflow {wrote}; this version reads format "
            f"{FORMAT}: read the file with the version that wrote it, or run again"
        )
    parts = {name: _restore(layout[name], arrays, records) for name in PARTS}
    numbers = code_numbers()
    named = layout.pop("result")
    unknown = {name for name in np.ravel(named).tolist() if name not in numbers}
    if unknown:
        raise ValueError(f"{path} has the result code {sorted(unknown)}, which this version does not know")
    code = np.vectorize(numbers.__getitem__, otypes=[np.int32])(np.asarray(named, object))
    result = eqx.tree_at(lambda r: r._value, RESULTS.successful, jnp.asarray(code))
    return kind(**parts, result=result)  # type: ignore[arg-type]


def _with_suffix(path: pathlib.Path) -> pathlib.Path:
    """Append .npz to a name that does not end with it; ``with_suffix`` would turn run_0.1 into run_0.npz."""
    return path if path.name.endswith(".npz") else path.with_name(f"{path.name}.npz")


def _type_name(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


def _find_record(name: str, fields: list[str], records: Sequence[type]) -> type:
    own = (Neurons, BatchNormNeurons, Polar, Affine)
    known = {_type_name(kind): kind for kind in (*own, *records)}
    module, _, qualname = name.rpartition(".")
    found = known.get(name, getattr(sys.modules.get(module), qualname, None))
    if not isinstance(found, type) or list(getattr(found, "_fields", ())) != fields:
        raise ValueError(
            f"the file holds particles of type {name} with fields {fields}, which is not known here; "
            "import its module first, or pass records=[the type] to Solution.load"
        )
    return found


def _describe(node: object, name: str, arrays: dict[str, np.ndarray]) -> object:
    """Return a JSON layout of ``node``; its arrays go into ``arrays`` under dotted names."""
    if node is None:
        return None
    if isinstance(node, Cloud):
        fields = ("particles", "weights", "labels", "width")
        return {"cloud": {f: _describe(getattr(node, f), f"{name}.{f}", arrays) for f in fields}}
    if isinstance(node, Settings):
        return {
            "settings": _describe(node.numbers, name, arrays),
            "names": [list(pair) for pair in node.names],
        }
    if isinstance(node, State):
        return {"state": [_describe(v, f"{name}.{k}", arrays) for k, v in node._asdict().items()]}
    if isinstance(node, tuple) and hasattr(node, "_fields"):
        values = [_describe(v, f"{name}.{k}", arrays) for k, v in zip(node._fields, node, strict=True)]
        return {"record": _type_name(type(node)), "fields": list(node._fields), "values": values}
    if isinstance(node, dict):
        return {"dict": {k: _describe(v, f"{name}.{k}", arrays) for k, v in node.items()}}
    if isinstance(node, tuple | list):
        return {"tuple": [_describe(v, f"{name}.{i}", arrays) for i, v in enumerate(node)]}
    arrays[name] = np.asarray(node)
    return name


def _restore(node: object, arrays: dict[str, np.ndarray], records: Sequence[type]) -> object:
    if node is None:
        return None
    if isinstance(node, str):
        return _as_stored(node, arrays[node])
    assert isinstance(node, dict)
    if "cloud" in node:
        parts = {k: _restore(v, arrays, records) for k, v in node["cloud"].items()}
        return _cloud(**parts)
    if "settings" in node:
        numbers = _restore(node["settings"], arrays, records)
        return Settings(numbers, tuple((k, v) for k, v in node["names"]))  # type: ignore[arg-type]
    if "state" in node:
        return State(*(_restore(v, arrays, records) for v in node["state"]))  # type: ignore[arg-type]
    if "record" in node:
        kind = _find_record(node["record"], node["fields"], records)
        return kind(*(_restore(v, arrays, records) for v in node["values"]))
    if "dict" in node:
        return {k: _restore(v, arrays, records) for k, v in node["dict"].items()}
    return tuple(_restore(v, arrays, records) for v in node["tuple"])


def _as_stored(name: str, array: np.ndarray) -> jax.Array:
    """Return the array in the precision in which it was stored, or refuse: half of its digits must not vanish."""
    if array.dtype == np.float64 and jnp.result_type(float) != np.float64:
        raise ValueError(
            f"{name} was stored in float64, which is switched off; "
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
