"""The tangent kernel of dense layers without their Jacobian.

For z = H W (+ b) the gradient of output f_t with respect to W is the outer product of H_t and D_t with D = df/dz, so
K_W[s, t] = (H_s . H_t)(D_s . D_t): two Gram matrices instead of a Jacobian ("BN NTK" eq. A.10). This module finds such
uses of each parameter in the trace (jaxpr) of any function, adds a zero ("tap") to the outputs of those operations, and
reads all D as gradients with respect to the taps, in one backward pass a network output. It needs f_t to depend on
sample t alone.

A parameter is understood if it is used once: in a matrix or vector product with a (T, n) activation, as a bias that is
added, or as a scale that multiplies; before that it may be transposed, reshaped by axes of length 1 and multiplied by
scalars. Parameters used in any other way (convolutions, sharing) are returned as ``rest``.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, Var, jaxpr_as_fun
from jaxtyping import Array, ArrayLike, Float, PyTreeDef

from meanflow.kernels.empirical.modules import Apply, Batch, Params


class View(NamedTuple):
    """A tag of values that are a parameter, seen through transposes, new axes and scalar factors.

    Attributes:
        leaf: index of the parameter among the leaves.
        axes: axes[i] is the parameter's axis shown as axis i of the value, None for an axis along which it is constant.
        scale: the product of the scalar factors.
    """

    leaf: int
    axes: tuple[int | None, ...]
    scale: ArrayLike = 1.0


class _Batch:
    """A tag of values that depend on the batch."""


BATCH = _Batch()

# None tags values that depend neither on the batch nor on exactly one parameter.
Tag: TypeAlias = View | _Batch | None

Value: TypeAlias = Any  # in a trace: an array, a tracer, or a literal number of one of JAX's own types


@dataclass
class Site:
    """One use of one parameter: K += scale^2 (H H') o (D D') with D the cotangent of the tapped value.

    Attributes:
        leaf: index of the parameter among the leaves.
        kind: "dense", "bias" or "scale".
        batch_axis: axis of the value that runs over samples.
        summed: axes of the value along which the parameter is constant, batch excluded.
        contracted: axis of the activation that is summed over, in a dense use.
    """

    leaf: int
    kind: str
    batch_axis: int
    summed: tuple[int, ...] = ()
    contracted: int = 1


@dataclass
class Analysis:
    """What a trace does with each parameter.

    Attributes:
        sites: understood uses, by the number of the equation in order of execution.
        uses: how often each parameter is used.
        refused: parameters with a use that is not understood.
    """

    sites: dict[int, Site] = field(default_factory=dict)
    uses: dict[int, int] = field(default_factory=dict)
    refused: set[int] = field(default_factory=set)

    def structured(self) -> set[int]:
        """Return the parameters whose only use is understood."""
        found = {s.leaf for s in self.sites.values()}
        return {i for i in found if self.uses[i] == 1 and i not in self.refused}


# (number, equation, values, tags, outputs) -> (outputs, tag of the outputs)
Visit: TypeAlias = Callable[
    [int, JaxprEqn, Sequence[Value], Sequence[Tag], list[Value]], tuple[list[Value], Tag]
]


def _execute(jaxpr: Jaxpr, equation: JaxprEqn, operands: Sequence[Value]) -> list[Value]:
    """Return one equation's outputs. It runs as a trace of its own: only JAX knows how primitives are called."""
    inputs = {v: a for v, a in zip(equation.invars, operands, strict=True) if not isinstance(v, Literal)}
    alone = jaxpr.replace(
        constvars=[],
        invars=list(inputs),
        outvars=list(equation.outvars),
        eqns=[equation],
        debug_info=jaxpr.debug_info._replace(arg_names=None, result_paths=None),
    )
    return jaxpr_as_fun(ClosedJaxpr(alone, []))(*inputs.values())


