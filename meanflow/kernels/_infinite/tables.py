"""Second moments of fields, and their tangent kernels, computed when they are asked for and kept.

A table of two fields A, B at two sides i, j holds E[A_p B_q] (one channel, the same of both) for all positions: "full",
axes of A first, or "diagonal", for p = q only, which is all that a dense layer after ``flatten`` needs. The tangent
kernel of two fields is the table of <dA_p/dw, dB_q/dw>, summed over all parameters w, between side 0 and the last one:

    Theta of Gaussians made by one parameter   of their covariance, and of the fields before them
    Theta of functions F, G                    sum over arguments a, b of E[d_a F d_b G] Theta_ab
"""

import math
from collections.abc import Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from meanflow.kernels._empirical.visit import dtype_of
from meanflow.kernels._infinite import expect
from meanflow.kernels._infinite.fields import (
    ONE,
    Atom,
    Coefficient,
    Constant,
    Field,
    Fixed,
    Map,
    Mapped,
    Op,
    Source,
    at,
    field_of,
    moved,
    plus,
    scaled,
)

Table: TypeAlias = Any  # an array; None: zero
WAVES = ("sin", "cos", "exp")


def none_plus(a: Table, b: Table) -> Table:
    """Return the sum of two tables."""
    return b if a is None else a if b is None else a + b


def none_times(a: Any, b: Any) -> Any:
    """Return the product of two tables."""
    return None if a is None or b is None else a * b


