"""The recording trainer: minibatch descent by optax, one compiled program an epoch, resumable.

Its loop is ``_numerics.iterate``. Between epochs, on the host, it measures the internal covariate shift of a
watched layer and reports progress; nothing inside the compiled program calls back.
"""

import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from meanflow import _checks, transport
from meanflow._files import atomic_write
from meanflow._numerics import iterate
from meanflow.training.data import Data

EVALUATION_BATCH = 1000
"""Rows evaluated at once in inference mode."""

Loss = Callable[[jax.Array, jax.Array], jax.Array]


class TrainState(NamedTuple):
    """Everything the next epoch depends on, as one pytree of arrays."""

    epoch: jax.Array
    params: Any
    stats: Any
    opt_state: Any
    key: jax.Array


@dataclass(frozen=True)
class Watch:
    """What to record of one layer after each epoch.

    Attributes:
        layer: index of the normalisation layer (the network needs ``lower`` and ``upper``).
        moments: ``"batch"`` recomputes all batch moments on the watched inputs; ``"running"`` uses the stored
            averages, whose own noise puts a floor under the measured shift.
        rows: the shift is measured on this many first training inputs.
        inputs: moments and the shift of the loss are taken over this many first training inputs; None for all, which
            must fit into memory at once.
        max_exact: see ``transport.sandwich``.
        shift: False records the moments alone.
    """

    layer: int = -1
    moments: str = "batch"
    rows: int = 400
    inputs: int | None = None
    max_exact: int = 2000
    shift: bool = True


def cross_entropy(logits: jax.Array, labels: jax.Array) -> jax.Array:
    """Mean softmax cross-entropy with integer labels."""
    return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(logits, labels))


def staircase(
    rate: float, epochs: int, steps: int, *, at: Iterable[float] = (0.3, 0.6, 0.8), factor: float = 5.0
) -> optax.Schedule:
    """A learning rate divided by ``factor`` at the given fractions of the epochs, of ``steps`` steps each.

    >>> [round(float(staircase(0.05, 10, 1)(t)), 6) for t in (2, 3, 6, 8)]
    [0.05, 0.01, 0.002, 0.0004]
    """
    # a schedule drops when the count reaches the boundary, that is from the first step of epoch f * epochs
    return optax.piecewise_constant_schedule(rate, {round(f * epochs) * steps: 1 / factor for f in at})