def _interpret(
    closed: ClosedJaxpr, args: Sequence[Value], tags: Sequence[Tag], visit: Visit, count: list[int]
) -> tuple[list[Value], list[Tag]]:
    """Evaluate a jaxpr, handing equations to ``visit``; return the outputs and their tags.

    ``visit`` may change the outputs of an equation and gives them a tag. It does not see operations that only turn one
    view of a parameter into another. Nested jit calls are entered; other calls are opaque. ``count`` holds the number
    of the last equation, so that nested calls go on counting.
    """
    jaxpr = closed.jaxpr
    values: dict[Var, Value] = {}
    kinds: dict[Var, Tag] = {}

    def read(v: Var | Literal) -> tuple[Value, Tag]:
        return (v.val, None) if isinstance(v, Literal) else (values[v], kinds[v])

    for v, value in zip(jaxpr.constvars, closed.consts, strict=True):
        values[v], kinds[v] = value, None
    for v, value, tag in zip(jaxpr.invars, args, tags, strict=True):
        values[v], kinds[v] = value, tag
    for equation in jaxpr.eqns:
        ins = [read(v) for v in equation.invars]
        operands, operand_tags = [i[0] for i in ins], [i[1] for i in ins]
        if equation.primitive.name in ("jit", "pjit"):
            outs, out_tags = _interpret(equation.params["jaxpr"], operands, operand_tags, visit, count)
        else:
            count[0] += 1
            outs = _execute(jaxpr, equation, operands)
            view = _through(equation, operands, operand_tags)
            outs, tag = (outs, view) if view else visit(count[0], equation, operands, operand_tags, outs)
            out_tags = [tag] * len(outs)
        for v, value, tag in zip(equation.outvars, outs, out_tags, strict=True):
            values[v], kinds[v] = value, tag
    finals = [read(v) for v in jaxpr.outvars]
    return [f[0] for f in finals], [f[1] for f in finals]


def _output_shape(equation: JaxprEqn) -> tuple[int, ...]:
    """Return the shape of an equation's first output."""
    value: Any = equation.outvars[0].aval  # JAX does not type the shape of abstract values
    return tuple(value.shape)


def _through(equation: JaxprEqn, operands: Sequence[Value], tags: Sequence[Tag]) -> View | None:
    """Return the view behind an operation that only moves, inserts or rescales axes; None for any other."""
    name, parameters = equation.primitive.name, equation.params
    if name in ("mul", "div"):
        (a, b), (ta, tb) = operands, tags
        if isinstance(ta, View) and tb is None and np.ndim(b) == 0:
            return ta._replace(scale=ta.scale * b if name == "mul" else ta.scale / b)
        if name == "mul" and isinstance(tb, View) and ta is None and np.ndim(a) == 0:
            return tb._replace(scale=tb.scale * a)
        return None
    if len(tags) != 1 or not isinstance(tags[0], View):
        return None
    view, shape = tags[0], np.shape(operands[0])
    out_shape = _output_shape(equation)
    if name in ("copy", "neg"):
        return view
    if name == "convert_element_type":
        same = operands[0].dtype == parameters["new_dtype"]
        return view if same else None  # a cast to lower precision is not an isometry
    if name == "transpose":
        return view._replace(axes=tuple(view.axes[i] for i in parameters["permutation"]))
    if name == "broadcast_in_dim":
        axes: list[int | None] = [None] * len(out_shape)
        for i, j in enumerate(parameters["broadcast_dimensions"]):
            axes[int(j)] = view.axes[i] if shape[i] == out_shape[int(j)] else None
        return view._replace(axes=tuple(axes))
    if name in ("reshape", "squeeze", "expand_dims"):
        solid = [(n, a) for n, a in zip(shape, view.axes, strict=True) if n != 1]
        if [n for n, _ in solid] != [n for n in out_shape if n != 1]:
            return None
        remaining = iter(a for _, a in solid)
        return view._replace(axes=tuple(next(remaining) if n != 1 else None for n in out_shape))
    return None


