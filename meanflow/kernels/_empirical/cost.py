"""What a kernel costs, counted in the traced program.

A cost is a pair: operations in products (dot_general and convolutions, two for a multiplication and an addition) and
numbers that pass through memory. One number costs about as much time as ``TOUCH`` operations of a product. Nothing is
compiled or computed.
"""

import dataclasses
import math
from collections.abc import Sequence
from typing import NamedTuple

from jax.extend.core import ClosedJaxpr, JaxprEqn, Literal

from meanflow.kernels._empirical import forms
from meanflow.kernels._empirical.contraction import is_halved
from meanflow.kernels._empirical.visit import carried_arguments, inner_jaxprs, shape_of, walk

TOUCH = 40.0  # operations of a matrix product in the time that one number takes to pass through memory


@dataclasses.dataclass(frozen=True)
class Cost:
    """Operations in products and numbers through memory."""

    flops: float = 0.0
    numbers: float = 0.0

    def __add__(self, other: "Cost") -> "Cost":
        return Cost(self.flops + other.flops, self.numbers + other.numbers)

    def __mul__(self, factor: float) -> "Cost":
        return Cost(self.flops * factor, self.numbers * factor)

    @property
    def total(self) -> float:
        """Everything in operations of a product."""
        return self.flops + TOUCH * self.numbers


@dataclasses.dataclass(frozen=True)
class Passes:
    """The cost of evaluating a function once, of pulling one output back to its sites, and what it stores.

    Attributes:
        forward: one evaluation.
        backward: one cotangent to all sites.
        convolved: operations of convolutions among those of ``forward``; their gradients in the parameters, sample by
            sample, are far slower than their count.
        stored: numbers alive between the passes.
        largest: of all values.
    """

    forward: Cost = Cost()
    backward: Cost = Cost()
    convolved: float = 0.0
    stored: float = 0.0
    largest: float = 0.0

    def plus(self, other: "Passes", rounds: int = 1) -> "Passes":
        """Return this and ``rounds`` rounds of another, one after the other."""
        return Passes(
            self.forward + other.forward * rounds,
            self.backward + other.backward * rounds,
            self.convolved + other.convolved * rounds,
            self.stored + other.stored * rounds,
            max(self.largest, other.largest),
        )


# values that depend on: nothing or the sample alone, parameters alone, both
_FIXED, _PARAM, _BOTH = 0, 1, 2
_FREE = ("reshape", "squeeze", "expand_dims", "broadcast_in_dim", "copy", "stop_gradient")


def passes(closed: ClosedJaxpr, leaves: int) -> Passes:
    """Count one evaluation of a jaxpr whose first ``leaves`` arguments are parameters."""
    # the sample alone is fixed; what parameters and the sample make together carries cotangents
    kinds = [_PARAM] * leaves + [_FIXED] * (len(closed.jaxpr.invars) - leaves)
    return _count(closed, kinds)[0]


def _count(closed: ClosedJaxpr, kinds: Sequence[int]) -> tuple[Passes, list[int]]:
    total = Passes()

    def step(_: int, equation: JaxprEqn, ins: list[int]) -> list[int]:
        nonlocal total
        one, outs, rounds = _equation(equation, ins)
        total = total.plus(one, rounds)
        return outs

    outs = walk(closed, kinds, step, lambda _: _FIXED)
    return total, outs


def _equation(equation: JaxprEqn, ins: list[int]) -> tuple[Passes, list[int], int]:
    """Count one equation; return what its outputs depend on, and how many rounds it runs."""
    name, inner = equation.primitive.name, inner_jaxprs(equation)
    if name == "scan":
        # what is carried depends after a round on all that it is made of: the kinds of a second round are those of all
        carried = carried_arguments(equation)
        _, outs = _count(inner[0], ins)
        ins[carried] = [max(a, b) for a, b in zip(ins[carried], outs, strict=False)]
        return *_count(inner[0], ins), equation.params["length"]
    if inner:  # of several branches the most expensive one counts
        counted = [_count(c, ins[len(ins) - len(c.jaxpr.invars) :]) for c in inner]
        return *max(counted, key=lambda c: c[0].forward.total), 1
    operands = list(zip(ins, equation.invars, strict=True))
    size = float(sum(math.prod(shape_of(v)) for v in equation.outvars))
    # a parameter and a sample together depend on both; so does what was made of them
    met = _PARAM in ins and any(k == _FIXED and not isinstance(v, Literal) for k, v in operands)
    kind = _BOTH if met else max(ins, default=_FIXED)
    outs = [kind] * len(equation.outvars)
    if name in ("dot_general", "conv_general_dilated"):
        flops = 2.0 * size * _contracted(equation)
        # parameters are read once for all samples
        forward = Cost(flops, size + sum(math.prod(shape_of(v)) for k, v in operands if k != _PARAM))
        convolved = flops if name == "conv_general_dilated" else 0.0
        return Passes(forward, forward * ins.count(_BOTH), convolved, size, size), outs, 1
    # what depends on parameters alone is computed once for all samples
    if name in _FREE or kind == _PARAM:
        return Passes(), outs, 1
    # neighboring operations on numbers run as one pass: half a number for each
    read = sum(math.prod(shape_of(v)) for v in equation.invars) if "reduce" in name else 0
    touched = Cost(0.0, 0.5 * (size + read))
    return Passes(touched, touched if kind == _BOTH else Cost(), 0.0, size, size), outs, 1