class Tables:
    """The tables of one pair of samples; ``refuse`` raises for what has none."""

    def __init__(self, sides: int, refuse: Any):
        self.sides, self.refuse = sides, refuse
        self.kept: dict[tuple, Any] = {}
        self.errors: list[Array] = []
        self.pushed: dict[tuple, Any] = {}

    @property
    def pair(self) -> tuple[int, int]:
        """Return the two sides between which the kernel is."""
        return 0, self.sides - 1

    # sums of atoms

    def moment(self, f: Field, g: Field, i: int, j: int, full: bool) -> Table:
        """Return E[F G]."""
        return self._sum("second", f, g, i, j, full)

    def theta(self, f: Field, g: Field, full: bool) -> Table:
        """Return the tangent kernel of two fields."""
        return self._sum("tangent", f, g, *self.pair, full)

    def _sum(self, kind: str, f: Field, g: Field, i: int, j: int, full: bool) -> Table:
        shape = f.shape + g.shape if full else np.broadcast_shapes(f.shape, g.shape)
        total = None
        for a, c in f.terms.items():
            for b, d in g.terms.items():
                table = self.get(kind, a, b, i, j, full)
                if table is not None:
                    left, right = at(c, i), at(d, j)
                    if full and isinstance(left, jax.Array):
                        left = left.reshape(np.shape(left) + (1,) * len(g.shape))
                    total = none_plus(total, left * table * right)
        return None if total is None else jnp.broadcast_to(total, shape)

    def mean(self, f: Field, i: int) -> Array:
        """Return E[F]."""
        total: Any = 0.0
        for a, c in f.terms.items():
            total = total + self._mean(a, i) * at(c, i)
        return jnp.broadcast_to(jnp.asarray(total), f.shape)

    # atoms

    def get(self, kind: str, a: Atom, b: Atom, i: int, j: int, full: bool) -> Table:
        """Return a table of two atoms, kept from its first use."""
        key = (kind, a, b, i, j, full)
        if key not in self.kept:
            whole = self.kept.get((kind, a, b, i, j, True))
            if whole is not None and a.shape == b.shape and a is not ONE:
                self.kept[key] = _diagonal(whole, len(a.shape))
            else:
                self.kept[key] = (
                    self._second(a, b, i, j, full) if kind == "second" else self._tangent(a, b, full)
                )
        return self.kept[key]

    def _second(self, a: Atom, b: Atom, i: int, j: int, full: bool) -> Table:
        if a is ONE or b is ONE:
            if a is b:
                return jnp.asarray(1.0)
            mean = self._mean(b, j) if a is ONE else self._mean(a, i)
            if a is ONE or not full:
                return jnp.asarray(mean)
            return jnp.reshape(mean, np.shape(mean) + (1,) * len(b.shape))
        if (a.gaussian or b.gaussian) and not a.keys & b.keys:
            return None
        if isinstance(a, Mapped) or isinstance(b, Mapped):
            return self._through("second", a, b, i, j, full)
        if isinstance(a, Fixed) and isinstance(b, Fixed):
            return _inner(a, b, i, j, full)
        if isinstance(a, Fixed) or isinstance(
            b, Fixed
        ):  # known numbers and a field are independent over channels
            first, second = (jnp.asarray(self._mean(u, k)) for u, k in ((a, i), (b, j)))
            return jnp.reshape(first, first.shape + (1,) * len(b.shape)) * second if full else first * second
        if isinstance(a, Source) and isinstance(b, Source):
            return self._sources(a, b, i, j, full)[0]
        return self._ops(a, b, i, j, full)[0]

    def _tangent(self, a: Atom, b: Atom, full: bool) -> Table:
        if a is ONE or b is ONE or isinstance(a, Fixed) or isinstance(b, Fixed):
            return None
        if isinstance(a, Mapped) or isinstance(b, Mapped):
            return self._through("tangent", a, b, *self.pair, full)
        if isinstance(a, Source) and isinstance(b, Source):
            return self._sources(a, b, *self.pair, full)[1]
        product = self._product(a, b, *self.pair, full)
        if product is not None:
            (f, g), (h, k) = product
            return none_plus(
                none_times(self.theta(f, h, full), self.moment(g, k, *self.pair, full)),
                none_times(self.moment(f, h, *self.pair, full), self.theta(g, k, full)),
            )
        slopes = self._ops(a, b, *self.pair, full)[1]
        total = None
        for s, row in zip(self.arguments(a), slopes, strict=True):
            for t, slope in zip(self.arguments(b), row, strict=True):
                total = none_plus(total, none_times(slope, self.get("tangent", s, t, *self.pair, full)))
        return total

    def _mean(self, a: Atom, i: int) -> Any:
        if a is ONE:
            return 1.0
        if a.gaussian or isinstance(a, Source):
            return 0.0
        key = ("mean", a, i)
        if key not in self.kept:
            if isinstance(a, Mapped):
                assert a.way is not None or len(a.field.terms)
                inner = self.mean(a.field, i)
                self.kept[key] = inner if a.way is None else a.way.apply(inner, i)
            elif isinstance(a, Fixed):
                array, wide = a.factored(i)
                self.kept[key] = jnp.mean(array, wide).reshape(a.shape)
            else:
                self.kept[key] = self._mean_of_op(a, i)
        return self.kept[key]

    def _mean_of_op(self, a: Any, i: int) -> Array:
        if a.factors:
            f, g = a.factors
            if f.keys & g.keys or f is g:
                found = self.moment(f, g, i, i, False)
                return jnp.broadcast_to(jnp.asarray(0.0), a.shape) if found is None else found
            return self.mean(f, i) * self.mean(g, i)
        return jnp.broadcast_to(self._expectation(a, i)[0], a.shape)

    def _through(self, kind: str, a: Atom, b: Atom, i: int, j: int, full: bool) -> Table:
        """Return the table of a map of a field: the map of a table."""
        plain = lambda u: isinstance(u, Mapped) and u.way is None
        alone = lambda u: u.field if plain(u) else Field(tuple(((n, False),) for n in u.shape), {u: 1.0})
        if plain(a) or plain(b):
            return self._sum(kind, alone(a), alone(b), i, j, full)
        left, right = (u.way if isinstance(u, Mapped) else None for u in (a, b))
        f, g = (u.field if isinstance(u, Mapped) else alone(u) for u in (a, b))
        if not full:
            if (
                left is not None
                and right is not None
                and left.moves
                and left.tag is not None
                and left.tag == right.tag
            ):
                table = self._sum(kind, f, g, i, j, False)
                return None if table is None else left.apply(table, i)
            table = self.get(kind, a, b, i, j, True)
            return None if table is None else _diagonal(table, len(a.shape))
        table = self._sum(kind, f, g, i, j, True)
        if table is None:
            return None
        if left is not None:
            flat = table.reshape(f.shape + (-1,))
            out = jax.vmap(lambda u: left.apply(u, i), -1, -1)(flat)
            table = out.reshape(out.shape[:-1] + g.shape)
        if right is not None:
            lead = table.shape[: table.ndim - len(g.shape)]
            out = jax.vmap(lambda u: right.apply(u, j))(table.reshape((-1, *g.shape)))
            table = out.reshape(lead + out.shape[1:])
        return table

    def _sources(self, a: Source, b: Source, i: int, j: int, full: bool) -> tuple[Table, Table]:
        """Return covariance and tangent kernel of two Gaussians made by one parameter."""
        if a.key != b.key:
            return None, None
        key = ("sources", a, b, i, j, full)
        if key not in self.kept:
            tangent = None
            if a.field is None or b.field is None:
                if a.field is not b.field:
                    self.refuse("a parameter is used by itself and as weights of a layer")
                inner = a.spread(None, None, full)
            else:
                whole = full and a.spread.needs_pairs
                inner = a.spread(self.moment(a.field, b.field, i, j, whole), b.spread, full)
                if (i, j) == self.pair:
                    before = self.theta(a.field, b.field, whole)
                    tangent = none_times(a.variance, a.spread(before, b.spread, full))
            self.kept[key] = (
                none_times(a.variance, inner),
                none_plus(none_times(a.tangent, inner), tangent),
            )
        return self.kept[key]

    # functions of Gaussians

    def exposed(self, f: Field) -> Field:
        """Return the field in terms of Gaussians and functions of them: what only moves entries goes to arguments."""
        key = ("exposed", f)
        if key not in self.pushed:
            terms: dict[Atom, Coefficient] = {}
            total = Field(f.layout, terms)
            for atom, c in f.terms.items():
                if atom is ONE or atom.gaussian or isinstance(atom, Op):
                    part = Field(f.layout, {atom: c})
                elif isinstance(atom, Mapped) and atom.way is None:
                    part = scaled(self.exposed(atom.field), c)
                elif isinstance(atom, Mapped) and atom.way is not None and atom.way.moves:
                    part = scaled(self._push(atom.way, self.exposed(atom.field), f.layout), c)
                else:
                    self.refuse(_why_not(atom))
                merged = dict(total.terms)
                for u, d in part.terms.items():
                    merged[u] = plus(merged[u], d, self.sides) if u in merged else d
                total = Field(f.layout, merged)
            self.pushed[key] = field_of(f.layout, total.terms)
        return self.pushed[key]

    def _push(self, way: Any, f: Field, layout: Any) -> Field:
        """Return the map of a field with the map taken inside of its functions."""
        terms: dict[Atom, Coefficient] = {}
        shape = tuple(1 if not axis else _size(axis) for axis in layout)
        for atom, c in f.terms.items():
            if atom is ONE or not way.pads:
                outside = moved(c, way, f.shape)
            else:
                sides = c if isinstance(c, tuple) else (c,) * self.sides
                outside = tuple(
                    way.apply(jnp.broadcast_to(jnp.asarray(u, float), f.shape), k)
                    for k, u in enumerate(sides)
                )
            key = ("push", way, atom, shape)
            if key not in self.pushed:
                self.pushed[key] = self._pushed_atom(way, atom, f, layout, shape)
            terms[self.pushed[key]] = outside
        return field_of(layout, terms)

    def _pushed_atom(self, way: Map, atom: Any, f: Field, layout: Any, shape: tuple[int, ...]) -> Atom:
        if atom is ONE:
            return ONE
        if atom.gaussian:
            return Mapped(shape, way, Field(f.layout, {atom: 1.0}))
        operands: list[Any] = []
        for o in atom.operands:
            if isinstance(o, Field):
                operands.append(self._push(way, self.exposed(o), layout))
            elif o.number is not None:
                operands.append(Constant(shape, o.number))
            else:
                values = tuple(way.apply(jnp.broadcast_to(u, f.shape), k) for k, u in enumerate(o.arrays))
                operands.append(Constant(shape, None, values))
        return Op(shape, atom.equation, operands)

    def arguments(self, atom: Any) -> tuple[Atom, ...]:
        """Return the Gaussians that an atom is a function of."""
        if atom.gaussian:
            return (atom,)
        key = ("arguments", atom)
        if key not in self.kept:
            found: dict[Atom, None] = {}
            for o in atom.operands:
                if isinstance(o, Field):
                    for term in self.exposed(o).terms:
                        if term is not ONE:
                            found |= dict.fromkeys(self.arguments(term))
            self.kept[key] = tuple(found)
        return self.kept[key]

    def evaluate(self, atom: Any, i: int, given: dict[Atom, Any], behind: int) -> Any:
        """Return the values of an atom where its arguments have the ``given`` ones, with axes added ``behind``."""
        if atom in given:
            return given[atom]
        lift = lambda c: c.reshape(c.shape + (1,) * behind) if isinstance(c, jax.Array) else c
        operands: list[Any] = []
        for o in atom.operands:
            if isinstance(o, Constant):
                operands.append(o.number if o.number is not None else lift(o.arrays[i]))
                continue
            total: Any = None
            for term, c in self.exposed(o).terms.items():
                value = 1.0 if term is ONE else self.evaluate(term, i, given, behind)
                c = lift(at(c, i))
                value = value if isinstance(c, float) and c == 1.0 else c * value
                total = value if total is None else total + value
            operands.append(total if total is not None else 0.0)
        given[atom] = apply_op(atom.equation, operands)
        return given[atom]

    def function(self, atom: Any, i: int, behind: int = 0) -> expect.Function:
        """Return an atom as a function of arrays, one an argument, with an axis of points in front."""
        arguments = self.arguments(atom)
        return lambda *u: self.evaluate(atom, i, dict(zip(arguments, u, strict=True)), behind)

    def form(self, atom: Any) -> Any:
        """Return what is known of a function of one Gaussian: a name of ``WAVES`` or "erf", or an ``expect.Kinked``."""
        key = ("form", atom)
        if key in self.kept:
            return self.kept[key]
        self.kept[key] = None
        if atom.gaussian:
            self.kept[key] = (expect.Kinked(1.0, 1.0, False), 1.0, 0.0)
        elif len(self.arguments(atom)) == 1 and self._known(atom):
            name, inner = atom.equation.primitive.name, atom.operands[0]
            simple = isinstance(inner, Field) and all(t is ONE or t.gaussian for t in inner.terms)
            if name in (*WAVES, "erf") and simple:
                terms = {("shift" if t is ONE else "scale"): c for t, c in inner.terms.items()}
                shift = terms.get("shift", 0.0)
                if name != "erf" or shift == 0:
                    self.kept[key] = (name, terms["scale"], shift)
                    return self.kept[key]
            with jax.ensure_compile_time_eval():
                function = self.function(atom, 0)
                shaped = lambda u: jnp.asarray(u, float).reshape((-1,) + (1,) * len(atom.shape))
                flat = lambda u: np.broadcast_to(np.asarray(function(shaped(u)), float).ravel(), u.shape)
                found = expect.kinked(flat)
            self.kept[key] = None if found is None else (found, 1.0, 0.0)
        return self.kept[key]

    def _known(self, atom: Any) -> bool:
        """Tell whether a function has no numbers in it but those that are known while tracing."""
        if atom.gaussian:
            return True
        for o in atom.operands:
            if isinstance(o, Constant):
                if o.number is None:
                    return False
            elif not all(
                not isinstance(c, tuple) and (t is ONE or self._known(t))
                for t, c in self.exposed(o).terms.items()
            ):
                return False
        return True

    def _product(self, a: Any, b: Any, i: int, j: int, full: bool) -> Any:
        """Return two products factor by factor if each pair of factors is independent of the other pair."""
        if not (isinstance(a, Op) and isinstance(b, Op) and a.factors and b.factors):
            return None
        f, g = a.factors
        for h, k in (b.factors, b.factors[::-1]):
            if not (f.keys | h.keys) & (g.keys | k.keys):
                return (f, g), (h, k)
        return None

    def _ops(self, a: Any, b: Any, i: int, j: int, full: bool) -> tuple[Table, list[list[Table]]]:
        """Return E[F G] and E[d_s F d_t G] for the arguments s, t of both."""
        key = ("ops", a, b, i, j, full)
        if key not in self.kept:
            product = self._product(a, b, i, j, full)
            if product is not None:
                (f, g), (h, k) = product
                found: tuple = (none_times(self.moment(f, h, i, j, full), self.moment(g, k, i, j, full)), [])
            else:
                found = self._expected(a, b, i, j, full)
            self.kept[key] = found
        return self.kept[key]

    def _variance(self, s: Atom, t: Atom, i: int) -> Array:
        found = self.get("second", s, t, i, i, False)
        return jnp.broadcast_to(jnp.asarray(0.0), s.shape) if found is None else found

    def _expected(self, a: Any, b: Any, i: int, j: int, full: bool) -> tuple[Table, list[list[Table]]]:
        first, second = self.arguments(a), self.arguments(b)
        behind = len(b.shape) if full else 0
        left = lambda u: u.reshape(u.shape + (1,) * behind)
        if len(first) == len(second) == 1:
            v, w = left(self._variance(first[0], first[0], i)), self._variance(second[0], second[0], j)
            x = self.get("second", first[0], second[0], i, j, full)
            shape = np.broadcast_shapes(v.shape, w.shape)
            v, w, x = (jnp.broadcast_to(jnp.asarray(0.0) if u is None else u, shape) for u in (v, w, x))
            known, too = self.form(a), self.form(b)
            if a is b and i == j and not full and known is not None and isinstance(known[0], expect.Kinked):
                half = (known[0].above ** 2 + known[0].below ** 2) / 2
                value = jnp.broadcast_to(half * (jnp.ones_like(v) if known[0].step else v), shape)
                return value, [[jnp.full_like(v, 0.0 if known[0].step else half)]]
            if known is not None and too is not None:
                (f, s, m), (g, t, n) = known, too
                pair = None
                if isinstance(f, expect.Kinked) and isinstance(g, expect.Kinked) and f.step == g.step:
                    pair = expect.kinked_pair(f, g, v, w, x)
                elif f == g == "erf":
                    pair = expect.erf_pair(s * s * v, t * t * w, s * t * x)
                elif f in WAVES and g in WAVES and (f == "exp") == (g == "exp"):
                    pair = expect.wave_pair(f, g, (m, n), s * s * v, t * t * w, s * t * x)
                if pair is not None:
                    return pair[0], [[s * t * pair[1][0][0]]]
            one, two = self._series(a, i), self._series(b, j)
            lift = lambda c: c.reshape(c.shape + (1,) * behind)
            one = jax.tree.map(lambda c: lift(c) if c.ndim else c, one)
            return expect.series_pair(one, two, v, w, x)
        if a.gaussian or b.gaussian:
            # Stein: E[u G] is the sum of cov(u, t) E[d_t G]
            total = None
            one_side = self._expectation(b, j)[1] if a.gaussian else self._expectation(a, i)[1]
            slopes = [one_side] if a.gaussian else [[left(s)] for s in one_side]
            for s, row in zip(first, slopes, strict=True):
                for t, slope in zip(second, row, strict=True):
                    total = none_plus(total, none_times(self.get("second", s, t, i, j, full), slope))
            return total, slopes
        both = [*first, *second]
        rows: list[list[Array]] = []
        for m, s in enumerate(both):
            rows.append([])
            for n, t in enumerate(both[: m + 1]):
                if m < len(first):
                    found: Table = left(self._variance(t, s, i))
                elif n < len(first):
                    found = self.get("second", t, s, i, j, full)
                else:
                    found = self._variance(t, s, j)
                rows[-1].append(jnp.asarray(0.0) if found is None else found)
        f, g = self.function(a, i, behind), self.function(b, j)
        value, slopes, error = expect.sampled_pair(f, g, len(first), len(second), rows)
        self.errors.append(error)
        return value, slopes

    def _series(self, a: Any, i: int) -> expect.Series:
        key = ("series", a, i)
        if key not in self.kept:
            (u,) = self.arguments(a)
            variance = jnp.broadcast_to(self._variance(u, u, i), a.shape)
            self.kept[key] = expect.series(self.function(a, i), variance)
            self.errors.append(self.kept[key].error)
        return self.kept[key]

    def _expectation(self, a: Any, i: int) -> tuple[Array, list[Array]]:
        """Return E[F] and E[d_s F] for its arguments s."""
        key = ("expectation", a, i)
        if key not in self.kept:
            arguments = self.arguments(a)
            if a.gaussian:
                found = jnp.asarray(0.0), [jnp.broadcast_to(jnp.asarray(1.0), a.shape)]
            elif len(arguments) == 1:
                known = self.form(a)
                if known is not None and isinstance(known[0], expect.Kinked):
                    kink, deviation = known[0], jnp.sqrt(self._variance(arguments[0], arguments[0], i))
                    half = (kink.above + kink.below) / 2
                    size = (kink.above - kink.below) / math.sqrt(2 * math.pi)
                    found = (
                        (
                            jnp.broadcast_to(jnp.asarray(half), a.shape),
                            [jnp.broadcast_to(jnp.asarray(0.0), a.shape)],
                        )
                        if kink.step
                        else (size * deviation, [jnp.broadcast_to(jnp.asarray(half), a.shape)])
                    )
                else:
                    series = self._series(a, i)
                    found = series.value[0], [series.mean_slope]
            else:
                rows = [
                    [self._variance(t, s, i) for t in arguments[: m + 1]] for m, s in enumerate(arguments)
                ]
                value, slopes, error = expect.sampled_pair(
                    self.function(a, i), lambda: jnp.asarray(1.0), len(arguments), 0, rows
                )
                self.errors.append(error)
                found = value, [row[0] for row in slopes]
            self.kept[key] = found
        return self.kept[key]


