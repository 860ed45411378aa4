"""What a compiled program will do, read from its final HLO: kernels, loops, bytes, operations, collectives.

``jax.stages.Compiled.as_text()`` prints the program after all optimizations, with one line for each instruction. Every
instruction outside of a fusion is something the device has to start: a kernel, a copy, a call of a library. Loops with
a known number of rounds are multiplied out. What is counted is the program, not a run of it: nothing here is a time.
"""

import functools
import math
import re
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

BYTES = {
    "pred": 1,
    "s4": 1,
    "u4": 1,
    "s8": 1,
    "u8": 1,
    "bf16": 2,
    "f16": 2,
    "s16": 2,
    "u16": 2,
    "s32": 4,
    "u32": 4,
}
BYTES |= {"f32": 4, "s64": 8, "u64": 8, "f64": 8, "c64": 8, "c128": 16}
# what needs no work on the device: names, views of memory, and what only holds other computations
FREE = frozenset(
    re.findall(
        r"\S+",
        """parameter constant tuple get-tuple-element bitcast while conditional call after-all partition-id replica-id
        add-dependency opt-barrier copy-done async-start async-update async-done all-reduce-done all-gather-done
        collective-permute-done send-done recv-done slice-done""",
    )
)
# what moves numbers without computing any
MOVES = FREE | frozenset(
    re.findall(
        r"\S+",
        """broadcast iota transpose slice dynamic-slice dynamic-update-slice reshape concatenate pad gather copy
        copy-start reverse fusion convert custom-call""",
    )
)
COLLECTIVES = (
    "all-reduce",
    "all-gather",
    "all-to-all",
    "collective-permute",
    "reduce-scatter",
    "collective-broadcast",
)
TINY = 3  # a loop whose body has at most this many kernels mostly waits for their start

_ARRAY = re.compile(r"([a-z]+[0-9]*)\[([0-9,]*)\](?:\{([0-9,]*)(?::T\(([0-9,]+)\))?)?")
_CALLED = re.compile(r"(?:calls|to_apply|body|condition|true_computation|false_computation)=%([\w.\-]+)")
_BRANCHES = re.compile(r"(?:branch_computations|called_computations)=\{([^}]*)\}")
_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"\}')


class Instruction(NamedTuple):
    """One line of a program.

    Attributes:
        name, shape, opcode: of the instruction; the shape as HLO writes it, with layout.
        operands: names of the instructions whose results it takes.
        attributes: the rest of the line.
    """

    name: str
    shape: str
    opcode: str
    operands: tuple[str, ...]
    attributes: str

    @property
    def called(self) -> list[str]:
        """Names of the computations that this instruction runs or applies."""
        names = _CALLED.findall(self.attributes)
        for group in _BRANCHES.findall(self.attributes):
            names += [name.strip().lstrip("%") for name in group.split(",")]
        return names


class Work(NamedTuple):
    """What one run of a program, or one round of a loop, asks of the device.

    Attributes:
        kernels: how many kernels, copies and calls of libraries are started; a loop of unknown length counts once.
        collectives: how many of them talk to other devices.
        traffic: bytes that they read and write together; what stays in a cache is counted as well.
        flops: additions, multiplications and evaluations of functions.
        products: those in matrix products and convolutions.
    """

    kernels: int
    collectives: int
    traffic: int
    flops: int
    products: int


class Loop(NamedTuple):
    """A loop of a compiled program.

    Attributes:
        trips: number of rounds, or None where the compiler does not know it: the host then looks after each round.
        rounds: rounds in a whole run, those of the loops around it multiplied; an unknown number counts as one.
        work: of one round, inner loops included.
    """

    trips: int | None
    rounds: int
    work: Work


