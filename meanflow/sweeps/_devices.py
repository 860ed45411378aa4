"""Devices and processes: the program of many cells, meshes, arrays on them, and several processes that act as one.

``batched`` maps the program of one cell, a pure function cell(shared, inputs) -> dict of arrays, over the leading axis
of ``inputs``; over a mesh, the axis ``sweep`` is split by shard_map (cells never wait for each other's steps) and the
axis ``particles`` by the compiler, which sums over devices where a prediction sums over neurons.

Every process runs the same program on its own devices, JAX's distributed runtime moves the arrays, and process 0 alone
opens the store, writes and reports. What a process does alone (preparing, compiling, writing) it does in ``together``,
after which all processes know of each other's errors: one that failed would otherwise leave the others waiting for it.
"""

import abc
import contextlib
import pathlib
import signal
import threading
from collections.abc import Callable, Iterator, Mapping
from types import FrameType
from typing import TypeAlias, TypeVar

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jax.stages import Compiled
from jaxtyping import Array, PyTree

from meanflow import _boundary
from meanflow._reuse import kept_by_shape
from meanflow.measures._cloud import Cloud
from meanflow.sweeps._store import StoreError

SWEEP, PARTICLES = "sweep", "particles"
MEMORY_SHARE = 0.9  # of the free memory that a chunk may take
Arrays: TypeAlias = dict[str, np.ndarray]
Results: TypeAlias = dict[str, Array]
Tree = TypeVar("Tree")


class Cell(eqx.Module):
    """The program of one cell: a pure function of what all cells share and of the cell's own inputs."""

    @abc.abstractmethod
    def __call__(self, shared: PyTree, inputs: Mapping[str, PyTree]) -> Results:
        """Return the results of the cell as arrays by name."""


def batched(
    cell: Cell, shared: PyTree, inputs: PyTree, mesh: Mesh | None = None, *, one_by_one: bool = False
) -> Results:
    """Map ``cell`` over the leading axis of ``inputs``; pure, so it can be jitted, differentiated and exported.

    Args:
        cell: the program of one cell.
        shared: what all cells share.
        inputs: the inputs of the cells, along the leading axis.
        mesh: devices; None for one.
        one_by_one: each device runs its cells one after the other instead of all at once.
    """
    # closures would hide the arrays of the cell from shard_map
    arrays, rest = eqx.partition((cell, shared), eqx.is_array)

    def run(arrays: PyTree, inputs: PyTree) -> Results:
        cell, shared = eqx.combine(arrays, rest)
        if one_by_one:
            return jax.lax.map(lambda own: cell(shared, own), inputs)
        return jax.vmap(cell, in_axes=(None, 0))(shared, inputs)

    if mesh is not None:
        along = PartitionSpec(SWEEP)
        run = jax.shard_map(
            run,
            mesh=mesh,
            in_specs=(PartitionSpec(), along),
            out_specs=along,
            axis_names={SWEEP},
            check_vma=False,
        )
    return run(arrays, inputs)


def compile_batched(cell: Cell, shared: PyTree, inputs: PyTree, mesh: Mesh | None) -> Compiled:
    """Return the compiled program for inputs of these shapes, as a function of the arrays of (cell, shared, inputs).

    It is compiled ahead of time and can run on these shapes only, so a group of cells costs one compilation. Programs
    are kept, and a later sweep with the same settings and shapes uses them again.
    """
    arrays, rest = eqx.partition((cell, shared, inputs), eqx.is_array)
    shapes = jax.tree.map(lambda u: jax.ShapeDtypeStruct(u.shape, u.dtype, sharding=u.sharding), arrays)
    return _compile(rest, shapes, mesh)


