"""What each operation of a traced network does to constants, parameters and fields.

``Reader.step`` is given to the visitor of traces. Three families of operations have one rule each: those element by
element, those that move entries, and those that sum over positions; a parameter is met in products, convolutions,
lookups and sums.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any, NoReturn, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import source_info_util
from jax.extend.core import Jaxpr, JaxprEqn
from jaxtyping import Array

from meanflow.kernels._empirical.visit import (
    called,
    carried_arguments,
    dtype_of,
    execute,
    inner_jaxprs,
    shape_of,
    walk,
)
from meanflow.kernels._infinite.fields import (
    ONE,
    Coefficient,
    Constant,
    Field,
    Fixed,
    Joined,
    Layout,
    Map,
    Mapped,
    Op,
    Source,
    Weight,
    added,
    axis_of,
    channels,
    constant,
    full_shape,
    is_wide,
    mapped,
    reduced,
    regrouped,
    scaled,
)
from meanflow.kernels._infinite.tables import Tables

Value: TypeAlias = Any  # a Constant, Weight, Field or Joined
_NAMES = (
    "exp exp2 expm1 log log1p tanh logistic erf erfc erf_inv sin cos tan asin acos atan sinh cosh asinh acosh atanh",
    "sqrt rsqrt cbrt square integer_pow pow abs sign floor ceil round is_finite max min rem atan2 add sub mul div neg",
    "ge gt le lt eq ne and or not xor select_n clamp convert_element_type stop_gradient copy add_any nextafter",
)
ELEMENTWISE = frozenset(name for line in _NAMES for name in line.split())
MOVES = frozenset(["reshape", "transpose", "broadcast_in_dim", "squeeze", "slice", "rev", "pad"])
SUMS = frozenset(["reduce_sum", "cumsum", "reduce_window_sum"])
# axes of outputs this short are outputs side by side (gates, experts), not channels
NARROW = 3


class Refused(ValueError):
    """A network that cannot be followed to infinite width."""


class Reader:
    """Follows a trace for one pair of samples.

    Attributes:
        tables: of all fields so far.
        laws: for each parameter, (variance of an entry or times fan-in, whether it is times fan-in, its squared
            derivative if that is not the variance).
        shapes: of the parameters.
        coupled: the number of samples if the trace is of a whole batch, 0 if it is of one sample.
    """

    def __init__(
        self, laws: Sequence[tuple[Any, bool, Any]], shapes: Sequence[tuple[int, ...]], coupled: int = 0
    ):
        self.sides, self.laws, self.shapes, self.coupled = 2, laws, shapes, coupled
        self.place: JaxprEqn | None = None
        self.tables = Tables(self.sides, self.refuse)
        self.sliced: dict[tuple, Any] = {}
        self.made: list[Source] = []

    def refuse(self, reason: str, way_out: str = "") -> NoReturn:
        """Raise, with the operation and the place in the user's source."""
        where = ""
        if self.place is not None:
            line = source_info_util.summarize(self.place.source_info)
            where = f" (operation {self.place.primitive.name!r} at {line})"
        raise Refused(
            f"the network has no limit at infinite width that could be followed: {reason}{where}{way_out}"
        )

    def constant(self, value: Any) -> Constant:
        """Return a literal or constant of a trace."""
        return constant(value, self.sides)

    def array_of(self, a: Array, b: Array) -> Constant:
        """Return arrays, one a side, as a constant that may differ along all axes."""
        return Constant(a.shape, None, (a, b), frozenset(k for k, size in enumerate(a.shape) if size != 1))

    def places(self, out: Field) -> set[int]:
        """Return the axes of outputs that positions lie along, and not outputs of weights of their own."""
        last = [atom for atom in out.terms if atom is not ONE]
        aside: set[int] = set()
        for atom in last:
            while isinstance(atom, Mapped) and atom.way is None:
                atom = next(iter(atom.field.terms))
            if isinstance(atom, Source) and isinstance(atom.spread, Product):
                aside |= {k for k, n in enumerate(atom.spread.narrow) if n > 1}
        return {k for k, n in enumerate(out.shape) if k and n > 1 and k not in aside}

    def check_last(self, out: Field) -> None:
        """Refuse outputs whose parameters made what they act on, too: gradients are not independent of them then."""
        for last in sources(out):
            before, seen = [last.field], set()
            while before:
                field = before.pop()
                for atom in sources(field) if field is not None and field not in seen else ():
                    if atom.key == last.key:
                        self.refuse("the parameters of the outputs are used elsewhere, too")
                    before.append(atom.field)
                seen.add(field)

    def step(self, _: int, equation: JaxprEqn, values: list[Value]) -> list[Value]:
        """Return the values of an equation's outputs."""
        name = equation.primitive.name
        if (
            name in ("custom_jvp_call", "custom_vjp_call", "custom_vjp_call_jaxpr")
            or called(equation) is not None
        ):
            (inner,) = inner_jaxprs(equation)
            return walk(inner, values, self.step, self.constant)
        outer, self.place = self.place, equation
        found = self._rule(name, equation, values)
        self.place = outer
        return found

    def _rule(self, name: str, equation: JaxprEqn, values: list[Value]) -> list[Value]:
        if name == "scan":
            return self._scan(equation, values)
        if all(isinstance(v, Constant) for v in values):
            return self._constants(equation, values)
        if name in ("copy", "reduce_precision", "optimization_barrier"):
            return values
        if any(isinstance(v, Joined) for v in values):
            return [self._joined(name, equation, values)]
        if name in ELEMENTWISE:
            return [self._elementwise(name, equation, values)]
        if name in MOVES:
            return [self._moved(equation, values)]
        if name in SUMS and isinstance(values[0], Field):
            return [self._summed(equation, values[0])]
        rules: dict[str, Callable[[JaxprEqn, list[Value]], Value | list[Value]]] = {
            "concatenate": self._concatenate,
            "conv_general_dilated": self._convolution,
            "dot_general": self._product,
            "gather": self._looked_up,
            "reduce_max": self._extreme,
            "reduce_min": self._extreme,
            "split": self._split,
            "stack": lambda e, v: self._stacked(v, e.params["axis"]),
        }
        rule = rules.get(name)
        if rule is None:
            self.refuse(f"there is no rule for {name} of values that depend on parameters")
        found = rule(equation, values)
        return found if isinstance(found, list) else [found]

    # constants

    def _constants(self, equation: JaxprEqn, values: Sequence[Constant]) -> list[Value]:
        shape = lambda k: shape_of(equation.outvars[k])
        name = equation.primitive.name
        for v in values:
            # a mean over channels that is 0 in the limit was of this size in the finite network
            if v.noise > 1 and name not in (
                "mul",
                "div",
                "broadcast_in_dim",
                "reshape",
                "transpose",
                "squeeze",
            ):
                self.refuse(
                    "a sum over channels of products of independent fields, such as the logits of attention divided "
                    "by the root of the number of channels, stays random",
                    "; divide it by the number of channels itself",
                )
        if all(v.number is not None for v in values):
            small = [np.asarray(v.number, dtype_of(x)) for v, x in zip(values, equation.invars, strict=True)]
            if name in ELEMENTWISE:
                with jax.ensure_compile_time_eval():
                    out = equation.primitive.bind(*(jnp.asarray(a) for a in small), **equation.params)
                return [Constant(shape(0), np.asarray(out)[()])]
            if name in ("broadcast_in_dim", "reshape", "squeeze", "transpose", "slice", "rev"):
                return [Constant(shape(0), values[0].number)]
        arrays = [execute_on(equation, [self.array(v, k) for v in values]) for k in range(self.sides)]
        noise = max(v.noise for v in values) if values else 0.0
        if noise and name in ("mul", "div"):
            factor = [v.number for v in values if v.number is not None]
            noise *= abs(float(factor[0] if name == "mul" else 1 / factor[0])) if factor else 1.0
        return [
            Constant(shape(n), None, tuple(side[n] for side in arrays), varying(equation, values, n), noise)
            for n in range(len(equation.outvars))
        ]

    def array(self, value: Constant, side: int) -> Any:
        """Return a constant as an array."""
        return jnp.full(value.shape, value.number) if value.number is not None else value.arrays[side]

    # element by element

    def _elementwise(self, name: str, equation: JaxprEqn, values: list[Value]) -> Value:
        weights = [v for v in values if isinstance(v, Weight)]
        if weights and name in ("convert_element_type", "copy", "stop_gradient"):
            return values[0]
        if (
            len(weights) == 1
            and name in ("mul", "div", "neg")
            and all(isinstance(v, Weight) or (isinstance(v, Constant) and not v.varying) for v in values)
        ):
            return self._scaled_weight(name, values)
        layout = self._common(values)
        values = [self._widened(v, layout) for v in values]
        fields = [v for v in values if isinstance(v, Field)]
        if name in ("add", "sub", "add_any"):
            one, two = (v if isinstance(v, Field) else self.as_field(v, layout) for v in values)
            return added(one, two, self.sides, -1.0 if name == "sub" else 1.0)
        if name == "neg":
            return scaled(fields[0], -1.0)
        kinds = [dtype_of(equation.invars[0]), equation.params.get("new_dtype", bool)]
        if name == "convert_element_type" and all(jnp.issubdtype(k, jnp.floating) for k in kinds):
            return fields[0]
        if name in ("mul", "div") and len(fields) == 1 and (name == "mul" or isinstance(values[0], Field)):
            known = self.coefficient(next(v for v in values if isinstance(v, Constant)), layout)
            if known is not None:
                inverse = (
                    tuple(1 / c for c in known)
                    if isinstance(known, tuple)
                    else 1 / known
                    if name == "div"
                    else 0
                )
                return scaled(fields[0], known if name == "mul" else inverse)
        if name == "select_n" and isinstance(values[0], Constant):
            return self._selected(values, layout)
        operands: list[Any] = []
        for v in values:
            if isinstance(v, Constant) and v.number is None:
                known = self.coefficient(v, layout)
                operands.append(
                    self.as_field(v, layout) if known is None else Constant(reduced(layout), None, known)
                )
            else:
                operands.append(v)
        found = Field(layout, {Op(reduced(layout), equation, operands): 1.0})
        if self.coupled and self._over_samples(found):
            return self._law_of_large_numbers(found)
        return found

    def _scaled_weight(self, name: str, values: list[Value]) -> Weight:
        weight = next(v for v in values if isinstance(v, Weight))
        if name == "neg":
            factor: Any = -1.0
        else:
            other = next(v for v in values if isinstance(v, Constant))
            if name == "div" and values[1] is weight:
                self.refuse("a number is divided by a parameter")
            number = other.number if other.number is not None else jnp.ravel(other.arrays[0])[0]
            factor = number if name == "mul" else 1 / number
        shape = max((v.shape for v in values), key=len)
        return Weight(weight.leaf, weight.part, weight.axes, shape, weight.scale * factor)

    def _common(self, values: list[Value]) -> Layout:
        """Return the layout of what is made of values that are broadcast against each other."""
        shapes = [full_shape(v.layout) if isinstance(v, Field) else v.shape for v in values]
        rank = max(map(len, shapes))
        found = []
        fields = [v for v in values if isinstance(v, Field)]
        if not fields and any(isinstance(v, Constant) and v.varying for v in values):
            self.refuse(
                "a parameter is combined with data, before a layer with many channels",
                "; take the data through a layer first",
            )
        for a in range(rank):
            size = max(s[a] for s in shapes if len(s) == rank)
            mine = {v.layout[a] for v in fields if v.layout[a]}
            if len(mine) > 1:
                self.refuse("fields whose channels lie along different axes are combined")
            found.append(mine.pop() if mine else axis_of(size, not fields and a == rank - 1))
        return tuple(found)

    def _widened(self, value: Value, layout: Layout) -> Value:
        """Return a parameter as a field, and a field with its axes of length 1 as long as others are."""
        if isinstance(value, Weight):
            value = self.as_field(value, layout)
        if not isinstance(value, Field) or value.layout == layout:
            return value
        if value.shape == reduced(layout):
            return Field(layout, value.terms)
        shape = reduced(layout)
        way = Map(lambda a, _: jnp.broadcast_to(a, shape), ("widened", value.layout, layout), True)
        return mapped(value, way, layout)

    def _selected(self, values: list[Value], layout: Layout) -> Field:
        which = self.coefficient(values[0], layout)
        if which is None:
            self.refuse("a choice that differs from channel to channel is made between fields")
        total = Field(layout, {})
        for k, v in enumerate(values[1:]):
            mask = (
                tuple(jnp.where(w == k, 1.0, 0.0) for w in which)
                if isinstance(which, tuple)
                else float(which == k)
            )
            if isinstance(v, Constant):  # masked numbers may be infinite
                c: Any = self.coefficient(v, layout)
                sides = c if isinstance(c, tuple) else (c,) * self.sides
                if isinstance(which, tuple):
                    sides = tuple(jnp.where(w == k, u, 0.0) for w, u in zip(which, sides, strict=True))
                    v = Field(layout, {ONE: sides})
                else:
                    v = Field(layout, {ONE: sides} if which == k else {})
                total = added(total, v, self.sides)
            else:
                total = added(total, scaled(v, mask), self.sides)
        return total

    def coefficient(self, value: Constant, layout: Layout) -> Coefficient | None:
        """Return a constant as a coefficient of a field; None if it differs from channel to channel."""
        if value.number is not None:
            return float(value.number)
        if value.shape == ():
            return value.arrays
        if any(is_wide(layout, a) for a in value.varying):
            return None
        return tuple(reduce_array(a, layout) for a in value.arrays)

    def as_field(self, value: Value, layout: Layout) -> Field:
        """Return a constant or parameter as a field with channels along given axes."""
        if isinstance(value, Field):
            return value
        if isinstance(value, Constant):
            known = self.coefficient(value, layout)
            return Field(layout, {ONE: known} if known is not None else {Fixed(layout, value.arrays): 1.0})
        positions = []
        for a, axis in enumerate(layout):
            mine = value.axes[a] if a < len(value.axes) else None
            if mine is not None and any(wide for _, wide in axis) and not all(wide for _, wide in axis):
                self.refuse(
                    "a parameter is added along an axis of both positions and channels",
                    "; add it before flattening",
                )
            positions.append(
                math.prod(size for size, _ in axis) if mine is not None and not is_wide(layout, a) else 1
            )
        return Field(layout, {self.source(value, tuple(positions), None, Apart(tuple(positions)), 1): 1.0})

    def fan_in(self, weight: Weight, axes: Sequence[int]) -> int:
        """Return how many entries of a parameter a sum of products runs over, those in other parts included."""
        mine = [weight.axes[a] for a in axes]
        return math.prod(self.shapes[weight.leaf][a] for a in mine if a is not None)

    def source(
        self, weight: Weight, shape: tuple[int, ...], field: Field | None, spread: Any, fan: int, **kind: Any
    ) -> Source:
        """Return the Gaussian that a parameter makes of a field."""
        variance, with_fan, tangent = self.laws[weight.leaf]
        square = weight.scale**2
        variance = square * (variance / fan if with_fan and field is not None else variance)
        key = (weight.leaf, weight.part)
        squared = variance if tangent is None else square * tangent
        self.made.append(Source(shape, key, variance, squared, field, spread, **kind))
        return self.made[-1]

    # entries that move

    def _moved(self, equation: JaxprEqn, values: list[Value]) -> Value:
        value = values[0]
        if isinstance(value, Weight):
            return self._moved_weight(equation, value)
        assert isinstance(value, Field)
        layout, way, cut = self._movement(equation, value.layout)
        for axis, start, stop in cut:
            value = self.part(value, (full_shape(value.layout)[axis], start, stop))
        return mapped(value, way, layout)

    def _movement(self, equation: JaxprEqn, layout: Layout) -> tuple[Layout, Map, list]:
        """Return the layout afterwards, the map on reduced arrays, and the parts of channels that are cut out."""
        name, p = equation.primitive.name, dict(equation.params)
        shape, cut = shape_of(equation.outvars[0]), []
        if name == "reshape":
            found = regrouped(layout, shape)
            if found is None:
                self.refuse("channels and positions are mixed by a reshape that cuts across them")
            new, apply = found, lambda a: a.reshape(reduced(found))
        elif name == "transpose":
            new = tuple(layout[a] for a in p["permutation"])
            apply = lambda a: jnp.transpose(a, p["permutation"])
        elif name == "squeeze":
            new = tuple(axis for a, axis in enumerate(layout) if a not in p["dimensions"])
            apply = lambda a: jnp.squeeze(a, p["dimensions"])
        elif name == "broadcast_in_dim":
            back = {int(to): a for a, to in enumerate(p["broadcast_dimensions"])}
            same = lambda k: k in back and full_shape(layout)[back[k]] == shape[k]
            new = tuple(layout[back[k]] if same(k) else axis_of(shape[k]) for k in range(len(shape)))
            apply = lambda a: jax.lax.broadcast_in_dim(a, reduced(new), tuple(p["broadcast_dimensions"]))
        elif name == "slice":
            bounds, steps = [], p["strides"] or (1,) * len(shape)
            out = list(layout)
            for a, (start, stop) in enumerate(zip(p["start_indices"], p["limit_indices"], strict=True)):
                if is_wide(layout, a):
                    whole = full_shape(layout)[a]
                    if (start, stop, steps[a]) != (0, whole, 1):
                        if len(layout[a]) > 1 or steps[a] != 1:
                            self.refuse("channels are cut out of an axis that positions lie along, too")
                        cut.append((a, start, stop))
                        out[a] = axis_of(stop - start, True)
                    bounds.append((0, reduced(layout)[a], 1))
                else:
                    bounds.append((start, stop, steps[a]))
                    out[a] = axis_of(shape[a])
            new = tuple(out)
            apply = lambda a: a[tuple(slice(*b) for b in bounds)]
        else:  # rev, pad
            axes = (
                p["dimensions"] if name == "rev" else [k for k, c in enumerate(p["padding_config"]) if any(c)]
            )
            if any(is_wide(layout, a) for a in axes):
                self.refuse("channels are reversed or filled up")
            new = tuple(axis if a not in axes else axis_of(shape[a]) for a, axis in enumerate(layout))
            if name == "rev":
                apply = lambda a: jnp.flip(a, axes)
            else:
                apply = lambda a: jax.lax.pad(a, jnp.zeros((), a.dtype), p["padding_config"])
        tag = (name, layout, new, str({k: v for k, v in p.items() if k != "sharding"}))
        return new, Map(lambda a, _: apply(a), tag, True, name == "pad"), cut

    def _moved_weight(self, equation: JaxprEqn, weight: Weight) -> Weight:
        name, p, shape = equation.primitive.name, equation.params, shape_of(equation.outvars[0])
        part, axes = weight.part, weight.axes
        if name == "transpose":
            axes = tuple(axes[a] for a in p["permutation"])
        elif name == "broadcast_in_dim":
            back = {int(to): a for a, to in enumerate(p["broadcast_dimensions"])}
            axes = tuple(
                axes[back[k]] if k in back and weight.shape[back[k]] == shape[k] else None
                for k in range(len(shape))
            )
        elif name == "slice" and all(s == 1 for s in p["strides"] or (1,)):
            for a, (start, stop) in enumerate(zip(p["start_indices"], p["limit_indices"], strict=True)):
                if stop - start < weight.shape[a] and axes[a] is not None:
                    part = (*part, (axes[a] or 0, start, stop))
        elif name in ("reshape", "squeeze", "expand_dims"):
            kept = [a for a, size in zip(axes, weight.shape, strict=True) if size != 1]
            if [s for s in shape if s != 1] != [s for s in weight.shape if s != 1]:
                self.refuse("a parameter is reshaped")
            axes = tuple(kept.pop(0) if size != 1 else None for size in shape)
        else:
            self.refuse(f"{name} of a parameter")
        return Weight(weight.leaf, part, axes, shape, weight.scale)

    def part(self, field: Field, cut: tuple[int, int, int]) -> Field:
        """Return a part of the channels: of the same law, independent of all other parts."""
        key = (field, cut)
        if key not in self.sliced:
            terms = {self._part_of(atom, cut): c for atom, c in field.terms.items()}
            self.sliced[key] = Field(field.layout, terms)
        return self.sliced[key]

    def _part_of(self, atom: Any, cut: tuple[int, int, int]) -> Any:
        key = (atom, cut)
        if key not in self.sliced:
            if atom is ONE:
                found = atom
            elif isinstance(atom, Source):
                inner = (*atom.key, cut)
                found = Source(
                    atom.shape, inner, atom.variance, atom.tangent, atom.field, atom.spread, atom.gaussian
                )
            elif isinstance(atom, Mapped):
                found = Mapped(atom.shape, atom.way, self.part(atom.field, cut))
            elif isinstance(atom, Op):
                operands = [self.part(o, cut) if isinstance(o, Field) else o for o in atom.operands]
                found = Op(atom.shape, atom.equation, operands)
            else:
                self.refuse("a part of the channels is cut out of known numbers")
            self.sliced[key] = found
        return self.sliced[key]

    def _concatenate(self, equation: JaxprEqn, values: list[Value]) -> Value:
        axis, shape = equation.params["dimension"], shape_of(equation.outvars[0])
        layouts = [v.layout for v in values if isinstance(v, Field)]
        layout = layouts[0] if layouts else self._common(values)
        if is_wide(layout, axis):
            if not all(isinstance(v, Field) for v in values):
                self.refuse("parameters or data are put beside a field along the channels")
            return Joined(tuple(values), axis)
        new = tuple(a if k != axis else axis_of(shape[axis]) for k, a in enumerate(layout))
        total, start = Field(new, {}), 0
        for v in values:
            size = v.shape[axis] if not isinstance(v, Field) else full_shape(v.layout)[axis]
            mine = tuple(a if k != axis else axis_of(size) for k, a in enumerate(layout))
            edges = [(0, 0, 0)] * len(shape)
            edges[axis] = (start, shape[axis] - start - size, 0)
            fill = lambda a, _, edges=tuple(edges): jax.lax.pad(a, jnp.zeros((), a.dtype), edges)
            way = Map(fill, ("pad", mine, new, tuple(edges)), True, True)
            total = added(total, mapped(self.as_field(v, mine), way, new), self.sides)
            start += size
        return total

    def _joined(self, name: str, equation: JaxprEqn, values: list[Value]) -> Value:
        """Apply an operation to fields that stand side by side, one after the other."""
        whole = next(v for v in values if isinstance(v, Joined))
        axis, ends = whole.axis, np.cumsum(whole.sizes)
        if name == "concatenate" and equation.params["dimension"] == axis:
            parts = [v.parts if isinstance(v, Joined) else (v,) for v in values]
            return Joined(sum(parts, ()), axis)
        if name == "transpose":
            place: int | None = list(equation.params["permutation"]).index(axis)
        elif name in ELEMENTWISE or name in SUMS and name != "reduce_sum" or name == "pad":
            place = axis
        elif name in ("reduce_sum", "squeeze"):
            gone = equation.params["axes" if name == "reduce_sum" else "dimensions"]
            place = None if axis in gone else axis - sum(a < axis for a in gone)
        elif name == "dot_general":
            place = None
            k = values.index(whole)
            contract = equation.params["dimension_numbers"][0]
            if axis not in contract[k] or not isinstance(values[1 - k], Weight):
                self.refuse(
                    "fields side by side are multiplied other than by a parameter along their channels"
                )
            beside = {1 - k: contract[1 - k][list(contract[k]).index(axis)]}
        elif name == "conv_general_dilated" and isinstance(values[1], Weight):
            place, beside = None, {1: equation.params["dimension_numbers"].rhs_spec[1]}
        else:
            self.refuse(f"{name} of fields that stand side by side along the channels")
        found: list[Any] = []
        for part, stop, size in zip(whole.parts, ends, whole.sizes, strict=True):
            mine: list[Value] = []
            for k, v in enumerate(values):
                if isinstance(v, Joined):
                    if v.sizes != whole.sizes or v.axis != axis:
                        self.refuse("fields side by side meet others of other sizes")
                    mine.append(v.parts[whole.parts.index(part)])
                    continue
                along = (
                    axis
                    if name in ELEMENTWISE
                    else beside.get(k)
                    if name in ("dot_general", "conv_general_dilated")
                    else None
                )
                shape = full_shape(v.layout) if isinstance(v, Field) else v.shape
                if along is not None and len(shape) > along and shape[along] != 1:
                    v = self.cut(v, along, int(stop) - size, int(stop))
                mine.append(v)
            found += self._rule(name, equation, mine)
        if place is not None:
            return Joined(tuple(found), place)
        total = found[0]
        for other in found[1:]:
            if isinstance(total, Constant):
                pairs = zip(total.arrays, other.arrays, strict=True)
                arrays = tuple(a + b for a, b in pairs)
                total = Constant(total.shape, None, arrays, total.varying | other.varying)
            else:
                total = added(total, other, self.sides)
        return total

    def _split(self, equation: JaxprEqn, values: list[Value]) -> list[Value]:
        axis, found, start = equation.params["axis"], [], 0
        for out in equation.outvars:
            size = shape_of(out)[axis]
            found.append(self.cut(values[0], axis, start, start + size))
            start += size
        return found

    def cut(self, value: Value, axis: int, start: int, stop: int) -> Value:
        """Return a slice along one axis."""
        shape = value.shape if not isinstance(value, Field) else full_shape(value.layout)
        if (start, stop) == (0, shape[axis]):
            return value
        one = lambda a: jax.lax.slice_in_dim(a, start, stop, axis=axis)
        (equation,) = jax.make_jaxpr(one)(jax.ShapeDtypeStruct(shape, jnp.float32)).jaxpr.eqns
        return self._rule("slice", equation, [value])[0]

    def _extreme(self, equation: JaxprEqn, values: list[Value]) -> Value:
        """Return the maximum or minimum over a few positions."""
        (field,), axes = values, equation.params["axes"]
        if not isinstance(field, Field):
            self.refuse("a maximum of parameters")
        shape = full_shape(field.layout)
        if any(is_wide(field.layout, a) for a in axes) or math.prod(shape[a] for a in axes) > NARROW:
            self.refuse("a maximum over channels, or over many positions, of a field", "; take a mean")
        both = jnp.maximum if equation.primitive.name == "reduce_max" else jnp.minimum
        (pair,) = (e for e in jax.make_jaxpr(both)(0.0, 0.0).jaxpr.eqns if len(e.invars) == 2)
        found = self._slices(field, tuple(axes))
        total = found[0]
        for other in found[1:]:
            total = self._elementwise(pair.primitive.name, pair, [total, other])
        return total

    def _looked_up(self, equation: JaxprEqn, values: list[Value]) -> Value:
        table, index = values
        numbers, sizes = equation.params["dimension_numbers"], equation.params["slice_sizes"]
        if not isinstance(index, Constant):
            self.refuse("entries are looked up at places that depend on parameters")
        if isinstance(table, Weight):
            rows = table.shape[0]
            if tuple(numbers.start_index_map) != (0,) or tuple(sizes) != (1, *table.shape[1:]):
                self.refuse("entries of a parameter are looked up other than row by row")
            hot = tuple(jax.nn.one_hot(self.array(index, k)[..., 0], rows) for k in range(self.sides))
            layout = (*(axis_of(n) for n in hot[0].shape[:-1]), axis_of(rows, True))
            field = Field(layout, {Fixed(layout, hot): 1.0})
            shape = shape_of(equation.outvars[0])
            out = tuple(axis_of(n, k in numbers.offset_dims) for k, n in enumerate(shape))
            order = iter(range(len(layout) - 1))
            places = tuple(None if k in numbers.offset_dims else next(order) for k in range(len(shape)))
            spread = Product(
                layout, ("free",) * (len(layout) - 1) + ("contract",), places, (1,) * len(shape), rows
            )
            return Field(out, {self.source(table, reduced(out), field, spread, 1): 1.0})
        layout = table.layout
        touched = {*numbers.start_index_map, *numbers.collapsed_slice_dims}
        if any(is_wide(layout, a) for a in touched):
            self.refuse("channels are looked up one by one")
        small = tuple(1 if is_wide(layout, a) else s for a, s in enumerate(sizes))
        shape = shape_of(equation.outvars[0])
        kept = [a for a in range(len(layout)) if a not in numbers.collapsed_slice_dims]
        back = dict(zip(numbers.offset_dims, kept, strict=True))
        new = tuple(
            layout[back[k]] if k in back and is_wide(layout, back[k]) else axis_of(n)
            for k, n in enumerate(shape)
        )
        indices = [self.array(index, k) for k in range(self.sides)]
        options = {k: v for k, v in equation.params.items() if k != "slice_sizes"}
        take = lambda a, k: equation.primitive.bind(a, indices[k], slice_sizes=small, **options)
        return mapped(table, Map(take, None, True), new)

    # sums

    def _summed(self, equation: JaxprEqn, field: Field) -> Value:
        layout, p = field.layout, equation.params
        name, shape = equation.primitive.name, shape_of(equation.outvars[0])
        apply = lambda a, _=0: execute_on(equation, [a])[0]
        if name == "reduce_sum" and any(is_wide(layout, a) for a in p["axes"]):
            count = channels(layout, p["axes"])
            new = tuple(axis for a, axis in enumerate(layout) if a not in p["axes"])
            if all(atom.gaussian for atom in field.terms):
                return Constant(shape, 0.0)
            arrays = [count * apply(self.tables.mean(field, k)) for k in range(self.sides)]
            return self._uniform(arrays, new, shape)
        axes = p["axes"] if name == "reduce_sum" else range(len(layout))
        if name == "cumsum":
            axes = [p["axis"]]
        elif name == "reduce_window_sum":
            axes = [a for a, n in enumerate(p["window_dimensions"]) if n != 1]
        if any(is_wide(layout, a) for a in axes):
            self.refuse("a sum over some of the channels that are side by side")
        if name == "reduce_sum":
            new = tuple(axis for a, axis in enumerate(layout) if a not in axes)
        else:
            new = tuple(axis if a not in axes else axis_of(shape[a]) for a, axis in enumerate(layout))
        if self.coupled and 0 in axes and any(isinstance(t, Op) and t.factors for t in field.terms):
            return self._law_of_large_numbers(mapped(field, Map(apply, None, False), new))
        if name == "reduce_sum" and math.prod(full_shape(layout)[a] for a in axes) <= NARROW:
            total = Field(new, {})
            for part in self._slices(field, tuple(axes)):
                total = added(total, part, self.sides)
            return total
        return mapped(field, Map(apply, None, False), new)

    def _slices(self, field: Field, axes: tuple[int, ...]) -> list[Field]:
        """Return the field at each position along some axes, without these."""
        shape, found = full_shape(field.layout), []
        for place in np.ndindex(*(shape[a] for a in axes)):
            value: Any = field
            for a, k in zip(axes, place, strict=True):
                value = self.cut(value, a, k, k + 1)
            new = tuple(axis for a, axis in enumerate(value.layout) if a not in axes)
            drop = Map(lambda a, _: jnp.squeeze(a, axes), ("squeeze", value.layout, axes), True)
            found.append(mapped(value, drop, new))
        return found

    def _uniform(
        self, arrays: Sequence[Array], layout: Layout, shape: tuple[int, ...], noise: float = 0.0
    ) -> Constant:
        """Return reduced arrays as a constant that is the same in all channels."""
        whole = tuple(
            jnp.broadcast_to(
                a.reshape([1 if wide else size for axis in layout for size, wide in axis]),
                [size for axis in layout for size, _ in axis],
            ).reshape(shape)
            for a in arrays
        )
        axes = frozenset(a for a, axis in enumerate(layout) if any(not wide for _, wide in axis))
        return Constant(shape, None, whole, axes, noise)

    def _over_samples(self, field: Field) -> bool:
        """Tell whether a square of fields is one number for the whole batch, as the square of a batch mean."""
        (atom,) = field.terms
        return bool(isinstance(atom, Op) and atom.factors and field.shape[0] != self.coupled)

    def _law_of_large_numbers(self, field: Field) -> Constant:
        arrays = [self.tables.mean(field, k) for k in range(self.sides)]
        return self._uniform(arrays, field.layout, full_shape(field.layout))

    # products

    def _product(self, equation: JaxprEqn, values: list[Value]) -> Value:
        (contract, batch) = equation.params["dimension_numbers"]
        shape = shape_of(equation.outvars[0])
        if all(isinstance(v, Weight) for v in values):
            self.refuse(
                "a product of two parameters", "; they are one layer at infinite width: multiply by one"
            )
        swap = isinstance(values[0], Weight) or (
            isinstance(values[0], Constant) and isinstance(values[1], Field)
        )
        one, two = values[::-1] if swap else values
        (mine, theirs), (mine_batch, theirs_batch) = (
            pair[::-1] if swap else pair for pair in (contract, batch)
        )
        rank = len(one.shape if not isinstance(one, Field) else one.layout)
        free = [a for a in range(rank) if a not in (*mine, *mine_batch)]
        other_rank = len(two.shape if not isinstance(two, Field) else two.layout)
        other = [a for a in range(other_rank) if a not in (*theirs, *theirs_batch)]
        # for each axis of the product, the axis of `one`, or (axis of `two`,)
        places: list[Any] = [*mine_batch]
        places += [*((a,) for a in other), *free] if swap else [*free, *((a,) for a in other)]
        if isinstance(two, Weight):
            return self._dense(one, two, mine, mine_batch, theirs, places, shape)
        if isinstance(two, Constant) and isinstance(one, Field):
            return self._with_constant(equation, one, two, mine, theirs, places, swap)
        if isinstance(one, Field) and isinstance(two, Field):
            return self._logits(one, two, (mine, theirs), (mine_batch, theirs_batch), free, other, shape)
        return self.refuse("a product of values that depend on parameters in a way no rule covers")

    def _dense(
        self, one: Value, weight: Weight, mine: Any, batch: Any, theirs: Any, places: list, shape: Any
    ) -> Field:
        if isinstance(one, Constant):
            layout = tuple(axis_of(n, a in mine) for a, n in enumerate(one.shape))
            if one.number is not None:
                one = Constant(one.shape, None, tuple(self.array(one, k) for k in range(self.sides)))
            one = Field(layout, {Fixed(layout, one.arrays): 1.0})
        assert isinstance(one, Field)
        count = channels(one.layout, mine)
        free = [p for p in places if not isinstance(p, tuple) and p not in batch]
        inside = any(is_wide(one.layout, a) for a in mine)
        if not inside and math.prod(one.shape[a] for a in mine) == 1:
            inside = True  # a single channel
        if not inside or any(is_wide(one.layout, a) for a in free):
            self.refuse(
                "the same weights act on every channel (as in the mixing of tokens): the kernel stays random",
                "; let weights act along the channels",
            )
        roles = tuple(
            "contract" if a in mine else "batch" if a in batch else "free" for a in range(len(one.layout))
        )
        axes: list[tuple] = []
        narrow = []
        for p, n in zip(places, shape, strict=True):
            if isinstance(p, tuple):
                axes.append(axis_of(n, n > NARROW))
                narrow.append(n if n <= NARROW else 1)
            else:
                axes.append(one.layout[p])
                narrow.append(1)
        fan = self.fan_in(weight, theirs)
        spread = Product(
            one.layout,
            roles,
            tuple(None if isinstance(p, tuple) else p for p in places),
            tuple(narrow),
            count,
        )
        return Field(tuple(axes), {self.source(weight, reduced(tuple(axes)), one, spread, fan): 1.0})

    def _with_constant(
        self, equation: JaxprEqn, one: Field, two: Constant, mine: Any, theirs: Any, places: list, swap: bool
    ) -> Value:
        shape = shape_of(equation.outvars[0])
        (contract, batch) = equation.params["dimension_numbers"]
        own_batch, other_batch = batch[::-1] if swap else batch
        if any(is_wide(one.layout, a) for a in mine):
            self.refuse("channels are summed with known weights")
        # what is the same for all channels of a batch axis is taken once
        same = [b for a, b in zip(own_batch, other_batch, strict=True) if is_wide(one.layout, a)]
        if any(b in two.varying for b in same):
            self.refuse("channels are multiplied with matrices of their own")
        known = [self.array(two, k) for k in range(self.sides)]
        for b in same:
            known = [jax.lax.slice_in_dim(u, 0, 1, axis=b) for u in known]
        numbers = (contract, batch)

        def apply(a: Array, k: int) -> Array:
            u = known[k].astype(a.dtype)
            left, right = (u, a) if swap else (a, u)
            return jax.lax.dot_general(left, right, numbers, precision="highest")

        new = tuple(
            one.layout[p] if not isinstance(p, tuple) else axis_of(n)
            for p, n in zip(places, shape, strict=True)
        )
        return mapped(one, Map(apply, None, False), new)

    def _logits(
        self, one: Field, two: Field, contract: Any, batch: Any, free: list, other: list, shape: Any
    ) -> Value:
        """Return a sum over channels of products of two fields: in the limit it is not random."""
        if not any(is_wide(one.layout, a) for a in contract[0]):
            self.refuse("fields are multiplied and summed over positions", "; multiply and sum in two steps")
        count = channels(one.layout, contract[0])
        rank = len(one.layout)
        letters = list(range(rank))
        right = [rank + a for a in range(len(two.layout))]
        for a, b in (*zip(*contract, strict=True), *zip(*batch, strict=True)):
            right[b] = letters[a]
        out = [letters[a] for a in (*batch[0], *free)] + [right[b] for b in other]
        new = tuple(one.layout[a] for a in (*batch[0], *free)) + tuple(two.layout[b] for b in other)
        if any(is_wide(new, k) for k in range(len(batch[0]), len(new))):
            self.refuse("channels are multiplied with one another")
        arrays = []
        for k in range(self.sides):
            table = self.tables.moment(one, two, k, k, True)
            shaped = jnp.zeros(one.shape + two.shape) if table is None else table
            arrays.append(count * jnp.einsum(shaped, letters + right, out))
        size = math.prod(abs(c) for f in (one, two) for c in f.terms.values() if not isinstance(c, tuple))
        # beside values of order 1 it was size x count^(1/2); less than count^(-1/4) vanishes
        return self._uniform(arrays, new, shape, size * count**0.75 if count > 1 else 0.0)

    def _convolution(self, equation: JaxprEqn, values: list[Value]) -> Value:
        one, weight = values
        p, shape = equation.params, shape_of(equation.outvars[0])
        numbers = p["dimension_numbers"]
        feature = numbers.lhs_spec[1]
        if isinstance(weight, Constant) and isinstance(one, Field):
            self.refuse("a convolution of a field with known weights")
        if not isinstance(weight, Weight) or p["batch_group_count"] != 1:
            self.refuse("a convolution whose filters depend on data")
        if isinstance(one, Constant):
            layout = tuple(axis_of(n, a == feature) for a, n in enumerate(one.shape))
            arrays = tuple(self.array(one, k) for k in range(self.sides))
            one = Field(layout, {Fixed(layout, arrays): 1.0})
        assert isinstance(one, Field)
        window = tuple(weight.shape[a] for a in numbers.rhs_spec[2:])
        inputs = weight.shape[numbers.rhs_spec[1]]
        apart = inputs == 1 and p["feature_group_count"] > 1
        new = [axis_of(n) for n in shape]
        new[numbers.out_spec[1]] = axis_of(shape[numbers.out_spec[1]], True)
        new[numbers.out_spec[0]] = one.layout[numbers.lhs_spec[0]]
        layout = tuple(new)
        spread = Windows(
            numbers.lhs_spec,
            numbers.out_spec,
            window,
            tuple(p["window_strides"]),
            tuple(p["padding"]),
            tuple(p["lhs_dilation"]),
            tuple(p["rhs_dilation"]),
            inputs,
        )
        fan = self.fan_in(weight, numbers.rhs_spec[1:])
        # channel by channel the weights are known by one another only: a product of two random numbers
        source = self.source(weight, reduced(layout), one, spread, fan, gaussian=not apart)
        return Field(layout, {source: 1.0})

    # loops

    def _scan(self, equation: JaxprEqn, values: list[Value]) -> list[Value]:
        (body,) = inner_jaxprs(equation)
        carried = carried_arguments(equation)
        if not any(not isinstance(v, Constant) for v in values):
            return self._constants(equation, values)
        held, state, rows = values[: carried.start], values[carried], values[carried.stop :]
        length = equation.params["length"]
        order = range(length - 1, -1, -1) if equation.params["reverse"] else range(length)
        outs: dict[int, list[Value]] = {}
        for k in order:
            found = walk(body, [*held, *state, *(self._row(v, k) for v in rows)], self.step, self.constant)
            state, outs[k] = found[: len(state)], found[len(state) :]
        self.place = equation
        stacked = [self._stacked([outs[k][n] for k in range(length)]) for n in range(len(outs[0]))]
        return [*state, *stacked]

    def _row(self, value: Value, k: int) -> Value:
        if isinstance(value, Constant):
            if value.number is not None:
                return Constant(value.shape[1:], value.number)
            axes = frozenset(a - 1 for a in value.varying if a)
            return Constant(value.shape[1:], None, tuple(a[k] for a in value.arrays), axes)
        if isinstance(value, Weight):
            part = (*value.part, (value.axes[0] or 0, k, k + 1))
            return Weight(value.leaf, part, value.axes[1:], value.shape[1:], value.scale)
        row = self.cut(value, 0, k, k + 1)
        drop = Map(lambda a, _: jnp.squeeze(a, 0), ("squeeze", value.layout, 0), True)
        return mapped(row, drop, value.layout[1:])

    def _stacked(self, values: list[Value], axis: int = 0) -> Value:
        """Return values side by side along a new axis."""
        known = [v for v in values if isinstance(v, Constant)]
        if len(known) == len(values):
            shape = (*known[0].shape[:axis], len(values), *known[0].shape[axis:])
            if all(v.number is not None and v.number == known[0].number for v in known):
                return Constant(shape, known[0].number)
            arrays = tuple(jnp.stack([self.array(v, k) for v in known], axis) for k in range(self.sides))
            axes = frozenset({axis, *(a + (a >= axis) for v in known for a in v.varying)})
            return Constant(shape, None, arrays, axes)
        layout = self._common(values)
        new = (*layout[:axis], axis_of(len(values)), *layout[axis:])
        total = Field(new, {})
        for k, v in enumerate(values):
            edges = [(0, 0, 0)] * len(new)
            edges[axis] = (k, len(values) - 1 - k, 0)

            def put(a: Array, _: int, edges: tuple = tuple(edges)) -> Array:
                return jax.lax.pad(jnp.expand_dims(a, axis), jnp.zeros((), a.dtype), edges)

            way = Map(put, ("put", axis, tuple(edges), layout), True, True)
            total = added(total, mapped(self.as_field(v, layout), way, new), self.sides)
        return total