class Program:
    """A compiled program by its computations.

    >>> text = '''
    ... %double (p: f32[8]) -> f32[8] {
    ...   %p = f32[8]{0} parameter(0)
    ...   ROOT %sum = f32[8]{0} add(%p, %p)
    ... }
    ... ENTRY %main (x: f32[8]) -> f32[8] {
    ...   %x = f32[8]{0} parameter(0)
    ...   ROOT %out = f32[8]{0} fusion(%x), kind=kLoop, calls=%double
    ... }'''
    >>> program = Program(text)
    >>> program.work
    Work(kernels=1, collectives=0, traffic=64, flops=8, products=0)
    """

    def __init__(self, text: str) -> None:
        self.text = text
        self.computations: dict[str, dict[str, Instruction]] = {}
        self.roots: dict[str, str] = {}
        self.entry = ""
        current = ""
        for line in text.splitlines():
            head = re.match(r"(ENTRY )?%?([\w.\-]+) \(.*\) -> .*\{$", line)
            if head:
                current = head.group(2)
                self.computations[current] = {}
                self.entry = current if head.group(1) else self.entry
            elif current and " = " in line:
                one = _instruction(line)
                self.computations[current][one.name] = one
                if line.lstrip().startswith("ROOT"):
                    self.roots[current] = one.name

    @functools.cached_property
    def loops(self) -> list[Loop]:
        """All loops of the program, outer ones before those inside of them."""
        found: list[Loop] = []
        waiting = [(self.entry, 1)]
        while waiting:
            name, times = waiting.pop(0)
            for one, runs, _ in self._runs(name):
                rounds = times
                if one.opcode == "while":
                    trips = self._trips(one)
                    rounds = times * (trips or 1)
                    found.append(Loop(trips, rounds, self._work(*runs)))
                waiting += [(run, rounds) for run in runs]
        return found

    def step_loop(self, steps: int) -> Loop:
        """Return the outermost loop that has at least ``steps`` rounds in a run: the loop over the steps of a run."""
        return next(loop for loop in self.loops if loop.rounds >= steps)

    @property
    def tiny_loops(self) -> list[Loop]:
        """Loops whose body has so few kernels that each round mostly waits for them to start."""
        return [loop for loop in self.loops if loop.work.kernels <= TINY]

    @functools.cached_property
    def work(self) -> Work:
        """What a run of the whole program asks of the device."""
        return self._work(self.entry)

    def _work(self, *computations: str) -> Work:
        return Work(
            sum(self._launches(name) for name in computations),
            sum(self._launches(name, COLLECTIVES) for name in computations),
            sum(self._traffic(name) for name in computations),
            sum(self._flops(name, False) for name in computations),
            sum(self._flops(name, True) for name in computations),
        )

    @property
    def largest(self) -> tuple[int, str]:
        """Bytes and shape of the largest array that a kernel writes, padding of its layout included."""
        arrays = [
            (size, text)
            for name in self._outside_of_fusions()
            for one in self.computations[name].values()
            if one.opcode not in FREE
            for size, text in _arrays(one.shape)
        ]
        return max(arrays, default=(0, ""))

    @property
    def padded(self) -> list[str]:
        """Shapes of written arrays of at least 1 MB whose layout pads them to more than four times their size."""
        found = {
            text
            for name in self._outside_of_fusions()
            for one in self.computations[name].values()
            if one.opcode not in FREE
            for size, text in _arrays(one.shape)
            if size > 2**20 and size > 4 * array_bytes(text)
        }
        return sorted(found)

    @property
    def callbacks(self) -> list[str]:
        """Targets of calls that go back to the host."""
        targets = re.findall(r'custom_call_target="([^"]*)"', self.text)
        return sorted({t for t in targets if "callback" in t})

    def types(self) -> set[str]:
        """Return the types of all numbers in the program."""
        return {kind for kind, *_ in _ARRAY.findall(self.text) if kind in BYTES}

    def launched(self, opcode: str) -> list[Instruction]:
        """Return the instructions of a kind that stand outside of fusions."""
        return [
            one
            for name in self._outside_of_fusions()
            for one in self.computations[name].values()
            if one.opcode == opcode
        ]

    @functools.cached_property
    def _executed(self) -> dict[str, None]:
        seen: dict[str, None] = {}
        waiting = [self.entry]
        while waiting:
            name = waiting.pop()
            if name in seen or name not in self.computations:
                continue
            seen[name] = None
            for one in self.computations[name].values():
                if one.opcode in ("while", "conditional", "call", "async-start"):
                    waiting += one.called
        return seen

    def _outside_of_fusions(self) -> list[str]:
        return list(self._executed)

    def _runs(self, computation: str) -> Iterator[tuple[Instruction, list[str], int]]:
        """Yield each instruction with the computations it runs and how often."""
        for one in self.computations.get(computation, {}).values():
            if one.opcode == "while":
                trips = self._trips(one)
                # the condition is looked at only where the number of rounds is not known
                parts = ("body",) if trips else ("body", "condition")
                yield one, [_named(part, one.attributes) for part in parts], trips or 1
            else:
                yield one, one.called if one.opcode in ("conditional", "call", "async-start") else [], 1

    def _trips(self, loop: Instruction) -> int | None:
        """Return the number of rounds of a loop that counts from 0 to a constant; None for other loops."""
        known = _TRIPS.search(loop.attributes)
        if known:
            return int(known.group(1))
        condition = _named("condition", loop.attributes)
        inside = self.computations.get(condition, {})
        root = inside.get(self.roots.get(condition, ""))
        if root is None or root.opcode != "compare" or "direction=LT" not in root.attributes:
            return None
        end = inside.get(root.operands[1])
        return int(end.attributes) if end is not None and end.opcode == "constant" else None

    @functools.cache  # noqa: B019  a program lives as long as its numbers are asked for
    def _launches(self, computation: str, kinds: tuple[str, ...] | None = None) -> int:
        total = 0
        for one, runs, times in self._runs(computation):
            is_kernel = _is_kernel(one) if kinds is None else one.opcode.removesuffix("-start") in kinds
            total += is_kernel + times * sum(self._launches(name, kinds) for name in runs)
        return total

    @functools.cache  # noqa: B019
    def _flops(self, computation: str, products: bool) -> int:
        total = 0
        for one, runs, times in self._runs(computation):
            inside = one.called if one.opcode == "fusion" else runs
            total += times * sum(self._flops(name, products) for name in inside)
            product = self._product_flops(computation, one)
            if product or products:
                total += product
            elif one.opcode in ("reduce", "scatter", "reduce-window", "sort", "select-and-scatter"):
                total += max((_elements(self._shape(computation, u)) for u in one.operands), default=0)
            elif one.opcode not in MOVES:
                total += _elements(one.shape)
        return total

    @functools.cache  # noqa: B019
    def _traffic(self, computation: str) -> int:
        total = 0
        for one, runs, times in self._runs(computation):
            total += times * sum(self._traffic(name) for name in runs)
            if one.opcode not in FREE:
                total += self._written(computation, one) + self._read(computation, one)
        return total

    def _shape(self, computation: str, name: str) -> str:
        found = self.computations[computation].get(name)
        return found.shape if found else ""

    def _written(self, computation: str, one: Instruction) -> int:
        updates = [one] if one.opcode == "dynamic-update-slice" else []
        place = computation
        if one.opcode == "fusion" and one.called:
            place = one.called[0]
            updates = [
                u for u in self.computations.get(place, {}).values() if u.opcode == "dynamic-update-slice"
            ]
        if updates:  # in place: only the slice is written
            whole = sum(array_bytes(u.shape) for u in updates)
            slices = sum(array_bytes(self._shape(place, u.operands[1])) for u in updates)
            return max(array_bytes(one.shape) - whole, 0) + slices
        return array_bytes(one.shape)

    def _read(self, computation: str, one: Instruction) -> int:
        """Return the bytes of the operands; of one that is only sliced, the bytes of the slices."""
        sizes = [array_bytes(self._shape(computation, u)) for u in one.operands]
        if one.opcode in ("dynamic-slice", "gather", "slice"):
            return min(sum(sizes), 2 * array_bytes(one.shape))
        if one.opcode == "dynamic-update-slice":
            return array_bytes(self._shape(computation, one.operands[1]))
        if one.opcode != "fusion" or not one.called:
            return sum(sizes)
        inside = self.computations.get(one.called[0], {})
        parameters = {
            int(number.group(1)): u.name
            for u in inside.values()
            if u.opcode == "parameter" and (number := re.match(r"(\d+)", u.attributes))
        }
        total = 0
        for place, size in enumerate(sizes):
            users = [u for u in inside.values() if parameters.get(place) in u.operands]
            sliced = 0
            for user in users:
                first = user.operands[0] == parameters.get(place)
                if first and user.opcode in ("dynamic-slice", "slice", "gather"):
                    sliced += array_bytes(user.shape)
                elif not (first and user.opcode == "dynamic-update-slice"):
                    sliced = size
                    break
            total += min(sliced, size)
        return total

    def _product_flops(self, computation: str, one: Instruction) -> int:
        """Return twice the multiplications of a matrix product or convolution, and 0 for anything else."""
        if one.opcode not in ("dot", "convolution", "custom-call"):
            return 0
        shapes = [_dimensions(self._shape(computation, u)) for u in one.operands]
        result = _dimensions(one.shape)
        if one.opcode == "convolution" or "__cudnn$conv" in one.attributes:
            labels = re.search(r"dim_labels=(\w+)_(\w+)->(\w+)", one.attributes)
            if labels is None:
                return 0
            inputs, kernel, outputs = (
                dict(zip(names, sizes, strict=False))
                for names, sizes in zip(labels.groups(), (*shapes[:2], result), strict=True)
            )
            axes = sorted(axis for axis in kernel if axis.isdigit())
            windows = _window(one.attributes, len(axes))
            pairs = [
                _multiplications(inputs[axis], kernel[axis], outputs[axis], *windows[int(axis)])
                for axis in axes
            ]
            return 2 * outputs["b"] * outputs["f"] * kernel["i"] * math.prod(pairs)
        contracted = re.search(r"lhs_contracting_dim(?:s=\{|ensions\":\[)([^\]}]*)", one.attributes)
        if contracted is None or (one.opcode == "custom-call" and "__cublas" not in one.attributes):
            return 0
        axes = [int(axis) for axis in re.findall(r"\d+", contracted.group(1))]
        return 2 * math.prod(result) * math.prod(shapes[0][axis] for axis in axes)


