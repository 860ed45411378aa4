"""Which method computes a tangent kernel in the least time within the memory that is allowed?

All counts come from the traced program (``cost``): operations of matrix products and convolutions, and numbers that
pass through memory. Nothing is compiled.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Annotated, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jaxtyping import ArrayLike, PyTree, Shaped

from meanflow import _boundary
from meanflow._boundary import Count, checked, choice, count, function, instance
from meanflow._reuse import kept_by_shape
from meanflow.kernels._empirical import cost, structured
from meanflow.kernels._empirical.contraction import fitting
from meanflow.kernels._empirical.cost import Block, Cost
from meanflow.kernels._empirical.coupling import STATS, KernelMaps, check_function, is_traced, kernel_maps
from meanflow.kernels._empirical.layout import Layout, coupled_layout, free_layout
from meanflow.kernels._empirical.modules import Apply, Batch, Normalized, Params, as_arrays, batches, floats

METHODS = ("auto", "jacobian", "products", "structured")
OUTPUTS = ("full", "trace", "diagonal")


AnyApply = Annotated[Apply | Normalized, function]

Stats = Annotated[str, choice(*STATS)]


class NtkPlan(NamedTuple):
    """What ``empirical_ntk`` will do.

    Attributes:
        method: "jacobian", "products" or "structured".
        chunk: rows of the kernel computed at a time.
        coupled: whether samples are treated as depending on each other.
        operations: estimated time of each method, in operations of a matrix product.
        bytes: peak memory beside parameters and inputs, for each method.
        reason: the choice in words.
    """

    method: str
    chunk: int
    coupled: bool
    operations: dict[str, float]
    bytes: dict[str, float]
    reason: str


@checked
@dataclasses.dataclass(frozen=True)
class Method:
    """How a tangent kernel is computed; the result does not depend on it.

    Args:
        name: "jacobian" forms both Jacobians; "products" computes one vector-Jacobian and one Jacobian-vector product a
            row; "structured" finds every product of a parameter in the trace of the function and takes, parameter by
            parameter, Gram matrices or that layer's Jacobian; "auto" takes the cheapest that fits.
        limit: the most bytes that the computation may take, 4 GiB by default.
        chunk: rows computed at a time, any number; chosen from the limit by default. Functions that couple samples are
            always linearized on the whole batch.
        mesh: devices over which the rows are split, any number of rows over any number of devices; for samples that do
            not depend on each other.

    >>> Method("structured", limit=2**30).limit
    1073741824
    """

    name: Annotated[str, choice(*METHODS)] = "auto"
    limit: Annotated[int, count(1, 2**62)] = 2**32
    chunk: Count | None = None
    mesh: Annotated[Mesh, instance(Mesh, hint="see jax.make_mesh")] | None = None

    @checked
    def plan(
        self,
        apply: AnyApply,
        params: Annotated[Params, floats],
        x: Annotated[PyTree[Shaped[ArrayLike, "T ..."]], batches],
        z: Annotated[PyTree[Shaped[ArrayLike, "S ..."]], batches] | None = None,
        *,
        stats: Stats | None = None,
        outputs: Annotated[str, choice(*OUTPUTS)] = "full",
    ) -> NtkPlan:
        """Return what ``empirical_ntk`` would do for these arguments, and at what cost; no kernel is computed.

        Args:
            apply: as in ``empirical_ntk``, as all that follow.
            params: pytree.
            x: batch (T, ...).
            z: second batch (S, ...), or None for x.
            stats: which statistics normalize the samples.
            outputs: which outputs are kept.

        >>> import jax.numpy as jnp
        >>> apply = lambda p, x: jnp.tanh(jnp.tanh(x @ p[0]) @ p[1]) @ p[2]
        >>> params = (jnp.ones((2, 100)), jnp.ones((100, 100)), jnp.ones(100))
        >>> Method().plan(apply, params, jnp.ones((300, 2))).method
        'structured'
        """
        job = Job(*as_arrays(apply, x, z), params, stats, outputs, self)
        probe(job)
        return planned(job, laid_out(job, job.maps(), jax.default_backend() == "cpu"))


def method_kind(name: str, value: object) -> object:
    """Accept a ``Method``, or its name."""
    return value if isinstance(value, Method) else _boundary.choice(*METHODS)(name, value)


class Job(NamedTuple):
    """A kernel that is to be computed: checked arguments of ``empirical_ntk``, samples as arrays."""

    apply: Apply | Normalized
    x: Batch
    z: Batch | None
    params: Params
    stats: str | None
    outputs: str | Sequence[str]
    method: Method

    def maps(self) -> KernelMaps:
        """Return the functions whose Jacobians make the kernel, of a job that ``probe`` has accepted."""
        return kernel_maps(self.apply, self.params, self.x, self.z, self.stats)


def probe(job: Job) -> str | None:
    """Refuse functions that do not fit to their arguments, or that couple samples where that is not expected.

    Returns:
        The platform of the devices on which the kernel is computed, such as "cpu"; None while it is being traced.
    """
    asked = (job.apply, job.params, job.x, job.z, job.stats)
    # what is being traced belongs to one trace: it is probed at other values
    if any(map(is_traced, jax.tree.leaves(asked))):
        check_function(*asked)
        return None
    _check_once(*asked)
    return next(iter(job.x.devices())).platform


_check_once = kept_by_shape(check_function)


class Laid(NamedTuple):
    """A kernel's traces, and how the structured method goes about it.

    Attributes:
        left, right: the traces at x and at z: of one sample where samples are free, else of the whole batches.
        block: the sizes of the kernel.
        shape: of the outputs at one sample.
        passes: the cost of ``left``.
        layout: contractions, samples and rows at a time.
        single: (params, sample) -> outputs at that sample; None if samples are coupled.
    """

    left: structured.Traced
    right: structured.Traced
    block: Block
    shape: tuple[int, ...]
    passes: cost.Passes
    layout: Layout
    single: Apply | None


def laid_out(job: Job, maps: KernelMaps, cpu: bool) -> Laid:
    """Trace the function once, and lay out the structured method."""
    moving, still = eqx.partition(job.params, eqx.is_inexact_array)
    leaves, structure = jax.tree.flatten(moving)
    whole = lambda some: eqx.combine(jax.tree.unflatten(structure, some), still)
    rows, shape = job.x.shape[0], jax.eval_shape(maps.left, job.params).shape[1:]
    columns = rows if job.z is None else job.z.shape[0]
    block = Block(rows, columns, math.prod(shape), str(job.outputs), job.z is None)
    trace = lambda function, sample: structured.trace(
        lambda some, at: function(whole(some), at), leaves, sample
    )
    single, chunk, limit = maps.single, job.method.chunk, job.method.limit
    if single is None:
        left = trace(lambda p, _: maps.left(p), ())
        right = left if job.z is None else trace(lambda p, _: maps.right(p), ())
        passes = cost.passes(left.analysis.scope.closed, len(leaves))
        return Laid(
            left, right, block, shape, passes, coupled_layout(left, passes, block, chunk, limit), None
        )
    sample = jax.ShapeDtypeStruct(job.x.shape[1:], job.x.dtype)
    one = lambda p, at: single(p, at[None])
    traced = trace(one, sample)
    if traced.output.shape != (1, *shape):
        # a function that squeezes its outputs loses the axis of a single sample: it gets two equal ones
        one = lambda p, at: single(p, jnp.stack([at, at]))[:1]
        traced = trace(one, sample)
    passes = cost.passes(traced.analysis.scope.closed, len(leaves))
    layout = free_layout(traced, passes, block, chunk, limit, cpu)
    return Laid(traced, traced, block, shape, passes, layout, one)


def planned(job: Job, laid: Laid) -> NtkPlan:
    """Choose method and chunk."""
    method, traced, block = job.method, laid.left, laid.block
    if not traced.used and not laid.right.used:
        raise ValueError("the outputs of apply do not depend on params, so that its kernel is zero")
    result = traced.output.dtype.itemsize * block.rows * block.columns * block.kernel
    if result > method.limit:
        raise ValueError(
            f"the kernel alone takes {result:.3g} bytes, above limit={method.limit:.3g}; "
            "kernels.ntk_operator multiplies by it without forming it"
        )
    coupled = laid.single is None
    total, memory, rows = _plain_methods(laid, method)
    total["structured"], memory["structured"] = laid.layout.cost, laid.layout.bytes
    operations = {m: c.total for m, c in total.items()}
    chosen, reason = _choose(method, operations, memory)
    if chosen == "structured":
        rows = laid.layout.piece if coupled else laid.layout.rows
    return NtkPlan(chosen, method.chunk or rows, coupled, operations, memory, reason)


def _plain_methods(laid: Laid, method: Method) -> tuple[dict[str, Cost], dict[str, float], int]:
    """Count the methods that know nothing of the network: operations, memory, and rows that fit at a time."""
    counted, block, coupled = laid.passes, laid.block, laid.single is None
    parameters = sum(math.prod(a.shape) for a in laid.left.leaves)
    item, many = laid.left.output.dtype.itemsize, block.outputs
    # gradients of convolutions in their parameters, sample by sample, run at a small part of a product's speed
    slow = Cost((10.0 if coupled else 40.0) * counted.convolved)
    # one gradient in the parameters: forward, backward, and the slow part of convolutions
    pull = counted.backward + counted.forward + slow
    rows, columns = block.rows * many, block.columns * many
    both = rows if block.symmetric else rows + columns
    # J J', of which only equal outputs are multiplied unless the full kernel is kept
    product = 2.0 * block.rows * block.columns * parameters * (many**2 if block.kept == "full" else many)
    # a coupled function is evaluated on the whole batch at once
    batches = 1.0 if coupled else float(block.columns)
    total = {
        "jacobian": pull * both + Cost(product, 3.0 * both * parameters),
        "products": pull * rows + (counted.forward + counted.forward + slow) * (rows * batches),
    }
    kernel = block.rows * block.columns * block.kernel * (2 if block.kept == "full" else 1)
    # bytes of one row: its gradients, its activations, and its row of the kernel
    one = item * many * (parameters + 2 * counted.stored + block.columns * many)
    at_a_time = method.chunk or fitting(block.rows, method.limit / 8, one)
    passing = min(at_a_time, block.rows)
    memory = {
        "jacobian": item * (2.0 * both * parameters + kernel) + passing * one,
        "products": item * kernel + passing * (one + item * many * counted.stored * batches),
    }
    return total, memory, at_a_time


def _choose(method: Method, total: dict[str, float], memory: dict[str, float]) -> tuple[str, str]:
    """Return the method and the reason in words; "auto" is resolved, and too large a Jacobian refused."""
    limit = method.limit
    if method.name == "auto":
        fitting = {m: f for m, f in total.items() if memory[m] <= limit}
        # when nothing fits, the one that comes closest
        chosen = min(fitting, key=lambda m: fitting[m]) if fitting else min(memory, key=lambda m: memory[m])
        spent = f"least time ({total[chosen]:.2g} operations)"
        return chosen, f"{chosen}: {spent} among methods within {limit:.2g} bytes"
    if method.name == "jacobian" and memory["jacobian"] > limit:
        raise ValueError(
            f"the Jacobian takes {memory['jacobian']:.3g} bytes, above limit={limit:.3g}; use "
            'method="products" with chunk=, or kernels.ntk_operator'
        )
    return method.name, f"{method.name}: asked for"