class Apart:
    """The table of a parameter by itself: entries at different positions are independent."""

    needs_pairs = False

    def __init__(self, shape: tuple[int, ...]):
        self.shape = shape

    def __call__(self, _: Any, __: Any, full: bool) -> Array:
        """Return the table."""
        shape = self.shape * 2 if full else self.shape
        return apart(jnp.broadcast_to(jnp.asarray(1.0), shape), self.shape, full)


def sources(field: Field) -> list[Source]:
    """Return the Gaussians made by parameters that a field is a function of."""
    found: list[Source] = []
    for atom in field.terms:
        inner = atom.operands if isinstance(atom, Op) else [atom.field] if isinstance(atom, Mapped) else []
        found += [atom] if isinstance(atom, Source) else []
        for other in inner:
            found += sources(other) if isinstance(other, Field) else []
    return found


def apart(table: Array, sizes: Sequence[int], full: bool) -> Array:
    """Return a table with zeros at different positions along the axes that have a size."""
    rank = len(sizes)
    for a, n in enumerate(sizes):
        if n > 1 and full:
            mask = np.eye(n, dtype=bool).reshape([n if k in (a, rank + a) else 1 for k in range(2 * rank)])
            table = jnp.where(mask, table, 0.0)
        elif n > 1:
            table = jnp.broadcast_to(
                table, np.broadcast_shapes(table.shape, [n if k == a else 1 for k in range(rank)])
            )
    return table