def _site(equation: JaxprEqn, operands: Sequence[Value], tags: Sequence[Tag], samples: int) -> Site | None:
    """Return the use of a parameter against a batch-dependent value, if it is one of the three we know."""
    name = equation.primitive.name
    out_shape = _output_shape(equation)
    if len(tags) != 2:
        return None
    position = 0 if isinstance(tags[0], View) else 1
    view, other = tags[position], operands[1 - position]
    if not isinstance(view, View) or tags[1 - position] is not BATCH:
        return None
    if name == "dot_general":
        (left, right), batched = equation.params["dimension_numbers"]
        mine, theirs = (left, right) if position == 0 else (right, left)
        plain = batched == ((), ()) and len(mine) == 1 and np.ndim(other) == 2
        # both axes of the parameter must be present; a vector's only axis is contracted
        if not plain or None in view.axes or len(view.axes) > 2:
            return None
        if np.shape(other)[1 - theirs[0]] != samples:
            return None
        batch_axis = 0 if position == 1 or len(view.axes) == 1 else 1
        return Site(view.leaf, "dense", batch_axis, contracted=int(theirs[0]))
    kind = {"add": "bias", "sub": "bias", "mul": "scale"}.get(name)
    if kind is None or len(out_shape) != len(view.axes):
        return None
    constant = [i for i, a in enumerate(view.axes) if a is None]
    over = [i for i in constant if out_shape[i] == samples]
    if len(over) != 1:  # the batch axis must be told from the others by its length
        return None
    return Site(view.leaf, kind, over[0], tuple(i for i in constant if i != over[0]))


def analyze(
    apply: Apply, leaves: Sequence[Array], treedef: PyTreeDef, x: Batch
) -> tuple[ClosedJaxpr, Analysis]:
    """Return the trace of ``apply`` and what it does with each parameter. No number is computed.

    Args:
        apply: (params, batch) -> outputs, each a function of its own sample.
        leaves: the leaves of params.
        treedef: the structure of params.
        x: batch (T, ...).
    """
    function = lambda leaves, x: apply(jax.tree.unflatten(treedef, leaves), x)
    closed = jax.make_jaxpr(function)(leaves, x)
    samples = np.shape(x)[0]
    found = Analysis()

    def visit(
        number: int, equation: JaxprEqn, operands: Sequence[Value], tags: Sequence[Tag], outs: list[Value]
    ) -> tuple[list[Value], Tag]:
        views = [t for t in tags if isinstance(t, View)]
        for v in views:
            found.uses[v.leaf] = found.uses.get(v.leaf, 0) + 1
        site = _site(equation, operands, tags, samples) if len(views) == 1 else None
        if site is not None:
            found.sites[number] = site
        else:
            found.refused.update(v.leaf for v in views)
        return outs, (BATCH if any(t is BATCH for t in tags) else None)

    def run(leaves: Sequence[Array], x: Array) -> list[Value]:
        tags = [View(i, tuple(range(np.ndim(a)))) for i, a in enumerate(leaves)] + [BATCH]
        outs, out_tags = _interpret(closed, [*leaves, x], tags, visit, [0])
        found.refused.update(t.leaf for t in out_tags if isinstance(t, View))  # returned as it is
        return outs

    jax.eval_shape(run, leaves, x)
    return closed, found


class Factors(NamedTuple):
    """One site's share of the kernel: K_cd += (H H') o (D_c D_d'), or D_c D_d' alone where H is None.

    Attributes:
        activation: H (T, n), what a dense parameter is multiplied with; None for biases and scales.
        cotangent: D (C, T, N), gradients of the C outputs, which include the scale of the parameter's view.
    """

    activation: Float[Array, "T n"] | None
    cotangent: Float[Array, "C T N"]