def array_bytes(shape: str) -> int:
    """Return the bytes of the numbers in an array or tuple of arrays, without padding.

    >>> array_bytes("(f32[3,4]{1,0}, s32[])")
    52
    """
    return sum(
        BYTES[kind] * math.prod(map(int, filter(None, dims.split(","))))
        for kind, dims, *_ in _ARRAY.findall(shape)
        if kind in BYTES
    )


def _arrays(shape: str) -> Iterator[tuple[int, str]]:
    """Yield the bytes that each array occupies, with the padding of a tiled layout, and its shape."""
    for found in _ARRAY.finditer(shape):
        kind, dims, order, tile = found.groups()
        if kind not in BYTES:
            continue
        sizes = [int(u) for u in dims.split(",") if u]
        if tile and order:
            by_minor = [int(u) for u in order.split(",")]
            for axis, unit in zip(by_minor, reversed([int(u) for u in tile.split(",")]), strict=False):
                sizes[axis] = -(-sizes[axis] // unit) * unit
        yield BYTES[kind] * math.prod(sizes), found.group(0)


def _dimensions(shape: str) -> list[int]:
    """Return the dimensions of an array, or of the first one of a tuple."""
    found = _ARRAY.search(shape)
    return [int(u) for u in found.group(2).split(",") if u] if found else []


def _elements(shape: str) -> int:
    return math.prod(_dimensions(shape))


def _window(attributes: str, axes: int) -> list[tuple[int, int, int, int]]:
    """Return (stride, padding before, spread of the inputs, spread of the kernel) for each axis of a convolution."""

    def entry(word: str, default: str) -> list[str]:
        found = re.search(rf"window=\{{[^}}]*\b{word}=([0-9x_\-]+)", attributes)
        return found.group(1).split("x") if found else [default] * axes

    pads = [int(pad.split("_")[0]) for pad in entry("pad", "0_0")]
    strides, inner, outer = ([int(u) for u in entry(w, "1")] for w in ("stride", "lhs_dilate", "rhs_dilate"))
    return list(zip(strides, pads, inner, outer, strict=True))


def _multiplications(
    inputs: int, taps: int, outputs: int, stride: int, pad: int, spread: int, dilation: int
) -> int:
    """Return how many pairs of an output and a tap of the window meet an input, along one axis.

    Products with a batch are convolutions on a TPU whose windows are mostly outside of the inputs.

    >>> _multiplications(8, 3, 8, 1, 1, 1, 1), _multiplications(1, 32, 32, 1, 31, 1, 1)
    (22, 32)
    """
    place = np.arange(outputs)[:, None] * stride + np.arange(taps)[None, :] * dilation - pad
    return int(np.sum((place >= 0) & (place <= (inputs - 1) * spread) & (place % spread == 0)))


def _named(part: str, attributes: str) -> str:
    """Return the name of the computation that is the ``part`` (body, condition) of a loop."""
    found = re.search(rf"{part}=%([\w.\-]+)", attributes)
    return found.group(1) if found else ""


def _is_kernel(one: Instruction) -> bool:
    """Say whether the device has to start something; sums and comparisons of single numbers belong to the loop."""
    return one.opcode not in FREE and (
        bool(_dimensions(one.shape)) or one.opcode in ("fusion", "custom-call", "copy", "reduce", "dot")
    )


def _instruction(line: str) -> Instruction:
    name, _, rest = line.strip().removeprefix("ROOT ").partition(" = ")
    end = _closing(rest, 0) if rest.startswith("(") else rest.index(" ")
    shape, rest = rest[:end], rest[end:].lstrip()
    opcode, _, _ = rest.partition("(")
    close = _closing(rest, len(opcode))
    inside = rest[len(opcode) + 1 : close - 1]
    # the number of a parameter and the value of a constant stand where others have operands
    attributes = inside if opcode in ("parameter", "constant") else rest[close:]
    return Instruction(name.lstrip("%"), shape, opcode, tuple(re.findall(r"%([\w.\-]+)", inside)), attributes)


def _closing(text: str, start: int) -> int:
    """Return the place behind the bracket that closes the one at ``start``."""
    depth = 0
    for place in range(start, len(text)):
        depth += (text[place] == "(") - (text[place] == ")")
        if depth == 0:
            return place + 1
    return len(text)