class Product:
    """From the table of a field to that of its product with a parameter (dot_general)."""

    def __init__(
        self, layout: Layout, roles: tuple[str, ...], places: tuple, narrow: tuple[int, ...], count: int
    ):
        self.shape, self.roles, self.places, self.narrow, self.count = (
            reduced(layout),
            roles,
            places,
            narrow,
            count,
        )
        free = [n for n, role in zip(self.shape, roles, strict=True) if role == "free"]
        self.needs_pairs = math.prod(free) > 1

    def __call__(self, table: Array | None, other: Any, full: bool) -> Array | None:
        """Return count x (sum over what is contracted) of the table."""
        if table is None:
            return None
        rank, whole = len(self.shape), full and self.needs_pairs
        letters = list(range(rank))
        theirs = [a + rank if self.roles[a] == "free" else a for a in letters]
        out = [a for a in self.places if a is not None]
        shape = [self.shape[a] if a is not None else 1 for a in self.places]
        if not whole:
            table = jnp.einsum(table, letters, out).reshape(shape + [1] * (len(shape) if full else 0))
        else:
            right = [theirs[a] for a in out if self.roles[a] == "free"]
            table = jnp.einsum(table, letters + theirs, out + right)
            beside = [other.shape[a] if a is not None and self.roles[a] == "free" else 1 for a in self.places]
            table = table.reshape(shape + beside)
        batch = [self.shape[a] if a is not None and self.roles[a] == "batch" else 1 for a in self.places]
        sizes = [max(pair) for pair in zip(batch, self.narrow, strict=True)]
        return self.count * apart(table, sizes, full)