def _size(axis: Sequence[tuple[int, bool]]) -> int:
    return int(np.prod([size for size, wide in axis if not wide], dtype=int))


def _why_not(atom: Atom) -> str:
    if isinstance(atom, Fixed):
        return "numbers that differ from channel to channel enter a function that is not linear"
    if isinstance(atom, Source):
        return "a product of a field and weights of each channel enters a function that is not linear"
    return "a sum over positions of values that are not Gaussian enters a function that is not linear"


def _diagonal(table: Array, rank: int) -> Array:
    """Return the entries at equal positions."""
    for k in range(rank):
        # the first axis of the left with that of the right; the diagonal goes last
        table = jnp.diagonal(table, axis1=0, axis2=rank - k)
    return table


def _inner(a: Fixed, b: Fixed, i: int, j: int, full: bool) -> Array:
    """Return the mean over channels of products of known numbers."""
    (one, wide), (two, too) = a.factored(i), b.factored(j)
    if wide != too or [one.shape[k] for k in wide] != [two.shape[k] for k in too]:
        raise ValueError("channels of the same field are expected")
    letters = list(range(one.ndim))
    right = [k if k in wide or not full else k + one.ndim for k in letters]
    kept = [k for k in letters if k not in wide]
    out = kept + [k + one.ndim for k in kept] if full else kept
    found = jnp.einsum(one, letters, two, right, out, precision="highest")
    count = int(np.prod([one.shape[k] for k in wide], dtype=int))
    return found.reshape(a.shape + b.shape if full else a.shape) / count


def apply_op(equation: Any, operands: Sequence[Any]) -> Any:
    """Return an operation element by element on arrays that are broadcast against each other."""
    kinds = [dtype_of(v) for v in equation.invars]
    # numbers get the precision of the arrays beside them, which may be another than the trace was made in
    given = [o.dtype for o in operands if isinstance(o, jax.Array) and jnp.issubdtype(o.dtype, jnp.floating)]
    precise = max(given, key=lambda d: d.itemsize, default=None)
    floating = lambda kind: precise if precise is not None and jnp.issubdtype(kind, jnp.floating) else kind
    arrays = [jnp.asarray(o, floating(kind)) for o, kind in zip(operands, kinds, strict=True)]
    if equation.primitive.name == "convert_element_type":
        return arrays[0].astype(floating(equation.params["new_dtype"]))
    return equation.primitive.bind(*jnp.broadcast_arrays(*arrays), **equation.params)
