"""The recording trainer: minibatch descent by optax, one compiled program an epoch, resumable.

Its steps run in the one loop, ``iterate``, or one program a minibatch (``loop="host"``). Between epochs, on the host,
the trainer observes the network and reports progress; nothing inside a compiled program calls back.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Annotated

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import Mesh, PartitionSpec
from jaxtyping import Array, ArrayLike, Float, Int, Key, PyTree, Shaped

from meanflow import _boundary
from meanflow._boundary import Count, FilePath, Natural, PRNGKey, checked, choice, either, instance
from meanflow._identity import Json, array_text, describe
from meanflow._loops import iterate
from meanflow._observable import FunctionOfState, Observable, Values
from meanflow.solvers._batches import shuffle
from meanflow.training._checkpoints import Record, TrainState, resume, save_state
from meanflow.training._fitting import (
    Inputs,
    check_fit,
    labels,
    maker,
    same_rows,
    train_data,
)
from meanflow.training._networks import Network
from meanflow.training._shift import Loss, Training
from meanflow.training.data import Data

EVALUATION_BATCH = 1000
"""Number of samples that are evaluated at once: those of CIFAR take 65 MB in a layer of 16 channels (float32)."""

Carry = tuple[PyTree[Array], PyTree[Array], optax.OptState, jax.Array]
"""What one minibatch passes to the next: parameters, other variables, optimizer state, sum of the losses."""


OBSERVE = either(instance(Observable), _boundary.taking(1))
STATE = _boundary.declare(TrainState, instance(TrainState, hint="from Trainer.init(key) or Trainer.run"))


def cross_entropy(logits: Float[Array, "n classes"], labels: Int[Array, "n"]) -> Float[Array, ""]:
    """Return the mean softmax cross-entropy of logits with integer labels."""
    return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(logits, labels))


class Trainer:
    """Train a network, and record its loss, accuracy, and what is observed, such as the covariate shift of a layer.

    ``run`` is the loop over epochs. The pure functions ``init``, ``epoch`` and ``evaluate`` may be used on their own,
    under jit and vmap; with ``loop="host"`` without them.

    Args:
        make: function of ``nnx.Rngs`` that builds the flax NNX network.
        optimizer: any optax optimizer; its schedule counts minibatches.
        batch_size: size of a minibatch. Each epoch draws a new permutation of the data and drops the remainder.
        loss: (logits, labels) -> scalar mean loss.
        augment: (key, minibatch) -> minibatch, applied in training only; for instance ``data.crop_and_flip``.
        observe: what is recorded after each epoch: an ``Observable``, such as ``LayerShift``, or a function of the
            network. Its ``begin`` sees the network at the start of the epoch, its ``measure`` that at the end, both on
            the host between programs and in inference; what it returns as a dict is recorded by these names.
        mesh: devices along one axis over which minibatches are split. Layers that are built with ``axis_name`` of that
            axis take their moments over the whole minibatch, others over their share of it. None for one device.
        loop: ``"program"`` compiles the minibatches of an epoch as one loop. ``"host"`` calls one compiled program a
            minibatch: on processors, compilers are slow at the gradients of convolutions inside of loops (33.5 s a
            minibatch of 128 images for ResNet-20, 0.9 s outside). Both take the same steps, to rounding.
            ``"ensemble"`` trains independent runs in one vmapped program: states, data and records then have a leading
            axis of runs.

    >>> from meanflow.layers import BatchNorm
    >>> from meanflow.training import Stack, data
    >>> make = lambda rngs: Stack(64, (8,), 10, norm=BatchNorm, rngs=rngs)
    >>> trainer = Trainer(make, optax.sgd(0.1), batch_size=64)
    >>> state, record = trainer.run(jax.random.key(0), data.digits(train=128).flat(), 2, progress=False)
    >>> sorted(record), record["train_loss"].shape
    (['epoch', 'test_accuracy', 'test_loss', 'train_loss'], (2,))
    """

    @checked
    def __init__(
        self,
        make: Annotated[Callable[[nnx.Rngs], Network], maker],
        optimizer: Annotated[
            optax.GradientTransformation,
            instance(optax.GradientTransformation, hint="such as optax.sgd(0.1)"),
        ],
        *,
        batch_size: Count = 128,
        loss: Loss = cross_entropy,
        augment: Callable[[jax.Array, jax.Array], jax.Array] | None = None,
        observe: Annotated[Observable | Callable[[Network], Values], OBSERVE] | None = None,
        mesh: Annotated[Mesh, instance(Mesh, hint="such as jax.make_mesh((2,), ('data',))")] | None = None,
        loop: Annotated[str, choice("program", "host", "ensemble")] = "program",
    ):
        self.make, self.optimizer, self.loss, self.augment = make, optimizer, loss, augment
        self.batch_size, self.mesh = batch_size, mesh
        named = observe is None or isinstance(observe, Observable)
        self.observe: Observable | None = observe if named else FunctionOfState(observe)  # type: ignore
        self.ensemble, self.by_host = loop == "ensemble", loop == "host"
        if mesh is not None and (len(mesh.axis_names) != 1 or batch_size % mesh.size or self.ensemble):
            raise ValueError(
                f"mesh must have one axis whose length divides batch_size = {batch_size}, and loop must not be "
                f"'ensemble' with it, got axes {dict(mesh.shape)} and loop = {loop!r}"
            )
        # shapes alone: the structure of the network is known without drawing its weights
        network = nnx.eval_shape(lambda: make(nnx.Rngs(0)))
        if not isinstance(network, nnx.Module):
            raise TypeError(f"make must return a flax NNX module, got {_boundary.show(network)}")
        self.graph = nnx.split(network, nnx.Param, ...)[0]
        lift = jax.vmap if self.ensemble else (lambda f: f)
        self._init = jax.jit(lift(self.init))
        self._epoch = self.epoch if self.by_host else jax.jit(lift(self.epoch))
        self._evaluate = self.evaluate if self.by_host else jax.jit(lift(self.evaluate))
        self._plan, self._step = jax.jit(self._minibatches, static_argnums=1), jax.jit(self._minibatch)
        self._logits = jax.jit(lambda state, x: self.network(state)(x))

    @checked
    def init(self, key: PRNGKey) -> TrainState:
        """Return the state before the first epoch.

        Args:
            key: PRNG key of the weights and of all epochs.
        """
        # keys of weights and of epochs apart: the state keeps the second, from which each epoch's key is folded
        init_key, run_key = jax.random.split(key)
        params, stats = _variables(self.make(nnx.Rngs(init_key)))
        return TrainState(jnp.zeros((), jnp.int32), params, stats, self.optimizer.init(params), run_key)

    @checked
    def network(self, state: TrainState, *, training: bool = False) -> Network:
        """Return the network of a state; changing it leaves the state as it is.

        Args:
            state: the state.
            training: whether layers normalize by the moments of the batch, instead of by their running moments.
        """
        model = nnx.merge(self.graph, state.params, state.stats, copy=True)
        model.train() if training else model.eval()
        return model

    @checked
    def epoch(
        self, state: TrainState, x: Inputs, y: Annotated[Shaped[Array, "n ..."], labels]
    ) -> tuple[TrainState, Float[Array, ""]]:
        """Pass once over the data in minibatches; return the new state and the mean loss on the way.

        Args:
            state: the state before.
            x: training inputs (n, ...).
            y: their labels (n, ...).
        """
        same_rows(x, y)
        plan = self._plan(state, x.shape[0])
        steps = len(plan[1])
        step = lambda carry, inputs: self._step(carry, inputs, x, y)
        carry: Carry = (state.params, state.stats, state.opt_state, jnp.zeros((), x.dtype))
        if self.by_host:
            for inputs in zip(*plan, strict=True):
                carry = step(carry, inputs)
        else:
            carry, _ = iterate(step, carry, plan, steps, steps, lambda carry: None)
        params, stats, opt_state, total = carry
        return TrainState(state.epoch + 1, params, stats, opt_state, state.key), total / steps

    def _minibatches(self, state: TrainState, count: int) -> tuple[jax.Array, jax.Array]:
        """Return what the steps of an epoch over ``count`` samples take: keys (steps,), rows (steps, batch)."""
        steps = count // self.batch_size
        if not steps:
            raise ValueError(f"x must have at least as many rows as a batch, {self.batch_size}, got {count}")
        # a function of the epoch's number, so that a resumed run sees the same minibatches
        order_key, augment_key = jax.random.split(jax.random.fold_in(state.key, state.epoch))
        places = jnp.arange(steps * self.batch_size, dtype=jnp.uint32).reshape(steps, self.batch_size)
        return jax.random.split(augment_key, steps), shuffle(order_key, places, jnp.uint32(count))

    def _minibatch(
        self, carry: Carry, inputs: tuple[jax.Array, jax.Array], x: jax.Array, y: jax.Array
    ) -> Carry:
        """Take one step, with the key of its augmentation and the rows of its minibatch."""
        params, stats, opt_state, total = carry
        key, rows = inputs

        # stats pass through: layers in training update their running moments on the way
        def objective(params: PyTree[Array], stats: PyTree[Array]) -> tuple[jax.Array, PyTree[Array]]:
            images = x[rows] if self.augment is None else self.augment(key, x[rows])
            logits, stats = self._forward(params, stats, images)
            return self.loss(logits, y[rows]), stats

        (value, stats), grads = jax.value_and_grad(objective, has_aux=True)(params, stats)
        updates, opt_state = self.optimizer.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), stats, opt_state, total + value.astype(total.dtype)

    def _forward(
        self, params: PyTree[Array], stats: PyTree[Array], inputs: jax.Array
    ) -> tuple[jax.Array, PyTree[Array]]:
        """Return logits and new other variables of the network in training, on one device or over the mesh."""

        def forward(
            params: PyTree[Array], stats: PyTree[Array], inputs: jax.Array
        ) -> tuple[jax.Array, PyTree[Array]]:
            model = nnx.merge(self.graph, params, stats, copy=True)
            model.train()
            logits, stats = model(inputs), _variables(model)[1]
            if self.mesh is None:
                return logits, stats
            # layers without axis_name have moments of their own on every device
            (name,) = self.mesh.axis_names
            mean = lambda u: jax.lax.pmean(u, name) if jnp.issubdtype(u.dtype, jnp.floating) else u
            return logits, jax.tree.map(mean, stats)

        if self.mesh is None:
            return forward(params, stats, inputs)
        everywhere, split = PartitionSpec(), PartitionSpec(self.mesh.axis_names)
        # parameters are the same everywhere, rows of the minibatch are split; gradients are summed by the transpose
        return jax.shard_map(
            forward,
            mesh=self.mesh,
            in_specs=(everywhere, everywhere, split),
            out_specs=(split, everywhere),
            check_vma=False,
        )(params, stats, inputs)

    @checked
    def evaluate(
        self, state: TrainState, x: Inputs, y: Annotated[Shaped[Array, "n ..."], labels]
    ) -> dict[str, Float[Array, ""]]:
        """Return loss and accuracy in inference, by name; the class of a target with entries is its largest one.

        Args:
            state: the state.
            x: inputs (n, ...).
            y: their labels (n, ...).
        """
        same_rows(x, y)
        # inference treats samples independently: large test sets go through in pieces
        if self.by_host:  # two shapes at most are compiled: whole pieces and the rest
            pieces = range(0, len(x), EVALUATION_BATCH)
            logits = jnp.concatenate([self._logits(state, x[i : i + EVALUATION_BATCH]) for i in pieces])
        else:
            model = self.network(state)
            logits = jax.lax.map(lambda u: model(u[None])[0], x, batch_size=min(EVALUATION_BATCH, x.shape[0]))
        classes = y if y.ndim < logits.ndim else jnp.argmax(y, -1)
        return {"loss": self.loss(logits, y), "accuracy": jnp.mean(jnp.argmax(logits, -1) == classes)}

    @checked
    def run(
        self,
        state: Annotated[TrainState | Key[Array, "*runs"], either(STATE, _boundary.prng_keys)],
        data: Annotated[Data, train_data],
        epochs: Natural,
        *,
        progress: bool | None = None,
        checkpoint: FilePath | None = None,
        hook: Callable[[int, Network], object] | None = None,
    ) -> tuple[TrainState, Record]:
        """Train until ``epochs`` epochs are done in all, and record each.

        Args:
            state: a state to continue from; or a PRNG key to start with, an array of keys for an ensemble.
            data: training and test data; for an ensemble each array has a leading axis of runs.
            epochs: total number of epochs, counting those that the state already has behind it.
            progress: show a progress bar; by default only on a terminal.
            checkpoint: file to which the state and the record are saved after each epoch. If it exists, the run goes on
                from there: call again with the same key to continue a run that was ended.
            hook: called as ``hook(epoch, network)`` after each epoch, and before the first one of all, with the network
                in inference, on the host; for instance ``kernels.KernelRecorder``. Not for ensembles.

        Returns:
            The final state, and a record of arrays by name, whose leading axis counts the epochs run now and those in
            the checkpoint: epoch, train_loss, test_loss, test_accuracy, and what is observed.

        Raises:
            ValueError: if the data do not fit, or the checkpoint holds another run or later epochs than the state.
        """
        # a key starts a run, and a state goes on with one
        fresh = not isinstance(state, TrainState)
        if fresh and self.ensemble != bool(state.ndim):  # type: ignore[union-attr]
            raise ValueError("state must be one key, or an array of keys for an ensemble, got the other")
        current: TrainState = self._init(state) if fresh else state  # type: ignore[assignment]
        axis = 1 if self.ensemble else 0
        for name in ("train", "test"):
            same_rows(getattr(data, f"{name}_x"), getattr(data, f"{name}_y"), axis, name)
        rows = data.train_x.shape[axis]
        if rows < self.batch_size:
            raise ValueError(f"batch_size must be at most the {rows} training rows, got {self.batch_size}")
        if hook is not None and self.ensemble:
            raise ValueError("hook must be None for an ensemble: it is called with a single network")
        if not self.ensemble:
            single = self.network(current)
            check_fit(single, self.loss, self.augment, data, self.loss is cross_entropy)
        identity = self._identity(current, data)
        history: Record = {}
        if checkpoint is not None and Path(checkpoint).exists():
            current, history = resume(checkpoint, current, identity, fresh)
        x, y, test_x, test_y = (jnp.asarray(u) for u in data)
        # runs of an ensemble are all at the same epoch
        first = int(np.ravel(current.epoch)[0])
        if hook is not None and first == 0:
            hook(0, self.network(current))
        records: list[Record] = []
        for epoch in _ticker(range(first, epochs), progress):
            old = current
            current, loss = self._epoch(old, x, y)
            test = self._evaluate(current, test_x, test_y)
            record: dict[str, ArrayLike] = {"epoch": epoch + 1, "train_loss": loss}
            record |= {f"test_{name}": value for name, value in test.items()}
            if self.observe is not None:
                record |= self._observed(data, old, current)
            records.append(jax.tree.map(np.asarray, record))
            if hook is not None:
                hook(epoch + 1, self.network(current))
            # after the hook: an epoch is kept when all of it has been done
            if checkpoint is not None:
                save_state(checkpoint, current, _joined(history, records), identity)
        return current, _joined(history, records)

    def _identity(self, state: TrainState, data: Data) -> Json:
        """Return a description of what decides the numbers of a run."""
        parts = {
            "key": np.asarray(jax.random.key_data(state.key)).tolist(),
            "data": {name: array_text(u) for name, u in data._asdict().items()},
            "batch": self.batch_size,
            "optimizer": describe(self.optimizer),
            "network": describe(self.make),
            "loss": describe(self.loss),
            "augment": describe(self.augment),
        }
        return json.loads(json.dumps(parts, default=str))

    def _observed(self, data: Data, old: TrainState, new: TrainState) -> Record:
        """Return what the observable sees of an epoch: of each run of an ensemble by itself, stacked."""
        observe, axis = self.observe, None if self.mesh is None else self.mesh.axis_names[0]
        assert observe is not None
        one = lambda tree, k: jax.tree.map(lambda u: u[k], tree)
        runs = [(data, old, new)]
        if self.ensemble:
            runs = [(one(data, k), one(old, k), one(new, k)) for k in range(len(data.train_x))]
        seen = []
        for own, start, end in runs:
            run = Training(own, self.loss, axis)
            memory = observe.begin(run, self.network(start))
            seen.append(observe.measure(run, self.network(end), memory))
        found = jax.tree.map(lambda *u: np.stack(u), *seen) if self.ensemble else seen[0]
        return found if isinstance(found, dict) else {"observed": found}


def _variables(model: Network) -> tuple[PyTree[Array], PyTree[Array]]:
    """Return the trained parameters of a network, and all its other variables (running moments, constants)."""
    return nnx.state(model, nnx.Param), nnx.state(model, nnx.Not(nnx.Param))


def _joined(history: Record, records: list[Record]) -> Record:
    """Return the record of earlier epochs followed by that of the epochs run now."""
    names = records[0] if records else history
    new = {name: [r[name][None] for r in records] for name in names}
    return {name: np.concatenate([*([history[name]] if history else []), *new[name]]) for name in names}


def _ticker(epochs: range, progress: bool | None) -> Iterable[int]:
    """Return the epochs, with a progress bar if asked for or, by default, on a terminal."""
    from rich.console import Console
    from rich.progress import track

    console = Console(stderr=True)
    show = console.is_terminal if progress is None else progress
    return track(epochs, "epochs", console=console) if show and len(epochs) else epochs
