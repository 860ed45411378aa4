"""Kernels along training: a recorder that is called at steps of any loop and compiles one program for all of them."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Annotated, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, ArrayLike, Float, PyTree, Shaped

from meanflow import _boundary
from meanflow._boundary import Count, array, checked, choice, count, either, sequence
from meanflow._reuse import compiled
from meanflow.kernels._empirical.adapters import from_module
from meanflow.kernels._empirical.coupling import STATS, kernel_maps
from meanflow.kernels._empirical.kernel import empirical_ntk
from meanflow.kernels._empirical.modules import Apply, Batch, Normalized, Params, as_arrays, batches
from meanflow.kernels._gaussian import as_matrix

Network: TypeAlias = Callable[[Batch], Array] | tuple[Apply | Normalized, Params]


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
        alignment      <K, y y'> / (|K| |y|^2), if there are targets
        kernel         K as a matrix (T C, T C), outputs of sample 0 first, if ``keep``

    Args:
        x: the samples (T, ...) at which the kernel is taken, or a pytree of such arrays.
        y: targets, of the shape of the network's outputs at x, or None.
        steps: which steps are recorded: a sequence of them, a number for every so many, or None for all that it is
            called with.
        top: how many eigenvalues.
        stats: which statistics normalize, as in ``empirical_ntk``.
        keep: whether the kernels themselves are kept.

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
    ):
        rows = np.shape(jax.tree.leaves(x)[0])[0]
        if not rows:
            raise ValueError("x must hold at least one sample, got an empty batch")
        if y is not None and np.shape(y)[:1] != (rows,):
            raise ValueError(f"y must have {rows} rows like x, got shape {np.shape(y)}")
        self.x, self.y = x, None if y is None else jnp.asarray(y)
        self.steps, self.top, self.stats, self.keep = steps, top, stats, keep
        self._reference: np.ndarray | None = None
        self._recorded: list[dict[str, np.ndarray]] = []

    def __call__(self, step: int, network: Network) -> None:
        """Record ``network`` if ``step`` is one of the chosen.

        Args:
            step: the number of the step.
            network: a pair (apply, params), or an NNX module, which is taken in the mode it is in.
        """
        step, every = int(step), self.steps
        if every is not None and (step % every if isinstance(every, int) else step not in every):
            return
        if not (isinstance(network, tuple) and len(network) == 2 and callable(network[0])):
            if not callable(network):
                raise TypeError(
                    f"network must be an NNX module or a pair (apply, params), got {_boundary.show(network)}"
                )
            network = from_module(network)
        apply, x, _ = as_arrays(network[0], self.x, None)
        params = network[1]
        stats = self.stats
        # a function that was found free of coupling is declared so for the compiled program
        if stats is None:  # probed once, here: inside the compiled program it could not be
            if self._reference is None or isinstance(apply, Normalized):
                kernel_maps(apply, params, x, None, None)
            stats = "running"
        found = {k: np.asarray(v) for k, v in _measure(apply, params, x, self.y, stats, self.top).items()}
        kernel = found["kernel"] if self.keep else found.pop("kernel")
        if self._reference is None:
            self._reference = kernel
        change = np.linalg.norm(kernel - self._reference) / np.linalg.norm(self._reference)
        self._recorded.append({"step": np.asarray(step), "drift": np.asarray(change), **found})

    @property
    def record(self) -> dict[str, np.ndarray]:
        """All that was recorded, by name, stacked over the steps; empty if nothing was."""
        names = self._recorded[0] if self._recorded else {}
        return {name: np.stack([entry[name] for entry in self._recorded]) for name in names}


@compiled
def _measure(
    apply: Apply | Normalized, params: Params, x: Batch, y: Array | None, stats: str, top: int
) -> dict[str, Array]:
    """Compute the kernel and all that is recorded of it but the drift."""
    kernel = empirical_ntk(apply, params, x, stats=stats)
    size, outputs = kernel.shape[0], kernel.shape[2 : 2 + (kernel.ndim - 2) // 2]
    count = math.prod(outputs)
    matrix = as_matrix(kernel.reshape(size, size, count, count))
    record = {
        "kernel": matrix,
        "trace": jnp.trace(matrix) / size,
        "eigenvalues": jnp.linalg.eigvalsh(matrix)[::-1][:top] / size,
    }
    if y is not None:
        _boundary.shape("y", y, (size, *outputs))
        target = y.reshape(-1).astype(matrix.dtype)
        record["alignment"] = target @ (matrix @ target) / (jnp.linalg.norm(matrix) * (target @ target))
    return record