@kept_by_shape
def _compile(rest: PyTree, shapes: PyTree, mesh: Mesh | None) -> Compiled:
    """Compile the program for the given static parts and shapes."""

    def run(arrays: PyTree, one_by_one: bool) -> Results:
        cell, shared, inputs = eqx.combine(arrays, rest)
        return batched(cell, shared, inputs, mesh, one_by_one=one_by_one)

    program = jax.jit(run, static_argnums=1)
    lowered = program.lower(shapes, False)
    first, *others = jax.devices()[:1] if mesh is None else mesh.devices.ravel()
    # On the CPU, LAPACK hands many matrices to the pool of threads that it is called from, and waits. When all threads
    # of the pool wait like that, as happens with several calls or several devices, the program stands still for ever
    # (jax 0.10). Cells that run one after the other hand over one matrix at a time, and nobody waits.
    if first.platform == "cpu" and lowered.as_text().count("@lapack_") > (not others):
        lowered = program.lower(shapes, True)
    return lowered.compile()


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
    """Return the mesh to use, over all devices of all processes or the first few; None for a single device."""
    if isinstance(asked, Mesh) or (asked is None and jax.device_count() == 1):
        return asked
    found, (across, along) = jax.devices(), asked or (None, 1)
    across = across or max(1, len(found) // along)
    if across * along > len(found):
        raise ValueError(f"a mesh of {across} x {along} devices needs {across * along}, got {len(found)}")
    return Mesh(np.array(found[: across * along]).reshape(across, along), (SWEEP, PARTICLES))


def place(inputs: PyTree, mesh: Mesh | None) -> PyTree[Array]:
    """Put host arrays on the devices of the mesh; each process fills its own.

    Clouds are split along both axes of the mesh, everything else along the cells.
    """
    if mesh is None:
        return jax.tree.map(jnp.asarray, inputs)

    def put(u: np.ndarray, split: bool) -> Array:
        # the width of a cloud is one number for each cell
        spec = PartitionSpec(*(SWEEP, PARTICLES)[: 1 + (split and u.ndim > 1)])
        return jax.make_array_from_callback(u.shape, NamedSharding(mesh, spec), lambda index: u[index])

    def put_all(node: PyTree) -> PyTree[Array]:
        return jax.tree.map(lambda u: put(u, isinstance(node, Cloud)), node)

    return jax.tree.map(put_all, inputs, is_leaf=lambda node: isinstance(node, Cloud))


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


def host_memory() -> int | None:
    """Return the bytes of memory that are free on this host, or None where the system does not say."""
    info = pathlib.Path("/proc/meminfo")
    lines = info.read_text().splitlines() if info.exists() else []
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")), None)


def free_memory(device: jax.Device) -> int | None:
    """Return the bytes that a program may still take on a device, or None where the platform does not say."""
    stats = device.memory_stats() or {}
    if "bytes_limit" in stats:
        return int(stats["bytes_limit"] - stats.get("bytes_in_use", 0))
    return host_memory() if device.platform == "cpu" else None


def check_memory(compiled: Compiled, length: int, size: int, mesh: Mesh | None) -> None:
    """Refuse a chunk of ``length`` cells of ``size`` particles that needs more memory than there is, before it runs."""
    usage = compiled.memory_analysis()
    if usage is None:
        return
    # one chunk runs while another waits or is collected
    held = 2 * (usage.argument_size_in_bytes + usage.output_size_in_bytes)
    here = jax.local_devices()[:1] if mesh is None else mesh.local_devices
    # simulated devices of one host share its memory
    sharing = len(here) if here[0].platform == "cpu" else 1
    needed, free = (usage.temp_size_in_bytes + held) * sharing, free_memory(here[0])
    if free is None or needed <= MEMORY_SHARE * free:
        return
    fits = int(length * MEMORY_SHARE * free / needed)
    advice = f"pass chunk={fits}" if fits else "one cell is too large for this device; spread it over a mesh"
    raise ValueError(
        f"a chunk of {length} cells with {size} particles each needs {needed / 2**30:.3g} GiB, "
        f"{free / 2**30:.3g} GiB are free; {advice}"
    )


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
