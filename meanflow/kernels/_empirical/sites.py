"""Where a function uses its parameters, found in its trace (jaxpr), and how it is evaluated with taps at these places.

A *site* is one product of a parameter with something that depends on the sample: y = op(w, h), for op a dot_general, a
convolution or a lookup of rows. Adding a zero (a "tap") to y and reading the gradient D = df/dy there gives the
parameter's gradient as a product of h and D, which never has to be formed by the backward pass. Every other use of a
parameter is *direct*: the ordinary backward pass delivers its gradient, for that parameter alone.

Nested calls and scans are entered, so that a site may lie inside of loops; its values then have one leading axis for
each loop.
Functions with derivatives of their own (custom_jvp, custom_vjp) are never entered, since that would change them.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn
from jaxtyping import Array

from meanflow import _boundary
from meanflow.kernels._empirical import visit
from meanflow.kernels._empirical.visit import Value, called, dtype_of, execute, shape_of, walk


class View(NamedTuple):
    """Marks an intermediate value that is a transposed, reshaped or scaled copy of a parameter.

    Every entry of the parameter is there exactly once, so that a gradient in the copy can be moved back.

    Attributes:
        root: number of the parameter (or of a value made of parameters alone) that is seen.
        steps: how, one after the other: ("transpose", permutation), ("reshape", shape), ("slice", ()) for the entries
            along the first axis, one a round of a loop.
        sliced: for each loop around, whether it slices the root.
        scale: the product of all numbers that the root was multiplied with.
    """

    root: int
    steps: tuple[tuple[str, tuple[int, ...]], ...] = ()
    sliced: tuple[bool, ...] = ()
    scale: float = 1.0


# Marks values that depend on the sample, or that only the ordinary backward pass understands.
SAMPLE = "sample"

# What a value is: a copy of a parameter; made of these parameters alone; made of the sample; one number everywhere; or
# another constant.
Tag: TypeAlias = View | frozenset[int] | str | float | None


def _depends(tag: Tag) -> bool:
    """Tell whether a value depends on parameters or on the sample."""
    return tag is not None and not isinstance(tag, float)


@dataclass
class Site:
    """One product of a parameter with a value that depends on the sample.

    Attributes:
        number: its place among all sites.
        equation: the operation.
        operand: which operand the parameter is.
        view: how that operand shows the parameter.
        lengths: of the loops around it, the outermost first.
        active: False leaves the parameter's gradient to the ordinary backward pass.
    """

    number: int
    equation: JaxprEqn
    operand: int
    view: View
    lengths: tuple[int, ...]
    active: bool = True

    @property
    def kind(self) -> str:
        """The operation: "dot_general", "conv_general_dilated" or "gather"."""
        return self.equation.primitive.name

    @property
    def out(self) -> jax.ShapeDtypeStruct:
        """Shape of y in one round of the loops."""
        y = self.equation.outvars[0]
        return jax.ShapeDtypeStruct(shape_of(y), dtype_of(y))

    @property
    def tap(self) -> int:
        """How many numbers y has, in all rounds of the loops."""
        return math.prod(self.lengths) * math.prod(self.out.shape)

    @property
    def partner(self) -> int:
        """How many numbers the parameter is multiplied with, in one round of the loops."""
        return math.prod(shape_of(self.equation.invars[1 - self.operand]))


@dataclass
class Scope:
    """A jaxpr with what is special about its equations, by their place.

    Attributes:
        closed: the jaxpr.
        entries: sites, and the scopes of nested calls and loops that are entered.
        roots: operands (equation, position) that are roots of their own, with their numbers.
    """

    closed: ClosedJaxpr
    entries: dict[int, "Site | Scope"] = field(default_factory=dict)
    roots: dict[tuple[int, int], int] = field(default_factory=dict)

    def sites(self) -> Iterator[Site]:
        """Yield the active sites, in order of execution."""
        for _, entry in sorted(self.entries.items()):
            if isinstance(entry, Scope):
                yield from entry.sites()
            elif entry.active:
                yield entry


@dataclass
class Analysis:
    """What a trace does with each parameter.

    Attributes:
        scope: the trace.
        roots: the parameters that each root depends on; the parameters themselves come first.
        direct: parameters (by number) whose gradient, or a part of it, comes from the ordinary backward pass.
    """

    scope: Scope
    roots: list[frozenset[int]]
    direct: set[int]

    def sites(self) -> list[Site]:
        """Return the active sites, in order of execution."""
        return list(self.scope.sites())

    def deactivate(self, sites: Sequence[Site]) -> None:
        """Leave these sites to the ordinary backward pass."""
        for site in sites:
            site.active = False
            self.direct.update(self.roots[site.view.root])


def analyze(closed: ClosedJaxpr, leaves: int) -> Analysis:
    """Return what a trace does with its first ``leaves`` arguments, the parameters. No number is computed."""
    roots = [frozenset({i}) for i in range(leaves)]
    walk = _Walk(roots)
    tags: list[Tag] = [View(i) for i in range(leaves)]
    tags += [SAMPLE] * (len(closed.jaxpr.invars) - leaves)
    scope, outs = walk.scope(closed, tags, ())
    for tag in outs:  # an output that is a parameter
        walk.use_directly(tag)
    found = Analysis(scope, roots, walk.direct)
    # rows that are looked up can be compared only with rows of the same table
    for i in range(leaves):
        mine = [s for s in found.sites() if s.view.root == i]
        lookups = [s for s in mine if s.kind == "gather"]
        if lookups and (len({(s.kind, s.view) for s in mine}) > 1 or i in found.direct):
            found.deactivate(lookups)
    # The backward pass that serves a parameter's direct uses would go through its products as well, so it serves both.
    # each site that is switched off may make its parameters direct, and through them other sites
    while mixed := [s for s in found.sites() if found.roots[s.view.root] & found.direct]:
        found.deactivate(mixed)
    return found


class _Walk:
    """Tags every value of a trace, and collects sites, roots and direct uses on the way."""

    def __init__(self, roots: list[frozenset[int]]) -> None:
        self.roots, self.direct, self.count = roots, set[int](), 0

    def leaves(self, tag: Tag) -> frozenset[int]:
        """Return the parameters that a value is made of."""
        if isinstance(tag, View):
            return self.roots[tag.root]
        return tag if isinstance(tag, frozenset) else frozenset()

    def use_directly(self, tag: Tag) -> None:
        """Leave the gradients of all that a value is made of to the ordinary backward pass."""
        self.direct.update(self.leaves(tag))

    def as_view(self, tag: Tag, scope: Scope, place: tuple[int, int], top: bool) -> View | None:
        """Return a parameter's view; outside of loops any value of parameters alone becomes a root of its own."""
        if isinstance(tag, View):
            return tag
        if not isinstance(tag, frozenset) or not top:
            return None
        self.roots.append(tag)
        scope.roots[place] = len(self.roots) - 1
        return View(len(self.roots) - 1)

    def scope(
        self, closed: ClosedJaxpr, tags: Sequence[Tag], lengths: tuple[int, ...]
    ) -> tuple[Scope, list[Tag]]:
        """Tag the values of one jaxpr, inside of loops of these lengths; return its scope and its outputs' tags."""
        scope = Scope(closed)

        def step(place: int, equation: JaxprEqn, ins: list[Tag]) -> list[Tag]:
            if any(map(_depends, ins)):
                return self.equation(scope, place, equation, ins, lengths)
            return _folded(closed.jaxpr, equation, ins)

        return scope, walk(closed, tags, step, _constant)

    def equation(
        self, scope: Scope, place: int, equation: JaxprEqn, tags: list[Tag], lengths: tuple[int, ...]
    ) -> list[Tag]:
        """Return the tags of one equation's outputs."""
        name, inside = equation.primitive.name, called(equation)
        held = [i for i, t in enumerate(tags) if isinstance(t, View | frozenset)]
        if held and inside is not None:
            scope.entries[place], outs = self.scope(inside, tags, lengths)
            return outs
        # loops whose operands hold no parameter are operations on samples like any other
        if held and name == "scan":
            return self.scan(scope, place, equation, tags, lengths)
        if len(held) == 1 and _is_product(equation, held[0]):
            (operand,) = held
            # A product with a constant is a site as well: the first round of a recurrence starts from zeros. A lookup
            # of constant rows is not, since only the sample tells how often a row is used.
            hidden = name == "gather" and not any(_depends(t) for i, t in enumerate(tags) if i != operand)
            view = None if hidden else self.as_view(tags[operand], scope, (place, operand), not lengths)
            if view is not None and not (name == "gather" and any(view.sliced)):
                scope.entries[place] = Site(self.count, equation, operand, view, lengths)
                self.count += 1
                return [SAMPLE]
        if SAMPLE not in tags:
            view = _seen(equation, tags)
            if view is not None:
                return [view]
            if not lengths:
                return [frozenset().union(*map(self.leaves, tags))] * len(equation.outvars)
        for tag in tags:
            self.use_directly(tag)
        return [SAMPLE] * len(equation.outvars)

    def scan(
        self, scope: Scope, place: int, equation: JaxprEqn, tags: list[Tag], lengths: tuple[int, ...]
    ) -> list[Tag]:
        """Enter a loop: constants show the same parameter in every round, sequences show its slices."""
        held, (body,) = visit.carried_arguments(equation), visit.inner_jaxprs(equation)
        carried = range(held.start, held.stop)
        inside: list[Tag] = []
        for i, tag in enumerate(tags):
            view = None if i in carried else self.as_view(tag, scope, (place, i), not lengths)
            if view is None:
                self.use_directly(tag)
                inside.append(SAMPLE if _depends(tag) else None)
            else:
                slices = i >= held.stop
                steps = (*view.steps, ("slice", ())) if slices else view.steps
                inside.append(view._replace(steps=steps, sliced=(*view.sliced, slices)))
        # A carried constant may depend on the sample after a round. The body is tagged again until no carried value
        # changes its tag; each round changes at least one, and what it has collected is forgotten.
        before = set(self.direct), self.count, len(self.roots)
        while True:
            inner, outs = self.scope(body, inside, (*lengths, equation.params["length"]))
            changed = [i for i in carried if inside[i] is None and _depends(outs[i - held.start])]
            if not changed:
                break
            for i in changed:
                inside[i] = SAMPLE
            self.direct, self.count = set(before[0]), before[1]
            del self.roots[before[2] :]
        for tag in outs:
            self.use_directly(tag)
        scope.entries[place] = inner
        return [SAMPLE if _depends(t) else None for t in outs]


