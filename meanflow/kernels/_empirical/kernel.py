"""The tangent kernel as users ask for it: of arrays or pytrees of inputs, by output axes, by parameters, over devices.

All of it is ``ntk.kernel_of_arrays`` for one batch of arrays, called with functions that select: samples by their
index, outputs along some axes, parameters of one group. A selection is an object with its arrays inside, so that all of
its values share one compiled program.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec
from jaxtyping import Array, ArrayLike, Float, Int, PyTree, Shaped

from meanflow import _checks
from meanflow._reuse import compiled
from meanflow.kernels._empirical import ntk
from meanflow.kernels._empirical.coupling import kernel_maps
from meanflow.kernels._empirical.modules import Apply, Batch, Function, Normalized, Outputs, Params
from meanflow.kernels._empirical.plan import OPTIONS, OUTPUTS, Method, Options
from meanflow.kernels._empirical.samples import as_arrays, wrapped


class ByOutput(Function):
    """The outputs with one index along some axes, all others kept."""

    function: Callable[..., PyTree]
    axes: tuple[int, ...] = eqx.field(static=True)
    index: Int[Array, ""]

    def __call__(self, params: Params, x: Batch, *statistics: PyTree) -> Outputs:
        """Evaluate the function and select."""
        outputs = self.function(params, x, *statistics)
        moved = jnp.moveaxis(outputs, [1 + a for a in self.axes], range(1, 1 + len(self.axes)))
        flat = moved.reshape((moved.shape[0], -1, *moved.shape[1 + len(self.axes) :]))
        return jax.lax.dynamic_index_in_dim(flat, self.index, 1, keepdims=False)


class ByGroup(Function):
    """A function of some of the parameters, the others held."""

    function: Callable[..., PyTree]
    others: Params

    def __call__(self, params: Params, x: Batch, *statistics: PyTree) -> PyTree:
        """Evaluate the function at all parameters."""
        return self.function(eqx.combine(params, self.others), x, *statistics)


KINDS = {
    **OPTIONS,
    "outputs": _checks.either(_checks.choice(*OUTPUTS), _checks.sequence(_checks.choice(*OUTPUTS))),
}


@_checks.arguments(**KINDS)
def empirical_ntk(
    apply: Apply | Normalized,
    params: Params,
    x: PyTree[Shaped[ArrayLike, "T ..."]],
    z: PyTree[Shaped[ArrayLike, "S ..."]] | None = None,
    *,
    stats: str | None = None,
    outputs: str | Sequence[str] = "full",
    chunk: int | None = None,
    method: str | Method = "auto",
) -> Float[Array, "T S ..."]:
    """Return K(x, z)[t, s, c, d] = <df_c(x_t)/dparams, df_d(z_s)/dparams>, with no normalizing factor anywhere.

    Args:
        apply: (params, batch) -> outputs (T, ...); a plain function, or a ``Normalized`` one. ``from_nnx``,
            ``from_linen``, ``from_equinox`` and ``from_haiku`` make one of a module.
        params: pytree; integer leaves are constants. ``ntk_by_group`` gives the kernel of each group of them.
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
        chunk: rows t computed at a time (any number; the result does not depend on it, since coupled
            functions are always linearized on the whole batch). Chosen from the limit of ``method`` by default.
        method: "jacobian", "products", "structured", or "auto" for the cheapest that fits in 4 GiB (``ntk_plan`` says
            which and why). A ``Method`` sets another limit of memory, and devices over which the rows are split.

    Returns:
        The kernel in the dtype of the outputs. It can be differentiated in ``params``: the derivative is that of the
        kernel as a function of them, "frozen" statistics moving along, and does not see neurons that change sides of
        a kink.

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
    """
    function, left, right = as_arrays(apply, x, z)
    how = method if isinstance(method, Method) else Method(method)
    whole = outputs if isinstance(outputs, str) else "full"
    options = Options(stats, whole, chunk, how.name, how.limit)
    if not isinstance(outputs, str):
        if len(set(outputs)) > 1:
            return _by_axes(function, params, left, right, tuple(outputs), options, how.mesh)
        _output_shape(function, params, left, stats, outputs)
        options = options._replace(outputs=outputs[0])
    return _kernel(function, params, left, right, options, how.mesh)


def _kernel(
    apply: Apply | Normalized,
    params: Params,
    x: Batch,
    z: Batch | None,
    options: Options,
    mesh: Mesh | None,
) -> Float[Array, "T S ..."]:
    """Compute the kernel here, or on the devices of a mesh."""
    if mesh is None:
        return ntk.kernel_of_arrays(apply, params, x, z, options)
    return _over_devices(apply, params, x, z, options, mesh)


def _output_shape(
    apply: Apply | Normalized, params: Params, x: Batch, stats: str | None, outputs: Sequence[str]
) -> tuple[int, ...]:
    """Return the shape of the outputs of one sample, which ``outputs`` must fit."""
    shape = jax.eval_shape(kernel_maps(apply, params, x, None, stats).left, params).shape[1:]
    if len(shape) != len(outputs):
        raise ValueError(
            f"outputs must have one entry for each of {len(shape)} output axes {shape}, got {list(outputs)}"
        )
    return shape


def _by_axes(
    apply: Apply | Normalized,
    params: Params,
    x: Batch,
    z: Batch | None,
    outputs: tuple[str, ...],
    options: Options,
    mesh: Mesh | None,
) -> Float[Array, "T S ..."]:
    """Compute the kernel with each output axis treated in its own way: one full kernel for each index of the others."""
    shape = _output_shape(apply, params, x, options.stats, outputs)
    axes = tuple(a for a, kind in enumerate(outputs) if kind != "full")
    sizes = tuple(shape[a] for a in axes)

    def one(index: int) -> Array:
        wrap = lambda function: ByOutput(function, axes, jnp.asarray(index))
        return _kernel(wrapped(apply, wrap, lambda s: s), params, x, z, options, mesh)

    stacked = jnp.stack([one(i) for i in range(math.prod(sizes))])
    kernel = stacked.reshape(sizes + stacked.shape[1:])
    # axes: one kernel for each index along those that are not full; traced ones are summed
    traced = [i for i, a in enumerate(axes) if outputs[a] == "trace"]
    kernel = jnp.sum(kernel, axis=tuple(traced))
    # the diagonal axes stand in front now: they go back to their places among the first copy of the kept axes
    diagonal = [a for a in axes if outputs[a] == "diagonal"]
    kept = [a for a, kind in enumerate(outputs) if kind != "trace"]
    return jnp.moveaxis(kernel, range(len(diagonal)), [2 + kept.index(a) for a in diagonal])


def _over_devices(
    apply: Apply | Normalized,
    params: Params,
    x: Batch,
    z: Batch | None,
    options: Options,
    mesh: Mesh,
) -> Float[Array, "T S ..."]:
    """Compute the rows of the kernel on the devices of a mesh, each its share."""
    if kernel_maps(apply, params, x, z, options.stats).single is None:
        raise ValueError(
            "mesh needs samples that do not depend on each other, for which each device has its rows"
        )
    # jax.make_mesh makes explicit axes by default, which want inputs that are split already
    mesh = Mesh(mesh.devices, mesh.axis_names)
    rows = x.shape[0]
    # rows are filled up to a multiple of the devices with copies of the last one, and cut off in the end
    short = -rows % mesh.size
    padded = jnp.concatenate([x, jnp.repeat(x[-1:], short, axis=0)]) if short else x
    kernel = _sharded(apply, params, x, padded, x if z is None else z, options, mesh)
    return kernel[:rows]


@compiled
def _sharded(
    apply: Apply | Normalized,
    params: Params,
    x: Batch,
    padded: Batch,
    z: Batch,
    options: Options,
    mesh: Mesh,
) -> Float[Array, "T S ..."]:
    if isinstance(apply, Normalized):  # its statistics are those of all rows, computed before they are split
        constants = apply.running if options.stats == "running" else apply.statistics(params, x)
        inner: Callable[..., PyTree] = apply.apply
    else:
        constants, inner = None, apply
    arrays, static = eqx.partition((inner, params, constants), eqx.is_array)

    def rows(arrays: PyTree, mine: Batch, others: Batch) -> Array:
        function, values, statistics = eqx.combine(arrays, static)
        single = function if statistics is None else (lambda p, b: function(p, b, statistics))
        declared = options._replace(stats="frozen")  # known to be free of coupling
        return ntk.kernel_of_arrays(single, values, mine, others, declared)

    split, whole = PartitionSpec(mesh.axis_names), PartitionSpec()
    return jax.shard_map(rows, mesh=mesh, in_specs=(whole, split, whole), out_specs=split, check_vma=False)(
        arrays, padded, z
    )


@_checks.arguments(
    **{name: kind for name, kind in KINDS.items() if name != "chunk"},
    groups=_checks.optional(_checks.taking(1)),
)
def ntk_by_group(
    apply: Apply | Normalized,
    params: Params,
    x: PyTree[Shaped[ArrayLike, "T ..."]],
    z: PyTree[Shaped[ArrayLike, "S ..."]] | None = None,
    *,
    groups: Callable[[str], str] | None = None,
    stats: str | None = None,
    outputs: str | Sequence[str] = "full",
    method: str | Method = "auto",
) -> dict[str, Float[Array, "T S ..."]]:
    """Return the kernel of each group of parameters, by name; their sum is the kernel of all.

    Args:
        apply: as in ``empirical_ntk``, as all arguments but ``groups``.
        params: pytree.
        x: batch (T, ...).
        z: second batch (S, ...), or None for x.
        groups: path of a parameter, such as "encoder/layer_1/kernel", -> name of its group. By default the first part
            of the path, which is a layer for most modules.
        stats: as in ``empirical_ntk``, as all that follow.
        outputs: which outputs are kept.
        method: how each kernel is computed.

    >>> import jax.numpy as jnp
    >>> net = lambda p, x: jnp.tanh(x @ p["first"]) @ p["last"]
    >>> params = {"first": jnp.zeros((2, 3)), "last": jnp.ones(3)}
    >>> shares = ntk_by_group(net, params, jnp.eye(2))
    >>> {name: kernel.tolist() for name, kernel in shares.items()}
    {'first': [[3.0, 0.0], [0.0, 3.0]], 'last': [[0.0, 0.0], [0.0, 0.0]]}
    """
    named = groups or (lambda path: path.split("/")[0])
    name = lambda path: jax.tree_util.keystr(path, simple=True, separator="/")
    labels = jax.tree_util.tree_map_with_path(
        lambda path, leaf: named(name(path)) if eqx.is_inexact_array(leaf) else None, params
    )
    found = {}
    for label in dict.fromkeys(jax.tree.leaves(labels)):
        _checks.text("what groups returns", label)
        mine = jax.tree.map(lambda mark, label=label: mark == label, labels, is_leaf=lambda m: m is None)
        part, others = eqx.partition(params, mine)
        wrap = lambda function, others=others: ByGroup(function, others)
        function = wrapped(apply, wrap, wrap)
        found[label] = empirical_ntk(function, part, x, z, stats=stats, outputs=outputs, method=method)
    return found