class Trainer:
    """Trains a network and records loss, accuracy, moments and internal covariate shift.

    Args:
        make: rngs -> flax NNX network; rebuilt from ``init``'s key.
        optimizer: any optax transformation; its schedule counts minibatches.
        batch: minibatch size. Each epoch draws a new permutation and drops the remainder.
        loss: (logits, labels) -> scalar mean.
        augment: (key, minibatch) -> minibatch, applied in training only; for instance
            ``data.crop_and_flip``.
        watch: a layer to record, or None.
        ensemble: states, data and history carry a leading axis of independent runs, trained by one vmapped
            program.

    The pure functions ``init``, ``epoch``, ``evaluate`` and ``compare`` may be used on their own under
    jit and vmap; ``run`` is the loop over epochs.
    """

    def __init__(
        self,
        make: Callable[[nnx.Rngs], Any],
        optimizer: optax.GradientTransformation,
        *,
        batch: int = 128,
        loss: Loss = cross_entropy,
        augment: Callable[[jax.Array, jax.Array], jax.Array] | None = None,
        watch: Watch | None = None,
        ensemble: bool = False,
    ):
        self.make, self.optimizer, self.loss, self.augment = make, optimizer, loss, augment
        self.batch = _checks.whole("batch", batch, 1)
        self.watch, self.ensemble = watch, ensemble
        if watch is not None:
            _checks.one_of("watch.moments", watch.moments, ("batch", "running"))
        self.graph = nnx.split(nnx.eval_shape(lambda: make(nnx.Rngs(0))), nnx.Param, ...)[0]
        lift = jax.vmap if ensemble else (lambda f: f)
        self._init = jax.jit(lift(self.init))
        self._epoch = jax.jit(lift(self.epoch))
        self._evaluate = jax.jit(lift(self.evaluate))
        self._compare = jax.jit(lift(self.compare))

    def init(self, key: jax.Array) -> TrainState:
        """The state before the first epoch."""
        init_key, run_key = jax.random.split(key)
        params, stats = _variables(self.make(nnx.Rngs(init_key)))
        return TrainState(jnp.zeros((), jnp.int32), params, stats, self.optimizer.init(params), run_key)

    def network(self, state: TrainState, *, training: bool = False) -> Any:
        """The network of a state, in inference or training mode; changing it leaves the state as it is."""
        model = nnx.merge(self.graph, state.params, state.stats, copy=True)
        model.train() if training else model.eval()
        return model

    def epoch(self, state: TrainState, x: jax.Array, y: jax.Array) -> tuple[TrainState, jax.Array]:
        """One pass over the data in minibatches; the new state and the mean loss on the way."""
        steps = x.shape[0] // self.batch
        order_key, augment_key = jax.random.split(jax.random.fold_in(state.key, state.epoch))
        order = jax.random.permutation(order_key, x.shape[0])
        rows = order[: steps * self.batch].reshape(steps, self.batch)

        def objective(params: Any, stats: Any, key: jax.Array, rows: jax.Array) -> tuple[jax.Array, Any]:
            model = nnx.merge(self.graph, params, stats, copy=True)
            model.train()
            inputs = x[rows] if self.augment is None else self.augment(key, x[rows])
            value = self.loss(model(inputs), y[rows])
            return value, _variables(model)[1]

        def step(carry: Any, inputs: tuple[jax.Array, jax.Array]) -> Any:
            params, stats, opt_state, total = carry
            (value, stats), grads = jax.value_and_grad(objective, has_aux=True)(params, stats, *inputs)
            updates, opt_state = self.optimizer.update(grads, opt_state, params)
            return optax.apply_updates(params, updates), stats, opt_state, total + value

        start = (state.params, state.stats, state.opt_state, jnp.zeros((), x.dtype))
        inputs = (jax.random.split(augment_key, steps), rows)
        (params, stats, opt_state, total), _ = iterate(step, start, inputs, steps, steps, lambda carry: None)
        new = TrainState(state.epoch + 1, params, stats, opt_state, state.key)
        return new, total / steps

    def evaluate(self, state: TrainState, x: jax.Array, y: jax.Array) -> dict[str, jax.Array]:
        """Loss and accuracy in inference mode."""
        model = self.network(state)
        # inference treats samples independently: large test sets go through in pieces
        logits = jax.lax.map(lambda u: model(u[None])[0], x, batch_size=min(EVALUATION_BATCH, x.shape[0]))
        return {"loss": self.loss(logits, y), "accuracy": jnp.mean(jnp.argmax(logits, -1) == y)}

    def compare(self, old: TrainState, new: TrainState, x: jax.Array, y: jax.Array) -> dict[str, Any]:
        """The watched layer at two times on the same inputs: outputs, moments, shift of the loss above."""
        watch = self.watch or Watch()
        training = watch.moments == "batch"
        x, y = x[: watch.inputs], y[: watch.inputs]

        def lower(params: Any, stats: Any) -> jax.Array:
            state = old._replace(params=params, stats=stats)
            return self.network(state, training=training).lower(x, watch.layer)

        # both times in one vmapped pass: half the program to compile
        both = jax.tree.map(lambda *u: jnp.stack(u), (old.params, old.stats), (new.params, new.stats))
        before, after = jax.vmap(lower)(*both)
        upper = partial(self.network(old, training=training).upper, layer=watch.layer)
        flat = after.reshape(-1, after.shape[-1])
        return {
            "before": before[: watch.rows],
            "after": after[: watch.rows],
            "moments": transport.moments(flat),
            "loss_shift": transport.loss_shift(upper, before, after, y, self.loss),
        }

    def run(
        self,
        state: TrainState | jax.Array,
        data: Data,
        epochs: int,
        *,
        progress: bool | None = None,
        checkpoint: str | Path | None = None,
        config: dict[str, Any] | None = None,
    ) -> tuple[TrainState, dict[str, np.ndarray]]:
        """Trains until ``epochs`` epochs are done in all, and records each.

        Args:
            state: a state to continue from, or a PRNG key (keys, for an ensemble) to start with.
            data: arrays; for an ensemble each with a leading axis of runs.
            epochs: total number, counting those the state already has behind it.
            progress: show a bar; by default only on a terminal.
            checkpoint: file to save the state to after each epoch.
            config: stored with the checkpoint.

        Returns:
            The final state, and a record of arrays with leading axis (epochs run now, ...): epoch,
            train_loss, test_loss, test_accuracy, and for a watched layer mean, variance, skewness,
            kurtosis (one entry a feature), loss_shift and the sandwich ics_lower, ics_exact, ics_upper,
            ics_paired.
        """
        _checks.whole("epochs", epochs, 0)
        current: TrainState = state if isinstance(state, TrainState) else self._init(state)
        rows = data.train_x.shape[1 if self.ensemble else 0]
        if rows < self.batch:
            raise ValueError(f"batch must be at most the {rows} training rows, got {self.batch}")
        x, y, test_x, test_y = (jnp.asarray(u) for u in data)
        first = int(np.ravel(current.epoch)[0])
        records: list[dict[str, Any]] = []
        for epoch in _ticker(range(first, epochs), progress):
            old = current
            current, loss = self._epoch(old, x, y)
            test = self._evaluate(current, test_x, test_y)
            record = {"epoch": epoch + 1, "train_loss": loss}
            record |= {f"test_{name}": value for name, value in test.items()}
            if self.watch is not None:
                record |= self._shift(self._compare(old, current, x, y))
            records.append(jax.tree.map(np.asarray, record))
            if checkpoint is not None:
                save_state(checkpoint, current, config)
        names = records[0] if records else {}
        return current, {name: np.stack([r[name] for r in records]) for name in names}

    def _shift(self, seen: dict[str, Any]) -> dict[str, Any]:
        record = {"loss_shift": seen["loss_shift"], **seen["moments"]._asdict()}
        assert self.watch is not None
        if not self.watch.shift:
            return record
        measure = partial(transport.ics, max_exact=self.watch.max_exact)
        if self.ensemble:
            parts = [measure(b, a) for b, a in zip(seen["before"], seen["after"], strict=True)]
        else:
            parts = [measure(seen["before"], seen["after"])]
        for name in ("lower", "exact", "upper"):
            values = np.array([getattr(p, name) for p in parts])
            record[f"ics_{name}"] = values if self.ensemble else values[0]
        paired = np.array([p.pieces["paired"] for p in parts])
        return record | {"ics_paired": paired if self.ensemble else paired[0]}


