"""What a solver returns, how it is saved, and the state from which a run goes on."""

import json
import pathlib
from importlib.metadata import PackageNotFoundError, version
from typing import Any, NamedTuple, Self

import diffrax
import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

from meanflow.measures import cloud as records
from meanflow.measures.cloud import Cloud

_RECORDS = {kind.__name__: kind for kind in (records.Neurons, records.Polar, records.Affine)}


class RESULTS(diffrax.RESULTS):  # type: ignore[misc,valid-type]
    """Result codes: those of diffrax, and two of our own."""

    successful = ""
    non_finite = "The solution is not finite: the step is too large, or the flow blew up."
    event_overflow = "A step met more kinks than max_events allows. Use smaller steps or raise max_events."


class State(NamedTuple):
    """Everything the next step needs; a plain pytree of arrays.

    Attributes:
        t: time on the clock of the run.
        y: the integrated coordinates (the particles, for most solvers).
        steps: number of steps taken so far.
        leaves: arrays of the stepper's own state (solver, controller or optimiser), flattened.
    """

    t: jax.Array
    y: Any
    steps: jax.Array
    leaves: tuple[jax.Array, ...]


def versions() -> dict[str, str]:
    """Versions of the packages that decide the numbers."""
    found = {}
    for name in ("meanflow", "jax", "jaxlib", "diffrax", "optax", "equinox", "numpy"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "not installed"
    return found


class Solution(eqx.Module):
    """A finished run.

    Attributes:
        ts: (k,) save times on the clock of the run.
        energy: (k,) energies at those times.
        clouds: the cloud at each save time, stacked along a leading axis k; None if ``observe`` was given.
        observed: what ``observe`` returned, stacked along a leading axis k; None without it.
        final: the cloud at the end of the run.
        state: pass it to the same solver to go on.
        result: result code; ``sol.ok`` is True for success and for a steady-state stop.
        stats: counts such as ``num_steps``.
        settings: JSON text of the solver settings and package versions.

    Entries of save times that were not reached (a failed or stopped run) are infinite.
    """

    ts: jax.Array
    energy: jax.Array
    clouds: Any  # Cloud or None
    observed: Any
    final: Cloud
    state: State
    result: Any
    stats: dict[str, Any]
    settings: str = eqx.field(static=True)

    @property
    def ok(self) -> jax.Array:
        """True where the run succeeded or stopped at a steady state."""
        return (self.result == RESULTS.successful) | (self.result == RESULTS.event_occurred)

    def save(self, path: str | pathlib.Path) -> pathlib.Path:
        """Writes the solution to one .npz file (arrays, settings, versions; no pickles).

        ``observed`` must be an array or nested dicts, tuples and lists of arrays.
        """
        path = pathlib.Path(path).with_suffix(".npz")
        arrays: dict[str, np.ndarray] = {}
        layout = {
            name: _describe(getattr(self, name), name, arrays)
            for name in ("ts", "energy", "clouds", "observed", "final", "state", "stats")
        }
        arrays["result"] = np.asarray(self.result._value)  # the integer behind the enumeration
        header = json.dumps({"format": 1, "layout": layout, "settings": self.settings})
        arrays["header"] = np.frombuffer(header.encode(), np.uint8)
        partial = path.with_suffix(".partial.npz")
        np.savez(partial, **arrays)  # type: ignore[arg-type]
        partial.replace(path)  # a crash never leaves a half-written file under the final name
        return path

    @classmethod
    def load(cls, path: str | pathlib.Path) -> Self:
        """Reads a solution written by ``save``; it can be resumed through ``state``."""
        path = pathlib.Path(path).with_suffix(".npz")
        if not path.exists():
            raise ValueError(f"path must name a saved solution, got {path}, which does not exist")
        with np.load(path) as file:
            arrays = dict(file)
        if "header" not in arrays:
            raise ValueError(f"path must name a file written by Solution.save, got {path}")
        header = json.loads(arrays["header"].tobytes().decode())
        parts = {name: _restore(node, arrays) for name, node in header["layout"].items()}
        code = jnp.asarray(arrays["result"])
        result = eqx.tree_at(lambda r: r._value, RESULTS.successful, code)
        return cls(**parts, result=result, settings=header["settings"])


def _describe(node: Any, name: str, arrays: dict[str, np.ndarray]) -> Any:
    """A JSON layout of ``node``; its arrays go into ``arrays`` under dotted names."""
    if node is None:
        return None
    if isinstance(node, Cloud):
        fields = ("particles", "weights", "labels", "width")
        return {"cloud": {f: _describe(getattr(node, f), f"{name}.{f}", arrays) for f in fields}}
    if isinstance(node, State):
        return {"state": [_describe(v, f"{name}.{i}", arrays) for i, v in enumerate(node)]}
    if type(node).__name__ in _RECORDS:
        values = [_describe(v, f"{name}.{i}", arrays) for i, v in enumerate(node)]
        return {"record": type(node).__name__, "values": values}
    if isinstance(node, dict):
        return {"dict": {k: _describe(v, f"{name}.{k}", arrays) for k, v in node.items()}}
    if isinstance(node, tuple | list):
        return {"tuple": [_describe(v, f"{name}.{i}", arrays) for i, v in enumerate(node)]}
    arrays[name] = np.asarray(node)
    return name


def _restore(node: Any, arrays: dict[str, np.ndarray]) -> Any:
    if node is None:
        return None
    if isinstance(node, str):
        return jnp.asarray(arrays[node])
    if "cloud" in node:
        parts = {k: _restore(v, arrays) for k, v in node["cloud"].items()}
        blank = Cloud(records.Polar(jnp.zeros(1), jnp.zeros(1)))
        return eqx.tree_at(
            lambda c: (c.particles, c.weights, c.labels, c.width),
            blank,
            (parts["particles"], parts["weights"], parts["labels"], parts["width"]),
            is_leaf=lambda x: x is None,
        )
    if "state" in node:
        return State(*(_restore(v, arrays) for v in node["state"]))
    if "record" in node:
        return _RECORDS[node["record"]](*(_restore(v, arrays) for v in node["values"]))
    if "dict" in node:
        return {k: _restore(v, arrays) for k, v in node["dict"].items()}
    return tuple(_restore(v, arrays) for v in node["tuple"])