class Windows:
    """From the table of a field to that of its convolution with a parameter."""

    needs_pairs = True

    def __init__(
        self,
        lhs: Any,
        out: Any,
        window: Any,
        strides: Any,
        padding: Any,
        dilation: Any,
        holes: Any,
        count: int,
    ):
        self.lhs, self.out, self.window, self.strides = lhs, out, window, strides
        self.padding, self.dilation, self.holes, self.count = padding, dilation, holes, count

    def __call__(self, table: Array | None, other: Any, full: bool) -> Array | None:
        """Return count x the sum over the window, moved alike at both positions, of the table."""
        if table is None:
            return None
        rank = len(self.lhs)
        for d, a in enumerate(self.lhs[2:]):
            axes = [a, a + rank] if full else [a]
            edges = [(0, 0, 0)] * table.ndim
            for axis in axes:
                edges[axis] = (*self.padding[d], self.dilation[d] - 1)
            padded = jax.lax.pad(table, jnp.zeros((), table.dtype), edges)
            reach = padded.shape[a] - (self.window[d] - 1) * self.holes[d]
            total: Any = 0.0
            for w in range(self.window[d]):
                piece, start = padded, w * self.holes[d]
                for axis in axes:
                    piece = jax.lax.slice_in_dim(piece, start, start + reach, self.strides[d], axis)
                total = total + piece
            table = total
        order = [0] * rank
        for mine, theirs in zip(self.lhs, self.out, strict=True):
            order[theirs] = mine
        both = order + [a + rank for a in order] if full else order
        return self.count * jnp.transpose(table, both)