def _constant(value: Value) -> float | None:
    """Return the number that a constant is everywhere, if it is one."""
    # keys of random numbers are opaque, and never a number
    if np.ndim(value) or jnp.issubdtype(jnp.result_type(value), jax.dtypes.prng_key):
        return None
    given = _boundary.concrete(value)
    return float(given) if given is not None and _boundary.is_real(given.dtype) else None


_FOLDED = ("sqrt", "rsqrt", "mul", "div", "add", "sub", "neg", "integer_pow", "pow", "exp", "log", "square")


def _folded(jaxpr: Jaxpr, equation: JaxprEqn, known: Sequence[Tag]) -> list[Tag]:
    """Compute constants such as sqrt(3), which are scales of parameters."""
    name, out = equation.primitive.name, equation.outvars[0]
    found: Tag = None
    if known and None not in known and jnp.issubdtype(dtype_of(out), jnp.inexact):
        if name in ("broadcast_in_dim", "convert_element_type", "copy"):
            found = known[0]
        elif name in _FOLDED and all(shape_of(v) == () for v in equation.invars):
            with jax.ensure_compile_time_eval():
                operands = [np.asarray(k, dtype_of(v)) for k, v in zip(known, equation.invars, strict=True)]
                found = float(execute(jaxpr, equation, operands)[0])
    return [found] * len(equation.outvars)