def factors(apply: Apply, params: Params, x: Batch) -> tuple[list[Factors], list[int]]:
    """Return all factors of ``apply`` at (params, x), and the indices of the parameters they do not cover.

    Cost: one forward and C backward passes; memory: activations and their cotangents, O(T sum of widths).

    >>> mine, rest = factors(lambda w, x: x @ w, jnp.ones((2, 1)), jnp.ones((3, 2)))
    >>> mine[0].activation.shape, mine[0].cotangent.shape, rest
    ((3, 2), (1, 3, 1), [])
    """
    leaves, treedef = jax.tree.flatten(params)
    closed, found = analyze(apply, leaves, treedef, x)
    structured = found.structured()
    sites = {n: s for n, s in found.sites.items() if s.leaf in structured}
    unused = {i for i in range(len(leaves)) if i not in found.uses and i not in found.refused}
    rest = [i for i in range(len(leaves)) if i not in structured and i not in unused]
    scales: dict[int, ArrayLike] = {}

    def tapped(taps: dict[int, Array]) -> tuple[Array, dict[int, Array]]:
        activations: dict[int, Array] = {}

        def visit(
            number: int, equation: JaxprEqn, operands: Sequence[Value], tags: Sequence[Tag], outs: list[Value]
        ) -> tuple[list[Value], Tag]:
            if number in sites:
                position = 0 if isinstance(tags[0], View) else 1
                view = tags[position]
                assert isinstance(view, View)  # that is what makes the equation a site
                activations[number] = operands[1 - position]
                scales[number] = view.scale
                outs = [outs[0] + taps[number]] if number in taps else outs
            return outs, (BATCH if any(t is BATCH for t in tags) else None)

        tags = [View(i, tuple(range(np.ndim(a)))) for i, a in enumerate(leaves)] + [BATCH]
        outs, _ = _interpret(closed, [*leaves, x], tags, visit, [0])
        return outs[0], activations

    shapes: dict[int, jax.ShapeDtypeStruct] = {}

    def record(
        number: int, equation: JaxprEqn, operands: Sequence[Value], tags: Sequence[Tag], outs: list[Value]
    ) -> tuple[list[Value], Tag]:
        if number in sites:
            shapes[number] = jax.ShapeDtypeStruct(outs[0].shape, outs[0].dtype)
        return outs, None

    jax.eval_shape(lambda l, x: _interpret(closed, [*l, x], [None] * (len(l) + 1), record, [0])[0], leaves, x)
    zeros = {n: jnp.zeros(s.shape, s.dtype) for n, s in shapes.items()}
    outputs, pull, activations = jax.vjp(tapped, zeros, has_aux=True)
    samples, shape = outputs.shape[0], outputs.shape[1:]
    size = math.prod(shape)
    # samples are independent, so one cotangent that is 1 on every sample gives every sample's D
    basis = jnp.broadcast_to(jnp.eye(size, dtype=outputs.dtype)[:, None, :], (size, samples, size))
    cotangents = jax.vmap(lambda c: pull(c.reshape(outputs.shape))[0])(basis)
    return [_factor(sites[n], activations[n], cotangents[n], scales[n]) for n in sorted(sites)], rest


def _factor(site: Site, activation: Array, cotangent: Array, scale: ArrayLike) -> Factors:
    """Bring one site's activation and cotangents (C, value's shape) into the form (T, n) and (C, T, N)."""
    if site.kind == "scale":
        cotangent = cotangent * activation[None]
    cotangent = jnp.moveaxis(cotangent, 1 + site.batch_axis, 1)
    moved = [1 + i + (i < site.batch_axis) for i in site.summed]  # those axes' places after the move
    if moved:
        cotangent = jnp.sum(cotangent, axis=tuple(moved))
    flat = cotangent.reshape(cotangent.shape[:2] + (-1,))
    flat = flat if isinstance(scale, float) and scale == 1.0 else flat * scale
    if site.kind != "dense":
        return Factors(None, flat)
    return Factors(activation if site.contracted == 1 else activation.T, flat)


def contract(
    left: Sequence[Factors], right: Sequence[Factors], chunk: int, diagonal: bool
) -> Float[Array, "T S ..."]:
    """Sum the Gram products of all sites: (T, S, C, C), or (T, S, C) when only equal outputs are wanted.

    Rows are computed ``chunk`` at a time, so that beside the result only chunk x S numbers a site are alive.
    """
    high = jax.lax.Precision.HIGHEST

    def row(mine: Sequence[Factors]) -> Array:
        terms = []
        for m, r in zip(mine, right, strict=True):
            pattern = "cn,csn->sc" if diagonal else "cn,dsn->scd"
            gram = jnp.einsum(pattern, m.cotangent, r.cotangent, precision=high)
            if m.activation is not None and r.activation is not None:
                inner = jnp.matmul(r.activation, m.activation, precision=high)
                gram = gram * inner.reshape((-1,) + (1,) * (gram.ndim - 1))
            terms.append(gram)
        return jax.tree.reduce(jnp.add, terms)

    # rows first: lax.map walks along the leading axis
    rows = [Factors(f.activation, jnp.moveaxis(f.cotangent, 1, 0)) for f in left]
    samples = rows[0].cotangent.shape[0]
    if chunk >= samples:
        return jax.vmap(row)(rows)
    return jax.lax.map(row, rows, batch_size=chunk)
