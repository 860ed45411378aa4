"""Devices and processes: meshes, arrays on them, and several processes that act as one.

Every process runs the same program on its own devices, JAX's distributed runtime moves the arrays, and process 0 alone
opens the store, writes and reports. What a process does alone (preparing, compiling, writing) it does in ``together``,
after which all processes know of each other's errors: one that failed would otherwise leave the others waiting for it.
"""

import contextlib
import os
import pathlib
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from types import FrameType
from typing import TypeAlias, TypeVar

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, PyTree

from meanflow import _boundary
from meanflow.measures._cloud import Cloud
from meanflow.sweeps._store import StoreError

SWEEP, PARTICLES = "sweep", "particles"
Arrays: TypeAlias = dict[str, np.ndarray]
Tree = TypeVar("Tree")


def make_mesh(
    sweep: int | None = None, particles: int = 1, devices: Sequence[jax.Device] | None = None
) -> Mesh:
    """Return a mesh with axes ``sweep`` and ``particles`` over all devices of all processes, or the first few.

    Args:
        sweep: devices along which cells are spread; default all that are left.
        particles: devices along which each cloud is spread.
        devices: default ``jax.devices()``.

    >>> dict(make_mesh(sweep=1).shape)
    {'sweep': 1, 'particles': 1}
    """
    devices = list(jax.devices() if devices is None else devices)
    sweep = max(1, len(devices) // particles) if sweep is None else sweep
    if sweep * particles > len(devices):
        raise ValueError(
            f"a mesh of {sweep} x {particles} devices needs {sweep * particles}, got {len(devices)}"
        )
    return Mesh(np.array(devices[: sweep * particles]).reshape(sweep, particles), (SWEEP, PARTICLES))


def mesh_shape(name: str, value: object) -> object:
    """Accept a mesh with axes ``sweep`` and ``particles``, or how many devices there are along each of them."""
    if isinstance(value, Mesh):
        if set(value.axis_names) != {SWEEP, PARTICLES}:
            raise ValueError(f"{name} must have the axes ('sweep', 'particles'), got {value!r}")
        return value
    if not isinstance(value, tuple | list) or len(value) != 2:
        raise ValueError(
            f"{name} must be two numbers of devices, along the cells and along the particles of each cloud, or a Mesh, "
            f"got {_boundary.show(value)}"
        )
    across = None if value[0] is None else _boundary.whole(f"{name}[0]", value[0], 1)
    return across, _boundary.whole(f"{name}[1]", value[1], 1)


def find_mesh(asked: Mesh | tuple[int | None, int] | None) -> Mesh | None:
    """Return the mesh to use, None for a single device."""
    if asked is None and jax.device_count() == 1:
        return None
    return asked if isinstance(asked, Mesh) else make_mesh(*(asked or ()))


def specs(inputs: PyTree) -> PyTree[PartitionSpec]:
    """Return how the inputs are split: clouds along both axes, everything else along ``sweep``."""

    def of(node: PyTree) -> PyTree[PartitionSpec]:
        split = isinstance(node, Cloud)
        # the width of a cloud is one number for each cell
        return jax.tree.map(lambda u: PartitionSpec(*(SWEEP, PARTICLES)[: 1 + (split and u.ndim > 1)]), node)

    return jax.tree.map(of, inputs, is_leaf=lambda node: isinstance(node, Cloud))


def place(inputs: PyTree, mesh: Mesh | None) -> PyTree[Array]:
    """Put host arrays on the devices of the mesh; each process fills its own."""
    if mesh is None:
        return jax.tree.map(jnp.asarray, inputs)

    def put(u: np.ndarray, spec: PartitionSpec) -> Array:
        return jax.make_array_from_callback(u.shape, NamedSharding(mesh, spec), lambda index: u[index])

    return jax.tree.map(put, inputs, specs(inputs))


def replicate(tree: PyTree, mesh: Mesh | None) -> PyTree:
    """Return the same tree with every array held in full by every device of the mesh."""
    if mesh is None:
        return tree
    everywhere = NamedSharding(mesh, PartitionSpec())

    def put(u: Array) -> Array:
        if jnp.issubdtype(u.dtype, jax.dtypes.prng_key):
            return jax.random.wrap_key_data(put(jax.random.key_data(u)), impl=jax.random.key_impl(u))
        host = np.asarray(u)
        return jax.make_array_from_callback(host.shape, everywhere, lambda index: host[index])

    arrays, rest = eqx.partition(tree, eqx.is_array)
    return eqx.combine(jax.tree.map(put, arrays), rest)


def free_memory(device: jax.Device) -> int | None:
    """Return the bytes that a program may still take on a device, or None where the platform does not say."""
    stats = device.memory_stats()
    if stats and "bytes_limit" in stats:
        return int(stats["bytes_limit"] - stats.get("bytes_in_use", 0))
    if device.platform != "cpu":
        return None
    info = pathlib.Path("/proc/meminfo")
    if info.exists():
        for line in info.read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    if hasattr(os, "sysconf") and "SC_AVPHYS_PAGES" in os.sysconf_names:
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return None


def is_lead() -> bool:
    """Say whether this process is the one that writes and reports."""
    return jax.process_index() == 0


def gather(tree: PyTree[Array]) -> PyTree[np.ndarray]:
    """Return arrays that are spread over the devices of all processes in full on each host."""
    if jax.process_count() > 1:
        from jax.experimental import multihost_utils

        tree = multihost_utils.process_allgather(tree, tiled=True)
    return jax.tree.map(np.asarray, tree)


def share(value: Tree) -> Tree:
    """Return what process 0 holds on every process: a pytree of arrays of the same shapes everywhere."""
    if jax.process_count() == 1:
        return value
    from jax.experimental import multihost_utils

    return jax.tree.map(np.asarray, multihost_utils.broadcast_one_to_all(value))


class _Interrupts:
    """Ctrl-C on one of several processes: heard at once in its own work, and after a collective that all take part in.

    A process that left a collective, or did not come to it, would leave the others waiting there. A second Ctrl-C is
    not held back.
    """

    def __init__(self) -> None:
        self.alone, self.waiting = False, False

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Hold interrupts back, except in ``together``, while the block runs."""
        if jax.process_count() == 1 or threading.current_thread() is not threading.main_thread():
            yield
            return
        before = signal.signal(signal.SIGINT, self._hear)
        try:
            yield
        finally:
            signal.signal(signal.SIGINT, before)
            self.alone, self.waiting = False, False

    def _hear(self, number: int, frame: FrameType | None) -> None:
        if self.alone or self.waiting:
            raise KeyboardInterrupt
        self.waiting = True

    def listen(self) -> None:
        """Begin a stretch of work that this process does alone."""
        self.alone = True
        if self.waiting:
            self.waiting = False
            raise KeyboardInterrupt


INTERRUPTS = _Interrupts()
ERRORS: dict[str, type[BaseException]] = {
    kind.__name__: kind for kind in (StoreError, ValueError, TypeError, MemoryError, KeyboardInterrupt)
}
LENGTH = 4000  # bytes of a message between processes


def together(work: Callable[[], Tree]) -> Tree:
    """Do what each process does alone, and go on only if all have succeeded.

    Args:
        work: function of no arguments that waits for no other process.

    Returns:
        What ``work`` returned on this process.

    Raises:
        BaseException: what ``work`` raised here; or, if it failed on other processes only, an error of the same
            sort with their message. All processes raise then.
    """
    if jax.process_count() == 1:
        return work()
    try:
        INTERRUPTS.listen()
        value = work()
    except BaseException as problem:  # interrupts too: the others are to hear of them
        INTERRUPTS.alone = False
        _tell(problem)
        raise
    INTERRUPTS.alone = False
    _tell(None)
    return value


def _tell(problem: BaseException | None) -> None:
    """Exchange messages with all processes; raise if this one has succeeded and another has not."""
    from jax.experimental import multihost_utils

    text = ""
    if problem is not None:
        name = next((n for n, kind in ERRORS.items() if isinstance(problem, kind)), "")
        text = f"{name}|{type(problem).__name__}: {problem}"
    padded = np.frombuffer(text.encode()[:LENGTH].ljust(LENGTH, b"\0"), np.uint8)
    heard = np.asarray(multihost_utils.process_allgather(padded)).reshape(-1, LENGTH)
    for process, row in enumerate(heard):
        said = bytes(row).rstrip(b"\0").decode(errors="replace")
        if said and problem is None:
            name, _, message = said.partition("|")
            raise ERRORS.get(name, RuntimeError)(f"on process {process}: {message}")
