"""What a value of a traced network is at infinite width: a constant, a parameter, or a field.

A field has infinitely many channels that are independent and of one law. It is a sum of atoms with known coefficients,

    ONE                what is the same in all channels
    Fixed              known numbers that differ from channel to channel, such as data
    Source             a Gaussian made by a parameter, from another field or by itself
    Mapped             a linear map over positions of a field
    Op                 an operation of the trace on fields, element by element

``tables`` says what the second moments of atoms are, ``rules`` what the operations of a trace do to fields.

Arrays of fields are *reduced*: they have all axes of the traced value, those of channels with length 1. The axis of a
flattened image is positions times channels, hence an axis consists of factors, (size, whether it is of channels).
There is one array a side: for the sample of x, and for that of z.
"""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import JaxprEqn
from jaxtyping import Array

Factor: TypeAlias = tuple[int, bool]
Layout: TypeAlias = tuple[tuple[Factor, ...], ...]
Sides: TypeAlias = tuple[Array, ...]
Coefficient: TypeAlias = Any  # a number, or Sides


def axis_of(size: int, wide: bool = False) -> tuple[Factor, ...]:
    """Return the factors of one axis; one of length 1 has none."""
    return ((size, wide),) if size != 1 else ()


def reduced(layout: Layout) -> tuple[int, ...]:
    """Return the shape of the arrays of a field."""
    return tuple(math.prod(size for size, wide in axis if not wide) for axis in layout)


def channels(layout: Layout, axes: Sequence[int]) -> int:
    """Return how many channels of the finite network lie along some axes."""
    return math.prod(size for a in axes for size, wide in layout[a] if wide)


def is_wide(layout: Layout, axis: int) -> bool:
    """Tell whether there are channels along an axis."""
    return any(wide for _, wide in layout[axis])


def full_shape(layout: Layout) -> tuple[int, ...]:
    """Return the shape of the traced value."""
    return tuple(math.prod(size for size, _ in axis) for axis in layout)


