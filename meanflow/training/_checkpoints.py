"""Checkpoints of a training run: its state, the record of its epochs, and a description by which it is known again.

One file holds all of it, as arrays and JSON without pickles; it is whole or absent at any moment.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Int, Key, PyTree

from meanflow._files import atomic_write
from meanflow._identity import Json, difference
from meanflow._properties import show

Record = dict[str, np.ndarray]
"""What ``Trainer.run`` returns of each epoch, by name."""

HISTORY = "history:"  # before the names of the record in a checkpoint


class TrainState(NamedTuple):
    """Everything the next epoch depends on, as one pytree of arrays.

    Attributes:
        epoch: number of epochs that have been run.
        params: trained parameters of the network.
        stats: all its other variables, such as running moments.
        opt_state: state of the optimizer.
        key: PRNG key from which the keys of all epochs are derived.
    """

    epoch: Int[Array, "*runs"]
    params: PyTree[Array]
    stats: PyTree[Array]
    opt_state: optax.OptState
    key: Key[Array, "*runs"]


def save_state(
    path: str | Path,
    state: TrainState,
    config: Mapping[str, object] | None = None,
    *,
    history: Record | None = None,
    run: Json | None = None,
) -> None:
    """Write a state to one npz file, together with the versions of the libraries that made it.

    Args:
        path: name of the file, which is replaced if it exists. It is never left half written.
        state: the state.
        config: settings to store with it, as JSON.
        history: the record of the epochs so far.
        run: description of the run, by which it is known again.
    """
    leaves = jax.tree_util.tree_leaves_with_path(state._replace(key=jax.random.key_data(state.key)))
    arrays = {jax.tree_util.keystr(where): np.asarray(leaf) for where, leaf in leaves}
    versions = {"jax": jax.__version__, "optax": optax.__version__, "numpy": np.__version__}
    arrays |= {f"{HISTORY}{name}": value for name, value in (history or {}).items()}
    try:
        header = json.dumps({"config": dict(config or {}), "versions": versions, "run": run or {}})
    except (TypeError, ValueError) as problem:
        raise ValueError(f"config must be JSON: {problem}") from problem
    # an open file, since savez would append a suffix to a path that has none
    with atomic_write(path) as part, part.open("wb") as file:
        np.savez(file, allow_pickle=False, header=np.array(header), **arrays)


def load_state(path: str | Path, template: TrainState) -> tuple[TrainState, dict[str, Any]]:
    """Read a state that ``save_state`` has written.

    Args:
        path: name of the file.
        template: any state of the same network and optimizer, such as ``trainer.init(key)``.

    Returns:
        The state; and ``config``, ``versions``, ``run`` and ``history`` (the record) as they were stored.

    Raises:
        ValueError: if the file is damaged, or a part is missing or has another shape than in the template.
    """
    if not Path(path).is_file():
        raise FileNotFoundError(f"path must name a checkpoint, got {path}, which does not exist")
    try:
        with open(path, "rb") as raw, np.load(raw, allow_pickle=False) as file:
            stored = {name: file[name] for name in file.files}
        header = json.loads(str(stored.pop("header")))
        header |= {
            "history": {n.removeprefix(HISTORY): u for n, u in stored.items() if n.startswith(HISTORY)}
        }
    except Exception as problem:  # damaged archives raise whatever they like
        raise ValueError(
            f"{path} is damaged or no checkpoint of this package: {type(problem).__name__}: {problem}"
        ) from problem
    plain = template._replace(key=jax.random.key_data(template.key))
    leaves, tree = jax.tree_util.tree_flatten_with_path(plain)
    values = []
    for where, leaf in leaves:
        name = jax.tree_util.keystr(where)
        found = stored.get(name)
        if found is None or found.shape != leaf.shape or found.dtype.kind not in "biufc":
            given = "nothing" if found is None else show(found)
            raise ValueError(f"{path} must hold numbers {name} of shape {leaf.shape}, got {given}")
        values.append(jnp.asarray(stored[name], leaf.dtype))
    state = jax.tree_util.tree_unflatten(tree, values)
    return state._replace(key=jax.random.wrap_key_data(state.key)), header


def resume(path: str | Path, state: TrainState, run: Json, fresh: bool) -> tuple[TrainState, Record]:
    """Return the state to go on from and the record so far; refuse a file that holds another run.

    Args:
        path: name of the file.
        state: the state of the run that is about to start: the first one, or one to go on from.
        run: description of that run.
        fresh: whether ``state`` is the first one, so that the run goes on from the file.
    """
    stored, header = load_state(path, state)
    known = header.get("run")
    found = ["no description of its run"] if not known else difference(known, run)
    if found:
        raise ValueError(
            f"checkpoint {path} holds another run; use another file, or remove it. Differences:\n  "
            + "\n  ".join(found[:8])
        )
    done, given = (int(np.ravel(u.epoch)[0]) for u in (stored, state))
    if not fresh and given != done:
        raise ValueError(
            f"checkpoint {path} has {done} epochs, the state {given}: pass the key to go on from the file, "
            "or another file to go on from the state"
        )
    return (stored if fresh else state), header["history"]