def _seen(equation: JaxprEqn, tags: Sequence[Tag]) -> View | None:
    """Return the view behind an operation that only moves axes or multiplies by a number; None for any other."""
    name, options = equation.primitive.name, equation.params
    place, view = next(((i, t) for i, t in enumerate(tags) if isinstance(t, View)), (0, None))
    if view is None:
        return None
    shape, out = shape_of(equation.invars[place]), shape_of(equation.outvars[0])
    if name in ("mul", "div") and len(tags) == 2:
        # times or divided by one number; a broadcast operand would repeat entries of the parameter
        factor = tags[1 - place]
        if not isinstance(factor, float) or shape != out or (name == "div" and place == 1):
            return None
        return view._replace(scale=view.scale * factor if name == "mul" else view.scale / factor)
    if len(tags) != 1:
        return None
    if name == "neg":
        return view._replace(scale=-view.scale)
    # a cast to lower precision loses something
    if name == "copy" or (
        name == "convert_element_type" and options["new_dtype"] == dtype_of(equation.invars[0])
    ):
        return view
    if name == "transpose":
        return view._replace(steps=(*view.steps, ("transpose", tuple(options["permutation"]))))
    order = list(options.get("broadcast_dimensions", ()))
    moved = name == "broadcast_in_dim" and order == sorted(order) and math.prod(shape) == math.prod(out)
    if moved or name in ("squeeze", "expand_dims") or (name == "reshape" and options["dimensions"] is None):
        return view._replace(steps=(*view.steps, ("reshape", out)))
    return None


