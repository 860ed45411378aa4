"""Programs for accelerators that are not there: compiled from descriptions of the devices, never run.

The compilers for CUDA and TPU come with ``pip install 'meanflow[accelerators]'``; no device and no driver is needed.
"""

import functools
import importlib.resources
import importlib.util
import os
import pathlib
import re
import tempfile
import time
from collections.abc import Callable
from typing import NamedTuple

import jax
import numpy as np
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import PyTree

from meanflow_benchmarks.hlo import Program, Work


class Device(NamedTuple):
    """What one device of a kind can do at best, from its makers' data sheets.

    Attributes:
        bandwidth: bytes from its memory in a second.
        products: operations in a second in matrix products, in the precision that float32 has there by default.
        other: operations in a second outside of them, in float32.
        launch: seconds from the start of one small kernel to that of the next.
    """

    bandwidth: float
    products: float
    other: float
    launch: float


DEVICES = {
    # SXM5: 3.35 TB/s, 132 x 128 fused multiply-adds at 1.98 GHz; float32 products as TensorFloat-32 without sparsity
    "h100": Device(3.35e12, 4.95e14, 6.7e13, 2e-6),
    # 819 GB/s, 197 TFLOP/s in bfloat16; the vector unit: 4 x 8 x 128 lanes at 1.5 GHz; a fusion starts in about 1 us
    "v5e": Device(8.19e11, 1.97e14, 6.1e12, 1e-6),
}


def bounds(device: str, work: Work) -> dict[str, float]:
    """Return the seconds that each part of some work takes at least, by what would bind it.

    Example:
        >>> least = bounds("h100", Work(kernels=10, collectives=0, traffic=10**9, flops=10**6, products=0))
        >>> max(least, key=least.get), round(1e6 * least["memory"])
        ('memory', 299)
    """
    can = DEVICES[device]
    return {
        "memory": work.traffic / can.bandwidth,
        "arithmetic": work.products / can.products + (work.flops - work.products) / can.other,
        "kernel starts": work.kernels * can.launch,
    }


def available() -> dict[str, bool]:
    """Return whether the compilers for CUDA and TPU are installed, by the names of their platforms."""
    names = {"cuda": "jax_plugins.xla_cuda13", "tpu": "libtpu"}

    def installed(name: str) -> bool:
        try:
            return importlib.util.find_spec(name) is not None
        except ModuleNotFoundError:  # the package that holds it is not there
            return False

    return {platform: installed(name) for platform, name in names.items()}


@functools.cache
def devices(kind: str, count: int = 1) -> np.ndarray:
    """Return ``count`` devices of a kind, ``"h100"`` or ``"v5e"`` (a host has four of those), without having any.

    Args:
        kind: of the devices.
        count: how many.
    """
    if kind == "h100":
        config = (importlib.resources.files("meanflow_benchmarks") / "h100.txtpb").read_text()
        found = topologies.get_topology_desc(platform="cuda", target_config=config, topology=f"1x1x{count}")
    else:
        os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")  # else the compiler asks the network where it is
        # nothing is run, so that processes do not collide
        os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")
        found = topologies.get_topology_desc(platform="tpu", topology_name="v5e:2x2")
    return np.array(found.devices[:count])


class Compiled(NamedTuple):
    """A compiled program and what its compiler says about it.

    Attributes:
        program: its instructions.
        seconds: processor time of the compiler.
        temporary, arguments, output: bytes on each device.
        estimate: seconds that the compiler expects a run to take, without its loops; None where it says nothing (CUDA).
        cas: kernels with a compare-and-swap loop in their machine code, in which each thread tries again until it wins:
            so is a scatter-add made without support of the hardware. None where the machine code was not read.
    """

    program: Program
    seconds: float
    temporary: int
    arguments: int
    output: int
    estimate: float | None
    cas: list[str] | None


def compile_for(
    kind: str,
    function: Callable[..., PyTree],
    *arguments: PyTree,
    mesh: Mesh | None = None,
    specs: PyTree = None,
    machine_code: bool = False,
) -> Compiled:
    """Compile a function of arrays for one ``"h100"`` or ``"v5e"``, or for the devices of a mesh.

    Args:
        kind: of the device.
        function: what is compiled; its arguments are pytrees of arrays.
        arguments: arrays, or ``jax.ShapeDtypeStruct``, whose shapes and types the program is for.
        mesh: several devices; default one of that kind.
        specs: a ``PartitionSpec`` for each array of the arguments; default all are whole on every device.
        machine_code: whether to read the PTX as well (CUDA only).
    """
    place = Mesh(devices(kind), ("devices",)) if mesh is None else mesh
    specs = jax.tree.map(lambda _: PartitionSpec(), arguments) if specs is None or mesh is None else specs

    def described(u: jax.Array, spec: PartitionSpec) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(u.shape, u.dtype, sharding=NamedSharding(place, spec))

    lowered = jax.jit(function).lower(*jax.tree.map(described, arguments, specs))
    with tempfile.TemporaryDirectory() as folder:
        options: dict[str, str | bool] = {"xla_dump_to": folder} if machine_code else {}
        start = time.process_time()
        try:
            built = lowered.compile(compiler_options=options)
        except jax.errors.JaxRuntimeError as error:
            # Without a device the compiler for CUDA cannot try out how to cut a product into tiles; its first guess
            # does not fit all of them. With a device it would turn to the library of products, as it is told to here.
            if "output tile sizes" not in str(error):
                raise
            built = lowered.compile(compiler_options=options | {"xla_gpu_enable_triton_gemm": False})
        seconds = time.process_time() - start
        code = [path.read_text() for path in pathlib.Path(folder).glob("*.ptx")]
    memory, cost = built.memory_analysis(), built.cost_analysis()
    assert memory is not None
    return Compiled(
        Program(built.as_text() or ""),
        seconds,
        memory.temp_size_in_bytes,
        memory.argument_size_in_bytes,
        memory.output_size_in_bytes,
        cost["optimal_seconds"] if cost and "optimal_seconds" in cost else None,
        [name for text in code for name in _compare_and_swap(text)] if machine_code else None,
    )


def _compare_and_swap(code: str) -> list[str]:
    """Return the names of the kernels in some PTX that compare and swap."""
    kernels = re.split(r"\.entry\s+", code)[1:]
    return [kernel.split("(")[0] for kernel in kernels if re.search(r"\batom\.[\w.]*cas", kernel)]