def regrouped(layout: Layout, sizes: Sequence[int]) -> Layout | None:
    """Return the layout after a reshape; None if an axis would not consist of whole factors."""
    left = [factor for axis in layout for factor in axis if factor[0] != 1]
    found = []
    for size in sizes:
        axis: list[Factor] = []
        rest = size
        while rest > 1:
            if not left:
                return None
            length, wide = left.pop(0)
            if rest % length:
                if length % rest:
                    return None
                left.insert(0, (length // rest, wide))
                length = rest
            axis.append((length, wide))
            rest //= length
        found.append(tuple(axis))
    return tuple(found)


@dataclasses.dataclass(frozen=True, eq=False)
class Constant:
    """A value that no random number enters: one number, known while tracing, or arrays for both sides.

    Attributes:
        shape: of the traced value.
        number: the value of all entries, or None.
        arrays: of that shape, one a side; empty for a number.
        varying: the axes along which entries may differ.
        noise: how large what infinite width takes away was in the finite network of n channels, times n^(1/4).
    """

    shape: tuple[int, ...]
    number: Any = None
    arrays: Sides = ()
    varying: frozenset[int] = frozenset()
    noise: float = 0.0


@dataclasses.dataclass(frozen=True, eq=False)
class Weight:
    """A parameter, or a part of one, in other axes, times a number.

    Attributes:
        leaf: number of the parameter.
        part: (axis, start, stop) of what has been cut out.
        axes: the axis of the parameter along each axis of the value; None for new ones.
        shape: of the value.
        scale: the number.
    """

    leaf: int
    part: tuple[tuple[int, int, int], ...]
    axes: tuple[int | None, ...]
    shape: tuple[int, ...]
    scale: Any = 1.0


class Atom:
    """One of the terms of a field; two are equal if they are one object.

    Attributes:
        shape: of its arrays.
        gaussian: whether it is a centered Gaussian.
        keys: the parameters, and parts of them, that made the Gaussians it is a function of.
    """

    def __init__(self, shape: tuple[int, ...], gaussian: bool, keys: frozenset = frozenset()):
        self.shape, self.gaussian, self.keys = shape, gaussian, keys


ONE = Atom((), False)


@dataclasses.dataclass(frozen=True, eq=False)
class Field:
    """A sum of atoms with coefficients: numbers, or reduced arrays, one a side."""

    layout: Layout
    terms: dict[Atom, Coefficient]

    @property
    def shape(self) -> tuple[int, ...]:
        """Return the shape of its arrays."""
        return reduced(self.layout)

    @property
    def keys(self) -> frozenset:
        """Return the parameters that made the Gaussians it is a function of."""
        return frozenset().union(*(atom.keys for atom in self.terms))


@dataclasses.dataclass(frozen=True, eq=False)
class Joined:
    """Fields of different laws side by side along an axis of channels."""

    parts: tuple[Field, ...]
    axis: int

    @property
    def sizes(self) -> list[int]:
        """Return how many channels each of them has."""
        return [full_shape(part.layout)[self.axis] for part in self.parts]


class Fixed(Atom):
    """Known numbers that differ from channel to channel: arrays of the full shape, one a side."""

    def __init__(self, layout: Layout, arrays: Sides):
        super().__init__(reduced(layout), False)
        self.layout, self.arrays = layout, arrays

    def factored(self, side: int) -> tuple[Array, tuple[int, ...]]:
        """Return the array with one axis a factor, and which of them are of channels."""
        factors = [factor for axis in self.layout for factor in axis]
        array = self.arrays[side].reshape([size for size, _ in factors])
        return array, tuple(k for k, (_, wide) in enumerate(factors) if wide)


class Source(Atom):
    """A Gaussian made by a parameter.

    Attributes:
        key: the parameter, and the part of it.
        variance: of an entry of the parameter.
        tangent: the squared derivative of an entry in what is trained.
        field: what the parameter is multiplied with; None for a parameter by itself.
        spread: from the table of that field to the table of this one.
    """

    def __init__(
        self,
        shape: tuple[int, ...],
        key: tuple,
        variance: Any,
        tangent: Any,
        field: "Field | None",
        spread: Any,
        gaussian: bool = True,
    ):
        super().__init__(shape, gaussian, frozenset([key]))
        self.key, self.variance, self.tangent, self.field, self.spread = key, variance, tangent, field, spread


@dataclasses.dataclass(frozen=True, eq=False)
class Map:
    """A linear map over positions.

    Attributes:
        apply: (reduced array, side) -> reduced array.
        tag: equal for equal maps that are the same on both sides; None if they may differ.
        moves: whether every entry of the result is an entry of the argument, or 0.
        pads: whether some are 0.
    """

    apply: Callable[[Array, int], Array]
    tag: Any
    moves: bool
    pads: bool = False


class Mapped(Atom):
    """A linear map over positions of a field; without a map, the field as one Gaussian."""

    def __init__(self, shape: tuple[int, ...], way: Map | None, field: Field):
        super().__init__(shape, all(atom.gaussian for atom in field.terms), field.keys)
        self.way, self.field = way, field


class Op(Atom):
    """An operation of the trace on fields and constants, element by element."""

    def __init__(self, shape: tuple[int, ...], equation: JaxprEqn, operands: Sequence[Any]):
        keys = frozenset().union(*(o.keys for o in operands if isinstance(o, Field)))
        super().__init__(shape, False, keys)
        self.equation, self.operands = equation, tuple(operands)

    @property
    def factors(self) -> tuple[Any, ...]:
        """Return the two fields of which this is the product; none if it is something else."""
        name = self.equation.primitive.name
        if name == "square" or (name == "integer_pow" and self.equation.params["y"] == 2):
            return self.operands * 2
        both = all(isinstance(o, Field) for o in self.operands)
        return self.operands if name == "mul" and both else ()


def times(a: Coefficient, b: Coefficient) -> Coefficient:
    """Return the product of two coefficients."""
    if isinstance(a, tuple) and isinstance(b, tuple):
        return tuple(x * y for x, y in zip(a, b, strict=True))
    if isinstance(a, tuple):
        return tuple(x * b for x in a)
    return tuple(a * y for y in b) if isinstance(b, tuple) else a * b


def plus(a: Coefficient, b: Coefficient, sides: int) -> Coefficient:
    """Return the sum of two coefficients."""
    if not isinstance(a, tuple) and not isinstance(b, tuple):
        return a + b
    wide = lambda c: c if isinstance(c, tuple) else (c,) * sides
    return tuple(x + y for x, y in zip(wide(a), wide(b), strict=True))


def at(coefficient: Coefficient, side: int) -> Any:
    """Return a coefficient on one side."""
    return coefficient[side] if isinstance(coefficient, tuple) else coefficient


def field_of(layout: Layout, terms: dict[Atom, Coefficient]) -> Field:
    """Return a sum of atoms; one that is Gaussian becomes one atom, so that functions of it have one argument."""
    kept = {a: c for a, c in terms.items() if isinstance(c, tuple) or c != 0}
    normal = {a: c for a, c in kept.items() if a is not ONE}
    several = len(normal) > 1 or any(isinstance(c, tuple) for c in normal.values())
    if several and all(a.gaussian for a in normal):
        whole = Mapped(reduced(layout), None, Field(layout, normal))
        kept = {whole: 1.0, **{a: c for a, c in kept.items() if a is ONE}}
    return Field(layout, kept)


def added(one: Field, two: Field, sides: int, sign: float = 1.0) -> Field:
    """Return the sum, or difference, of two fields."""
    terms = dict(one.terms)
    for atom, coefficient in two.terms.items():
        mine = times(coefficient, sign)
        terms[atom] = plus(terms[atom], mine, sides) if atom in terms else mine
    return field_of(one.layout, terms)


def scaled(field: Field, factor: Coefficient) -> Field:
    """Return a field times a coefficient."""
    return field_of(field.layout, {a: times(c, factor) for a, c in field.terms.items()})


def mapped(field: Field, way: Map, layout: Layout) -> Field:
    """Return a linear map over positions of a field; what is a number stays one where nothing is filled in."""
    shape, terms = reduced(layout), {}
    rest = {a: c for a, c in field.terms.items() if a is not ONE}
    if ONE in field.terms:
        terms[ONE] = moved(field.terms[ONE], way, field.shape)
    # of one atom that is only moved, the coefficient can stay outside
    if len(rest) == 1 and way.moves:
        ((atom, coefficient),) = rest.items()
        outside = isinstance(coefficient, tuple)
        inner = Field(field.layout, {atom: 1.0})
        terms[Mapped(shape, way, inner)] = (
            tuple(way.apply(_filled(c, field.shape), k) for k, c in enumerate(coefficient))
            if outside
            else coefficient
        )
    elif rest:
        terms[Mapped(shape, way, Field(field.layout, rest))] = 1.0
    return field_of(layout, terms)


def _filled(value: Any, shape: tuple[int, ...]) -> Array:
    return jnp.broadcast_to(jnp.asarray(value), shape)


def moved(coefficient: Coefficient, way: Map, shape: tuple[int, ...], dtype: Any = None) -> Coefficient:
    """Return what a map does to a coefficient, as the field ``coefficient x ONE``."""
    if not isinstance(coefficient, tuple) and way.moves and not way.pads:
        return coefficient
    sides = coefficient if isinstance(coefficient, tuple) else (coefficient,) * 2
    return tuple(way.apply(_filled(c, shape), k) for k, c in enumerate(sides))


def constant(value: Any, sides: int) -> Constant:
    """Return a literal, or an array that the trace holds."""
    shape = tuple(np.shape(value))
    known = value if isinstance(value, np.ndarray | np.generic | int | float | bool) else None
    if known is not None and np.size(known) and np.all(np.asarray(known) == np.ravel(known)[0]):
        return Constant(shape, np.ravel(known)[0])
    axes = frozenset(a for a, size in enumerate(shape) if size != 1)
    return Constant(
        shape, None, (jnp.asarray(value),) * sides if not _is_key(value) else (value,) * sides, axes
    )


def _is_key(value: Any) -> bool:
    return jnp.issubdtype(getattr(value, "dtype", np.float32), jax.dtypes.prng_key)