def _contracted(equation: JaxprEqn) -> float:
    """Return how many products each output of a dot_general or a convolution sums."""
    options = equation.params
    if equation.primitive.name == "dot_general":
        left = shape_of(equation.invars[0])
        return float(math.prod(left[i] for i in options["dimension_numbers"][0][0]))
    weight = shape_of(equation.invars[1])
    return math.prod(weight) / weight[options["dimension_numbers"].rhs_spec[0]]


class Block(NamedTuple):
    """A block of a kernel: T rows, S columns, C outputs, which of them are kept, and whether x and z are the same."""

    rows: int
    columns: int
    outputs: int
    kept: str
    symmetric: bool

    @property
    def samples(self) -> int:
        """At how many samples the network is differentiated."""
        return self.rows if self.symmetric else self.rows + self.columns

    def pairs(self, length: float) -> float:
        """How many pairs of samples are multiplied, where the rows of the product have this length."""
        wide = self.outputs if self.kept == "full" else 1
        halved = self.symmetric and is_halved(self.rows * wide, length)
        # cutting costs a part of what it saves
        return self.rows * self.columns * (0.8 if halved else 1.0)

    @property
    def kernel(self) -> int:
        """How many numbers the kernel keeps of each pair of samples."""
        return {"full": self.outputs**2, "diagonal": self.outputs, "trace": 1}[self.kept]


def by_jacobian(block: Block, size: forms.Sizes) -> Cost:
    """Count one share in parameter space."""
    groups, positions, inputs, outputs, _ = size
    entries, many = size.entries, block.outputs
    # J of each sample: P outer products for each output, h and D read, J written and read
    form = Cost(
        2.0 * many * positions * entries,
        2.0 * many * entries + 2.0 * groups * positions * (inputs + many * outputs),
    )
    full = block.kept == "full"
    # <J, J'> of each pair of samples, for all pairs of outputs or for equal ones
    product = 2.0 * entries * (many**2 if full else many)
    return form * block.samples + Cost(product, 0.0) * block.pairs(entries)


def by_gram(block: Block, size: forms.Sizes) -> Cost:
    """Count one share in sample space."""
    groups, positions, inputs, outputs, windowed = size
    compared = windowed or inputs
    many, pairs = block.outputs, groups * positions**2
    multiplied = block.rows * block.columns
    # the factors of both sides are read once, and brought into another order where there are several positions
    read = groups * positions * (compared + many * outputs) * (block.rows + block.columns)
    copied = 2.0 * many * groups * positions * outputs * block.samples if groups * positions > 1 else 0.0
    passed = Cost(0.0, read + copied)
    # (h . h') and (D . D') of all pairs of positions, multiplied entry by entry
    if pairs == 1 or many == 1 or block.kept != "full":
        flops = 2.0 * pairs * (compared + outputs * (many**2 if block.kept == "full" else many))
        numbers = (
            2.0 * block.kernel if pairs == 1 else 3.0 * pairs * (many if block.kept == "diagonal" else 1)
        )
        return Cost(flops, numbers) * multiplied + passed
    # many outputs: E = (h h') D' first, then D E, as ``contraction`` does it
    flops = 2.0 * (pairs * (compared + many * outputs) + groups * positions * many**2 * outputs)
    # (h h') D', and h h' in another order
    numbers = 2.0 * groups * positions * (positions + many * outputs)
    return Cost(flops, numbers) * multiplied + passed
