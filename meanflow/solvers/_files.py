"""Solutions on disk: the format of ``meanflow.files``, with clouds, settings and states as nodes of their own."""

import operator
import pathlib
from collections.abc import Sequence
from typing import Any, TypeVar

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

from meanflow import _boundary
from meanflow._identity import Json
from meanflow._trees import Refusal, Tree
from meanflow.files import read_arrays, write_arrays
from meanflow.flows._problem import Weighted
from meanflow.measures._cloud import Affine, BatchNormNeurons, Cloud, Neurons, Polar
from meanflow.solvers._solution import RESULTS, Settings, Solution, State, code_numbers, outcomes

FORMAT = 5  # 4 held states without the energy record and the rounding of the time
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


class _Parts(Tree):
    """Knows clouds, settings and states beside plain pytrees."""

    def describe(self, node: Any, name: str) -> Any:
        if isinstance(node, Cloud):
            return {"cloud": self.describe_all({key: getattr(node, key) for key in CLOUD}, name)}
        if isinstance(node, Settings):
            return {"settings": self.describe(node.numbers, name), "names": [list(u) for u in node.names]}
        if isinstance(node, State):
            return {"state": self.describe_all(node._asdict(), name)}
        return super().describe(node, name)

    def restore(self, layout: Any) -> Any:
        match layout:
            case {"cloud": list(parts)}:
                return _cloud(*map(self.restore, parts))
            case {"settings": numbers, "names": list(names)}:
                return Settings(self.restore(numbers), tuple((str(k), str(v)) for k, v in names))
            case {"state": list(parts)}:
                return State(*map(self.restore, parts))
        return super().restore(layout)

    def describe_solution(self, solution: Solution) -> Json:
        """Return the layout of a solution without its result."""
        return {name: self.describe(getattr(solution, name), name) for name in PARTS}


def write_solution(solution: Solution, path: pathlib.Path) -> pathlib.Path:
    """Write a solution and return the path of its file."""
    path, tree = _with_suffix(path), _Parts()
    layout = tree.describe_solution(solution)
    names = outcomes(solution.result)
    assert names is not None  # its arrays are known
    layout["result"] = names.tolist()
    write_arrays(path, tree.arrays, {"layout": layout}, FORMAT)
    return path


def read_solution(kind: type[Kind], path: pathlib.Path, records: Sequence[type]) -> Kind:
    """Read a solution that ``write_solution`` wrote; ValueError says what is wrong with any other file."""
    path = _with_suffix(path)
    if not path.exists():
        raise ValueError(f"path must name a saved solution, got {path}, which does not exist")
    arrays, header = read_arrays(path, FORMAT, "Solution.save")
    try:
        return _build(kind, header["layout"], _Parts((*OWN, *records), arrays))
    except Refusal as problem:
        raise ValueError(f"{path} {problem}") from None
    except Exception as problem:  # damaged headers raise whatever they like
        raise ValueError(f"{path} is damaged: {type(problem).__name__}: {problem}") from problem


def _with_suffix(path: pathlib.Path) -> pathlib.Path:
    """Append .npz to a name that does not end with it; ``with_suffix`` would turn run_0.1 into run_0.npz."""
    return path if path.name.endswith(".npz") else path.with_name(f"{path.name}.npz")


def _build(kind: type[Kind], layout: Json, tree: _Parts) -> Kind:
    """Return the solution of a layout; any exception but ``Refusal`` means that the layout is damaged."""
    parts: Json = {name: tree.restore(layout[name]) for name in PARTS}
    numbers = code_numbers()
    named = layout["result"]
    unknown = {name for name in np.ravel(named).tolist() if name not in numbers}
    if unknown:
        raise Refusal(f"has the result code {sorted(unknown)}, which this version does not know")
    code = np.vectorize(numbers.__getitem__, otypes=[np.int32])(np.asarray(named, object))
    result = eqx.tree_at(lambda r: r._value, RESULTS.successful, jnp.asarray(code))
    solution = kind(**parts, result=result)
    for place, wanted in KINDS.items():
        found = operator.attrgetter(place)(solution)
        if not isinstance(found, wanted):
            raise TypeError(f"{place} is described as {_boundary.show(found)}")
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
    again = _Parts()
    described = again.describe_solution(solution) | {"result": named}
    if described != layout or again.arrays.keys() != tree.arrays.keys():
        raise TypeError("the header does not describe the arrays")
    return solution


def _cloud(particles: object, weights: object, labels: object, width: object) -> Cloud:
    """Build a cloud of stored parts, which may be stacked over save times and are therefore not checked again."""
    blank = Cloud(Polar(jnp.zeros(1), jnp.zeros(1)))
    parts = (particles, weights, labels, width)
    return eqx.tree_at(
        lambda c: (c.particles, c.weights, c.labels, c.width), blank, parts, is_leaf=lambda x: x is None
    )
