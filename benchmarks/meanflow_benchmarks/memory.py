"""How much memory a compiled program and this process need."""

import resource
import sys
from typing import NamedTuple

import jax

MEGABYTE, GIGABYTE = 2.0**20, 2.0**30


class ProgramMemory(NamedTuple):
    """Bytes that the compiler plans for one program; NaN on backends that do not tell.

    Attributes:
        arguments: the inputs.
        output: the results.
        temporary: everything in between.
    """

    arguments: float
    output: float
    temporary: float


def program_memory(program: jax.stages.Compiled) -> ProgramMemory:
    """Return the bytes that a compiled program will use.

    Example:
        >>> program = jax.jit(lambda x: x + 1).lower(jax.numpy.zeros(8, "float32")).compile()
        >>> program_memory(program).output
        32.0
    """
    plan = program.memory_analysis()
    if plan is None:
        return ProgramMemory(float("nan"), float("nan"), float("nan"))
    return ProgramMemory(
        float(plan.argument_size_in_bytes), float(plan.output_size_in_bytes), float(plan.temp_size_in_bytes)
    )


def peak_bytes() -> float:
    """Return the largest resident size that this process has had so far, in bytes.

    Example:
        >>> peak_bytes() > 1e6
        True
    """
    unit = 1 if sys.platform == "darwin" else 1024  # Linux counts in kilobytes, macOS in bytes
    return float(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit)
