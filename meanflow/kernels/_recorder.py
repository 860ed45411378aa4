"""Kernels along training: a recorder that is called at steps of any loop and compiles one program for all of them."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, TypeAlias

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, ArrayLike, Float, PyTree, Shaped

from meanflow import _boundary
from meanflow._boundary import Count, array, checked, choice, count, either, instance, mapping, sequence
from meanflow._observable import Observable, begin, measure
from meanflow._reuse import compiled
from meanflow.kernels._empirical.adapters import from_module
from meanflow.kernels._empirical.coupling import STATS, check_function
from meanflow.kernels._empirical.kernel import empirical_ntk
from meanflow.kernels._empirical.modules import Apply, Batch, Normalized, Params, as_arrays, batches
from meanflow.kernels._gaussian import as_matrix

Pair: TypeAlias = tuple[Apply | Normalized, Params]
Network: TypeAlias = Callable[[Batch], Array] | Pair
Samples: TypeAlias = tuple[Batch, Array | None]  # with their targets

_NAMES = {"step", "trace", "drift", "eigenvalues", "alignment", "kernel"}  # of what a recorder records itself


class KernelStatistics(Observable):
    """What ``KernelRecorder`` records of a kernel: of samples and targets (x, y), and a network (apply, params).

    ``begin`` returns the first kernel, with which ``measure`` compares the others.

    Attributes:
        stats, outputs, top, keep: as in ``KernelRecorder``.
    """

    stats: str | None = eqx.field(static=True)
    outputs: str = eqx.field(static=True)
    top: int = eqx.field(static=True)
    keep: bool = eqx.field(static=True)

    def begin(self, run: Samples, state: Pair) -> Float[np.ndarray, "n n"]:
        """Return the kernel of the first network, which is probed for coupled samples once, here."""
        if self.stats is None:
            apply, x, _ = as_arrays(state[0], run[0], None)
            check_function(apply, state[1], x, None, None)
        kernel = self._found(run, state)["kernel"]
        if not np.any(kernel):
            raise ValueError("the first kernel must not be zero: the drift is measured relative to it")
        return kernel

    def measure(self, run: Samples, state: Pair, memory: Float[np.ndarray, "n n"]) -> dict[str, np.ndarray]:
        """Return all that is recorded of one network, by name."""
        found = self._found(run, state)
        kernel = found["kernel"] if self.keep else found.pop("kernel")
        if kernel.shape != memory.shape:
            raise ValueError(
                f"network must have as many outputs at every step: its kernel has the shape {kernel.shape}, that of "
                f"the first one {memory.shape}"
            )
        drift = np.linalg.norm(kernel - memory) / np.linalg.norm(memory)
        return {"drift": np.asarray(drift), **found}

    def _found(self, run: Samples, state: Pair) -> dict[str, np.ndarray]:
        (x, y), (apply, params) = run, state
        apply, x, _ = as_arrays(apply, x, None)
        if self.stats is None and isinstance(apply, Normalized):  # its statistics have to be chosen
            check_function(apply, params, x, None, None)
        # inside the compiled program it could not be probed: it is declared free of coupling
        stats = self.stats or "running"
        measured = _measure(apply, params, x, y, stats, self.outputs, self.top)
        return {name: np.asarray(value) for name, value in measured.items()}


class KernelRecorder:
    """Record the tangent kernel of a network at chosen steps of its training.

    Call it as ``recorder(step, network)`` in a loop of your own, or pass it to ``training.Trainer.run`` as ``hook``.
    The network is a flax NNX module, or a pair (apply, params) such as ``from_module`` makes of a module as it is at
    that step, so that running averages are recorded as well as parameters. All calls share one compiled program.
    The entries of ``recorder.record``, stacked over the steps recorded, are

        step           the steps
        trace          Tr K / T, where T is the number of samples
        drift          |K - K_0| / |K_0| from the first kernel recorded
        eigenvalues    the largest of K / T, largest first: the rates of training under the squared loss
                       (1/2T) sum |f - y|^2, and the eigenvalues of its Hessian up to the curvature of f times the
                       residual; the first is the sharpness, and descent needs a learning rate below 2 / sharpness
        alignment      <K, y y'> / (|K| |y y'|), if there are targets
        kernel         K as a matrix (T C, T C), outputs of sample 0 first, if ``keep``

    With ``outputs="trace"`` K is the sum of the kernels of all C outputs, (T, T), and y has the shape (T, C): for many
    outputs that is C^2 times smaller, and its largest eigenvalue bounds that of each output.

    Args:
        x: the samples (T, ...) at which the kernel is taken, or a pytree of such arrays.
        y: targets, of the shape of the network's outputs at x, or None.
        steps: which steps are recorded: a sequence of them, a number for every so many, or None for all that it is
            called with.
        top: how many eigenvalues.
        stats: which statistics normalize, as in ``empirical_ntk``.
        keep: whether the kernels themselves are kept.
        outputs: "full", or "trace" for the sum over the outputs.
        observe: more to record, by name: an ``Observable`` of the samples (x, y) as its run and the network
            (apply, params) as its state.

    >>> import jax.numpy as jnp
    >>> net = lambda w, x: x @ w**2
    >>> recorder = KernelRecorder(jnp.eye(2), jnp.ones(2), steps=10, top=1)
    >>> for step in range(11):
    ...     recorder(step, (net, (1 + 0.1 * step) * jnp.ones(2)))
    >>> recorder.record["step"].tolist(), recorder.record["drift"].round(6).tolist()
    ([0, 10], [0.0, 3.0])
    """

    @checked
    def __init__(
        self,
        x: Annotated[PyTree[Shaped[ArrayLike, "T ..."]], batches],
        y: Annotated[Float[ArrayLike, "T ..."], array()] | None = None,
        *,
        steps: Annotated[int | Sequence[int], either(count(1), sequence(count(0)))] | None = None,
        top: Count = 3,
        stats: Annotated[str, choice(*STATS)] | None = None,
        keep: bool = False,
        outputs: Annotated[str, choice("full", "trace")] = "full",
        observe: Annotated[Mapping[str, Observable], mapping(instance(Observable))] | None = None,
    ):
        rows = np.shape(jax.tree.leaves(x)[0])[0]
        if not rows:
            raise ValueError("x must hold at least one sample, got an empty batch")
        if y is not None and np.shape(y)[:1] != (rows,):
            raise ValueError(f"y must have {rows} rows like x, got shape {np.shape(y)}")
        self.x, self.y = x, None if y is None else jnp.asarray(y)
        if taken := set(observe or {}) & _NAMES:
            raise ValueError(f"observe must use other names than {sorted(_NAMES)}, got {sorted(taken)}")
        self.steps = steps
        own = KernelStatistics(stats=stats, outputs=outputs, top=top, keep=keep)
        self.observe: dict[str, Observable] = {**(observe or {}), "kernel": own}
        self._memory: PyTree = None
        self._recorded: list[dict[str, PyTree]] = []

    def __call__(self, step: int, network: Network) -> None:
        """Record ``network`` if ``step`` is one of the chosen.

        Args:
            step: the number of the step.
            network: a pair (apply, params), or an NNX module, which is taken in the mode it is in.
        """
        step, every = _boundary.whole("step", step, 0), self.steps
        if every is not None and (step % every if isinstance(every, int) else step not in every):
            return
        if not (isinstance(network, tuple) and len(network) == 2 and callable(network[0])):
            if not callable(network):
                raise TypeError(
                    f"network must be an NNX module or a pair (apply, params), got {_boundary.show(network)}"
                )
            network = from_module(network)
        run = (self.x, self.y)
        if not self._recorded:
            self._memory = begin(self.observe, run, network)
        found = dict(measure(self.observe, run, network, self._memory))
        self._recorded.append({"step": np.asarray(step), **found.pop("kernel"), **found})

    @property
    def record(self) -> dict[str, PyTree]:
        """All that was recorded, by name, stacked over the steps; empty if nothing was."""
        return jax.tree.map(lambda *values: np.stack(values), *self._recorded) if self._recorded else {}


@compiled
def _measure(
    apply: Apply | Normalized, params: Params, x: Batch, y: Array | None, stats: str, outputs: str, top: int
) -> dict[str, Array]:
    """Compute the kernel and all that is recorded of it but the drift."""
    kernel = empirical_ntk(apply, params, x, stats=stats, outputs=outputs)
    shape = jax.eval_shape(apply, params, x).shape
    size, count = shape[0], math.prod(shape[1:])
    matrix = kernel if outputs == "trace" else as_matrix(kernel.reshape(size, size, count, count))
    record = {
        "kernel": matrix,
        "trace": jnp.trace(matrix) / size,
        "eigenvalues": jnp.linalg.eigvalsh(matrix)[::-1][:top] / size,
    }
    if y is not None:
        _boundary.shape("y", y, shape)
        targets = y.reshape(matrix.shape[0], -1).astype(matrix.dtype)
        align = jnp.sum(targets * (matrix @ targets))  # <K, y y'>; |y y'| = |y' y|
        record["alignment"] = align / (jnp.linalg.norm(matrix) * jnp.linalg.norm(targets.T @ targets))
    return record