def show(view: View, root: Value) -> Value:
    """Return what a view shows of its root, with one leading axis for each loop that slices it.

    >>> show(View(0, (("slice", ()), ("transpose", (1, 0))), (True,), 2.0), np.ones((5, 2, 3))).shape
    (5, 3, 2)
    """

    def follow(steps: tuple[tuple[str, tuple[int, ...]], ...], value: Value) -> Value:
        for i, (name, sizes) in enumerate(steps):
            if name == "slice":
                return jax.vmap(lambda v, rest=steps[i + 1 :]: follow(rest, v))(value)
            value = jnp.transpose(value, sizes) if name == "transpose" else jnp.reshape(value, sizes)
        return value

    return follow(view.steps, root) * np.asarray(view.scale, root.dtype)


def _is_product(equation: JaxprEqn, operand: int) -> bool:
    """Tell whether an equation is a product that this package knows, with the parameter as this operand."""
    name, options = equation.primitive.name, equation.params
    if name not in ("dot_general", "conv_general_dilated", "gather"):
        return False
    out, weight = equation.outvars[0], equation.invars[operand]
    if dtype_of(out) != dtype_of(weight) or not jnp.issubdtype(dtype_of(out), jnp.floating):
        return False
    if name == "dot_general":
        return dtype_of(equation.invars[1 - operand]) == dtype_of(weight)
    if name == "conv_general_dilated":
        return operand == 1 and options["batch_group_count"] == 1
    # a lookup: whole rows, found by their place along the first axis of the table
    numbers, table, rank = options["dimension_numbers"], shape_of(weight), len(shape_of(out))
    return (
        operand == 0
        and not numbers.operand_batching_dims
        and tuple(numbers.collapsed_slice_dims) == (0,)
        and tuple(numbers.start_index_map) == (0,)
        and tuple(numbers.offset_dims) == tuple(range(rank - len(table) + 1, rank))
        and tuple(options["slice_sizes"]) == (1, *table[1:])
    )


def evaluate(
    scope: Scope, args: Sequence[Value], taps: Mapping[int, Value], roots: dict[int, Value] | None = None
) -> tuple[list[Value], dict[int, Value]]:
    """Evaluate a trace with taps added to the outputs of its sites.

    Args:
        scope: the trace.
        args: its arguments.
        taps: what is added, by the number of the site; with one leading axis a loop around the site.
        roots: receives the values of roots that are not parameters, by their numbers.

    Returns:
        The outputs, and what the parameter is multiplied with at each tapped site.
    """
    found: dict[int, Value] = {}

    def step(place: int, equation: JaxprEqn, operands: list[Value]) -> list[Value]:
        if roots is not None:
            roots.update({n: operands[i] for (where, i), n in scope.roots.items() if where == place})
        entry = scope.entries.get(place)
        if isinstance(entry, Scope):
            if equation.primitive.name == "scan":
                outs, inner = _evaluate_scan(entry, equation, operands, taps)
            else:
                outs, inner = evaluate(entry, operands, taps, roots)
            found.update(inner)
            return outs
        outs = execute(scope.closed.jaxpr, equation, operands)
        if isinstance(entry, Site) and entry.active and entry.number in taps:
            found[entry.number] = operands[1 - entry.operand]
            return [outs[0] + taps[entry.number]]
        return outs

    return walk(scope.closed, args, step, lambda value: value), found


def _evaluate_scan(
    scope: Scope, equation: JaxprEqn, operands: Sequence[Value], taps: Mapping[int, Value]
) -> tuple[list[Value], dict[int, Value]]:
    """Run a loop whose rounds take their own taps, and return what its sites see in every round."""
    held = visit.carried_arguments(equation)
    carried = held.stop - held.start

    def body(carry: list[Array], item: tuple[list[Array], dict[int, Array]]) -> Any:
        outs, found = evaluate(scope, [*operands[: held.start], *carry, *item[0]], item[1])
        return outs[:carried], (outs[carried:], found)

    # taps of sites inside have one entry a round, and are scanned over like sequences
    inside = {s.number: taps[s.number] for s in scope.sites() if s.number in taps}
    each = ([jnp.asarray(a) for a in operands[held.stop :]], inside)
    options = {name: equation.params[name] for name in ("length", "reverse", "unroll")}
    carry, (stacked, found) = jax.lax.scan(body, [jnp.asarray(a) for a in operands[held]], each, **options)
    return [*carry, *stacked], found
