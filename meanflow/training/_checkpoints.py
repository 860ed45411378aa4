"""Checkpoints of a training run: its state, the record of its epochs, and a description by which it is known again.

One file holds all of it, in the format of ``meanflow.files``; it is whole or absent at any moment.
"""

from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Int, Key, PyTree

from meanflow._identity import Json, difference
from meanflow._properties import show
from meanflow.files import read_arrays, write_arrays

Record = dict[str, np.ndarray]
"""What ``Trainer.run`` returns of each epoch, by name."""

FORMAT = 1
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
    history: Record | None = None,
    run: Json | None = None,
) -> None:
    """Write a state to one npz file, together with the versions of the libraries that made it.

    Args:
        path: name of the file, which is replaced if it exists. It is never left half written.
        state: the state.
        history: the record of the epochs so far.
        run: description of the run, by which it is known again.
    """
    record = {f"{HISTORY}{name}": value for name, value in (history or {}).items()}
    leaves = jax.tree_util.tree_leaves_with_path(state._replace(key=jax.random.key_data(state.key)))
    arrays = {jax.tree_util.keystr(where): leaf for where, leaf in leaves}
    write_arrays(path, arrays | record, {"run": run or {}}, FORMAT)


def load_state(path: str | Path, template: TrainState) -> tuple[TrainState, dict[str, Any]]:
    """Read a state that ``save_state`` has written.

    Args:
        path: name of the file.
        template: any state of the same network and optimizer, such as ``trainer.init(key)``.

    Returns:
        The state; and ``versions``, ``run`` and ``history`` (the record) as they were stored.

    Raises:
        ValueError: if the file is damaged, or a part is missing or has another shape than in the template.
    """
    if not Path(path).is_file():
        raise FileNotFoundError(f"path must name a checkpoint, got {path}, which is no file")
    stored, header = read_arrays(path, FORMAT, "Trainer.run")
    history = {n.removeprefix(HISTORY): u for n, u in stored.items() if n.startswith(HISTORY)}
    plain = template._replace(key=jax.random.key_data(template.key))
    leaves, tree = jax.tree_util.tree_flatten_with_path(plain)
    values = []
    for where, leaf in leaves:
        name = jax.tree_util.keystr(where)
        found = stored.get(name)
        if found is None or found.shape != leaf.shape:
            given = "nothing" if found is None else show(found)
            raise ValueError(f"{path} must hold numbers {name} of shape {leaf.shape}, got {given}")
        values.append(jnp.asarray(found, leaf.dtype))
    state = jax.tree_util.tree_unflatten(tree, values)
    return state._replace(key=jax.random.wrap_key_data(state.key)), header | {"history": history}


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
