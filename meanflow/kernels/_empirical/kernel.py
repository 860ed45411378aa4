"""The tangent kernel as users ask for it: of arrays or pytrees of inputs, by output axes, by parameters, over devices.

All of it is ``ntk.evaluate`` for one batch of arrays, called with functions that select: samples by their index,
outputs along some axes, parameters of one group. A selection is an object with its arrays inside, so that all of its
values share one compiled program.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Annotated

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec
from jaxtyping import Array, ArrayLike, Float, Int, PyTree, Shaped

from meanflow import _boundary
from meanflow._boundary import checked, choice, either, sequence
from meanflow._reuse import compiled
from meanflow.kernels._empirical import ntk
from meanflow.kernels._empirical.modules import (
    Batch,
    Function,
    Normalized,
    Params,
    as_arrays,
    batches,
    floats,
    wrapped,
)
from meanflow.kernels._empirical.plan import (
    OUTPUTS,
    AnyApply,
    Job,
    Method,
    Stats,
    method_kind,
    probe,
)

AUTO = Method()


@checked
def empirical_ntk(
    apply: AnyApply,
    params: Annotated[Params, floats],
    x: Annotated[PyTree[Shaped[ArrayLike, "T ..."]], batches],
    z: Annotated[PyTree[Shaped[ArrayLike, "S ..."]], batches] | None = None,
    *,
    stats: Stats | None = None,
    outputs: Annotated[str | Sequence[str], either(choice(*OUTPUTS), sequence(choice(*OUTPUTS)))] = "full",
    method: Annotated[str | Method, method_kind] = AUTO,
    groups: Callable[[str], str] | None = None,
) -> PyTree[Float[Array, "T S ..."]]:
    """Return K(x, z)[t, s, c, d] = <df_c(x_t)/dparams, df_d(z_s)/dparams>, with no normalizing factor anywhere.

    Args:
        apply: (params, batch) -> outputs (T, ...); a plain function, or a ``Normalized`` one. ``from_module`` makes one
            of a module of flax, equinox or haiku.
        params: pytree; integer leaves are constants.
        x: batch (T, ...), or a pytree of such arrays.
        z: second batch (S, ...), or None for x.
        stats: which statistics normalize the samples; required as soon as the function couples samples.
            "batch": each of x and z by its own, the gradients through them included. "train": x and z both by
            those of x, gradients included; K(x, z) then says how a step on the training batch x moves the
            prediction at z. "frozen": those of x (x and z), without gradient; this is not inference mode.
            "running": the averages that the model has gathered in training, which is inference mode, ``eval()``.
            A function that is free of coupling may be declared either of the last two.
        outputs: "full": T x S x C x C, shape (T, S) + O + O for outputs of shape (T,) + O. "trace": sum over
            c of K_cc (T, S), not divided by C. "diagonal": K_cc, (T, S) + O. Or one of these for each output axis:
            the shape is then (T, S) + (axes that are full or diagonal) + (axes that are full).
        method: "jacobian", "products", "structured", or "auto" for the cheapest that fits in 4 GiB (``Method().plan``
            says which and why). A ``Method`` sets another limit of memory, rows computed at a time, and devices over
            which the rows are split.
        groups: path of a parameter, such as "encoder/layer_1/kernel", -> name of its group. The kernel of each group
            is then computed apart; their sum is the kernel of all.

    Returns:
        The kernel in the dtype of the outputs; with ``groups`` a dict of kernels, by the names of the groups. It can
        be differentiated in ``params``: the derivative is that of the kernel as a function of them, "frozen"
        statistics moving along, and does not see neurons that change sides of a kink.

    Cost, P parameters, F operations a forward pass of one sample, b bytes a number. Time: jacobian
    (T + S) C F + T S C^2 P; products T S C F; structured (T + S) C F and for each parameter the less of T S C^2 P
    and T S p^2 (k + C o), for a product of k inputs and o outputs at p positions ("trace": C in place of C^2).
    Memory: the kernel b T S C^2; jacobian b (T + S) C P beside it; products b chunk C P; structured b (T + S) times
    C P or p (k + C o).

    Raises:
        ValueError: for a coupled function without ``stats``, unknown names, or memory above the limit.

    >>> import jax.numpy as jnp
    >>> empirical_ntk(lambda w, x: x @ w, jnp.ones(2), jnp.array([[1.0, 0.0], [1.0, 1.0]])).tolist()
    [[1.0, 1.0], [1.0, 2.0]]
    >>> net = lambda p, x: jnp.tanh(x @ p["first"]) @ p["last"]
    >>> params = {"first": jnp.zeros((2, 3)), "last": jnp.ones(3)}
    >>> shares = empirical_ntk(net, params, jnp.eye(2), groups=lambda path: path)
    >>> {name: kernel.tolist() for name, kernel in shares.items()}
    {'first': [[3.0, 0.0], [0.0, 3.0]], 'last': [[0.0, 0.0], [0.0, 0.0]]}
    """
    how = method if isinstance(method, Method) else Method(method)
    job = Job(*as_arrays(apply, x, z), params, stats, outputs, how)
    return _kernel(job) if groups is None else _by_group(job, groups)


def _kernel(job: Job) -> Float[Array, "T S ..."]:
    """Compute the kernel here, or on the devices of a mesh; all outputs alike, or axis by axis."""
    if not isinstance(job.outputs, str):
        return _by_axes(job)
    if job.method.mesh is not None:
        return _over_devices(job, job.method.mesh)
    platform = probe(job)
    return (ntk.evaluate_on_cpu if platform == "cpu" else ntk.evaluate)(job, platform)


class ByOutput(Function):
    """The outputs with one index along some axes, all others kept."""

    function: Callable[..., PyTree]
    axes: tuple[int, ...] = eqx.field(static=True)
    index: Int[Array, ""]

    def __call__(self, params: Params, x: Batch, *statistics: PyTree) -> Array:
        """Evaluate the function and select."""
        outputs = self.function(params, x, *statistics)
        moved = jnp.moveaxis(outputs, [1 + a for a in self.axes], range(1, 1 + len(self.axes)))
        flat = moved.reshape((moved.shape[0], -1, *moved.shape[1 + len(self.axes) :]))
        return jax.lax.dynamic_index_in_dim(flat, self.index, 1, keepdims=False)


def _by_axes(job: Job) -> Float[Array, "T S ..."]:
    """Compute the kernel with each output axis treated in its own way: one full kernel for each index of the others."""
    outputs = tuple(job.outputs)
    probe(job)
    shape = jax.eval_shape(job.maps().left, job.params).shape[1:]
    if len(shape) != len(outputs):
        raise ValueError(
            f"outputs must have one entry for each of {len(shape)} output axes {shape}, got {list(outputs)}"
        )
    if len(set(outputs)) == 1:
        return _kernel(job._replace(outputs=outputs[0]))
    axes = tuple(a for a, kind in enumerate(outputs) if kind != "full")
    sizes = tuple(shape[a] for a in axes)

    def one(index: int) -> Array:
        wrap = lambda function: ByOutput(function, axes, jnp.asarray(index))
        return _kernel(job._replace(apply=wrapped(job.apply, wrap, lambda s: s), outputs="full"))

    stacked = jnp.stack([one(i) for i in range(math.prod(sizes))])
    kernel = stacked.reshape(sizes + stacked.shape[1:])
    # axes: one kernel for each index along those that are not full; traced ones are summed
    kernel = jnp.sum(kernel, axis=tuple(i for i, a in enumerate(axes) if outputs[a] == "trace"))
    # the diagonal axes stand in front now: they go back to their places among the first copy of the kept axes
    diagonal = [a for a in axes if outputs[a] == "diagonal"]
    kept = [a for a, kind in enumerate(outputs) if kind != "trace"]
    return jnp.moveaxis(kernel, range(len(diagonal)), [2 + kept.index(a) for a in diagonal])


class ByGroup(Function):
    """A function of some of the parameters, the others held."""

    function: Callable[..., PyTree]
    others: Params

    def __call__(self, params: Params, x: Batch, *statistics: PyTree) -> PyTree:
        """Evaluate the function at all parameters."""
        return self.function(eqx.combine(params, self.others), x, *statistics)


def _by_group(job: Job, groups: Callable[[str], str]) -> dict[str, Float[Array, "T S ..."]]:
    """Compute the kernel of each group of parameters."""
    name = lambda path: jax.tree_util.keystr(path, simple=True, separator="/")
    named = lambda path: _boundary.text("what groups returns", groups(name(path)))
    label = lambda path, leaf: named(path) if eqx.is_inexact_array(leaf) else None
    labels = jax.tree_util.tree_map_with_path(label, job.params)
    found = {}
    for group in dict.fromkeys(jax.tree.leaves(labels)):
        mine = jax.tree.map(lambda mark, group=group: mark == group, labels, is_leaf=lambda m: m is None)
        part, others = eqx.partition(job.params, mine)
        wrap = lambda function, others=others: ByGroup(function, others)
        found[group] = _kernel(job._replace(apply=wrapped(job.apply, wrap, wrap), params=part))
    return found


def _over_devices(job: Job, mesh: Mesh) -> Float[Array, "T S ..."]:
    """Compute the rows of the kernel on the devices of a mesh, each its share."""
    probe(job)
    if job.maps().single is None:
        raise ValueError(
            "mesh needs samples that do not depend on each other, for which each device has its rows"
        )
    # rows are filled up to a multiple of the devices with copies of the last one, and cut off in the end
    short = -job.x.shape[0] % mesh.size
    padded = jnp.concatenate([job.x, jnp.repeat(job.x[-1:], short, axis=0)]) if short else job.x
    # jax.make_mesh makes explicit axes by default, which want inputs that are split already
    return _sharded(job, padded, Mesh(mesh.devices, mesh.axis_names))[: job.x.shape[0]]


@compiled
def _sharded(job: Job, padded: Batch, mesh: Mesh) -> Float[Array, "T S ..."]:
    apply = job.apply
    if isinstance(apply, Normalized):  # its statistics are those of all rows, computed before they are split
        constants = apply.running if job.stats == "running" else apply.statistics(job.params, job.x)
        inner: Callable[..., PyTree] = apply.apply
    else:
        constants, inner = None, apply
    arrays, static = eqx.partition((inner, job.params, constants), eqx.is_array)

    def rows(arrays: PyTree, mine: Batch, others: Batch) -> Array:
        function, values, statistics = eqx.combine(arrays, static)
        single = function if statistics is None else (lambda p, b: function(p, b, statistics))
        alone = Method(job.method.name, job.method.limit, job.method.chunk)
        # known to be free of coupling
        return _kernel(Job(single, mine, others, values, "frozen", job.outputs, alone))

    split, whole = PartitionSpec(mesh.axis_names), PartitionSpec()
    spread = jax.shard_map(rows, mesh=mesh, in_specs=(whole, split, whole), out_specs=split, check_vma=False)
    return spread(arrays, padded, job.x if job.z is None else job.z)