def _variables(model: Any) -> tuple[Any, Any]:
    """Trained parameters, and all other variables (running moments, constants)."""
    return nnx.state(model, nnx.Param), nnx.state(model, nnx.Not(nnx.Param))


def save_state(path: str | Path, state: TrainState, config: dict[str, Any] | None = None) -> None:
    """Writes a state to one npz file, with the configuration and the versions it was made by."""
    leaves = jax.tree_util.tree_leaves_with_path(state._replace(key=jax.random.key_data(state.key)))
    arrays = {jax.tree_util.keystr(where): np.asarray(leaf) for where, leaf in leaves}
    versions = {"jax": jax.__version__, "optax": optax.__version__, "numpy": np.__version__}
    header = json.dumps({"config": config or {}, "versions": versions})
    # an open file, since savez would append a suffix to a path that has none
    with atomic_write(path) as part, part.open("wb") as file:
        np.savez(file, allow_pickle=False, header=np.array(header), **arrays)


def load_state(path: str | Path, template: TrainState) -> tuple[TrainState, dict[str, Any]]:
    """Reads a state of the same network and optimiser as ``template``; also returns config and versions.

    Raises:
        ValueError: if a part is missing or has another shape than in the template.
    """
    with np.load(path, allow_pickle=False) as file:
        stored = {name: file[name] for name in file.files}
    header = json.loads(str(stored.pop("header")))
    plain = template._replace(key=jax.random.key_data(template.key))
    leaves, tree = jax.tree_util.tree_flatten_with_path(plain)
    values = []
    for where, leaf in leaves:
        name = jax.tree_util.keystr(where)
        if name not in stored or stored[name].shape != leaf.shape:
            given = stored[name].shape if name in stored else "nothing"
            raise ValueError(f"{path} must hold {name} of shape {leaf.shape}, got {given}")
        values.append(jnp.asarray(stored[name], leaf.dtype))
    state = jax.tree_util.tree_unflatten(tree, values)
    return state._replace(key=jax.random.wrap_key_data(state.key)), header


def _ticker(epochs: range, progress: bool | None) -> Iterable[int]:
    from rich.console import Console
    from rich.progress import track

    console = Console(stderr=True)
    show = console.is_terminal if progress is None else progress
    return track(epochs, "epochs", console=console) if show and len(epochs) else epochs