def reduce_array(array: Array, layout: Layout) -> Array:
    """Return an array that is the same for all channels with axes of length 1 for them."""
    layout = tuple(axis if size != 1 else () for axis, size in zip(layout, array.shape, strict=True))
    factors = [factor for axis in layout for factor in axis]
    apart = array.reshape([size for size, _ in factors])
    once = apart[tuple(slice(0, 1) if wide else slice(None) for _, wide in factors)]
    return once.reshape(reduced(layout))


def execute_on(equation: JaxprEqn, operands: Sequence[Any]) -> list[Any]:
    """Return one equation's outputs at operands that may have another precision than it was traced with."""
    kinds = [dtype_of(v) for v in equation.invars]
    cast = [
        o.astype(k) if hasattr(o, "astype") and o.dtype != k and not _is_extended(k) else o
        for o, k in zip(operands, kinds, strict=True)
    ]
    if inner_jaxprs(equation) or "jaxpr" in equation.params:
        return execute(Jaxpr([], [], [], []), equation, cast)
    found = equation.primitive.bind(*cast, **equation.params)
    return list(found) if equation.primitive.multiple_results else [found]


def _is_extended(kind: Any) -> bool:
    return jnp.issubdtype(kind, jax.dtypes.extended)


def varying(equation: JaxprEqn, values: Sequence[Constant], n: int) -> frozenset[int]:
    """Return the axes along which the result of an operation on constants may differ."""
    name, p, shape = equation.primitive.name, equation.params, shape_of(equation.outvars[n])
    everything = frozenset(a for a, size in enumerate(shape) if size != 1)
    if name in ELEMENTWISE or name in ("reduce_precision", "cumsum", "rev", "copy"):
        return frozenset().union(*(v.varying for v in values if len(v.shape) == len(shape)))
    first = values[0].varying if values else frozenset()
    if name == "broadcast_in_dim":
        places = p["broadcast_dimensions"]
        return frozenset(int(places[a]) for a in first if values[0].shape[a] == shape[places[a]])
    if name == "transpose":
        return frozenset(k for k, a in enumerate(p["permutation"]) if a in first)
    if name == "squeeze" or name.startswith(("reduce_", "argm")) and "axes" in p:
        gone = p["dimensions"] if name == "squeeze" else p["axes"]
        left = [a for a in range(len(values[0].shape)) if a not in gone]
        return frozenset(k for k, a in enumerate(left) if a in first)
    if name == "slice":
        return first & everything
    if name == "reshape":
        new = regrouped(tuple(axis_of(s, a in first) for a, s in enumerate(values[0].shape)), shape)
        return everything if new is None else frozenset(k for k in everything if is_wide(new, k))
    if name == "dot_general":
        (contract, batch) = p["dimension_numbers"]
        kinds = [v.varying for v in values]
        out = [a in kinds[0] or b in kinds[1] for a, b in zip(*batch, strict=True)]
        for k, v in enumerate(values):
            out += [a in kinds[k] for a in range(len(v.shape)) if a not in (*contract[k], *batch[k])]
        return frozenset(k for k, differs in enumerate(out) if differs)
    return everything
