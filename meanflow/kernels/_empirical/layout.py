"""How the structured method goes about a kernel: which contraction for which parameter, and how much at a time.

The shares of all parameters (``structured``) are computed from the trace in two steps: the network is differentiated,
``piece`` samples at a time, and what that leaves is contracted, ``rows`` rows of the kernel at a time. A layout fixes
both numbers and each share's contraction from counts alone (``cost``); nothing is computed or compiled.
"""

import math
from typing import NamedTuple

from meanflow.kernels._empirical import cost, structured
from meanflow.kernels._empirical.contraction import WHOLE, fitting
from meanflow.kernels._empirical.cost import Block, Cost, Passes


class Layout(NamedTuple):
    """How the structured method goes about a kernel.

    Attributes:
        shares: how each parameter's share is computed.
        rows: rows of the kernel contracted at a time.
        held: whether the factors of all columns are kept; otherwise they are made anew for every block of rows.
        piece: samples (for coupled functions: rows of outputs) differentiated at a time.
        cost: operations and numbers.
        bytes: peak memory, the kernel included.
    """

    shares: list[structured.Share]
    rows: int
    held: bool
    piece: int
    cost: Cost
    bytes: float


# Bytes that a few samples' cotangents may take where the network is differentiated in pieces: a part of the cache.
# Three convolutions of 64 channels take 1.19 times as long with a hundred times as much.
_PIECE = 2**21
# Bytes up to which a program runs in memory that the process holds already; above, every page is faulted in anew. Three
# convolutions take 1.45 times as long where J is never formed early.
_HELD = 2**25
# By how much the compiler's placing of buffers exceeds what must be alive at once.
_PLACING = 1.4


def free_layout(
    traced: structured.Traced, counted: Passes, block: Block, chunk: int | None, limit: int, cpu: bool = True
) -> Layout:
    """Lay out the kernel of samples that do not depend on each other; ``traced`` maps one sample.

    J may be formed *late*, by slices when it is contracted, from cotangents D that are kept of all samples, or *early*,
    for a few samples right after they are differentiated, after which their D is gone. Both take the same operations.
    Where J is not much larger than D, early takes less memory, and on a CPU less time, which there is spent on memory
    that leaves the cache. On accelerators (``cpu`` False) late is taken wherever all factors fit.
    """
    # a sixteenth of the limit for what passes while a piece is differentiated
    late = _lay_out(traced, counted, block, chunk, limit, limit / 16, early=False)
    # a loop over samples starts its kernels anew in every round: compiled for an H100, the kernel of a small CNN has 39
    # starts without the loop and 356 with it (tests/accelerators counts them)
    if not cpu and late.held and late.rows == block.rows:
        return late
    room = min(limit / 16, _PIECE if cpu else math.inf)
    early = _lay_out(traced, counted, block, chunk, limit, room, early=True)
    if not late.held or late.rows < block.rows:  # slices of J serve all rows and columns at once
        return early
    # a network whose parameters act at one position each forms no J: its layers are contracted one by one, in passing
    forms = any(s.mode == "jacobian" and s.sizes.positions > 1 for s in early.shares)
    return early if forms and late.bytes > max(early.bytes, _HELD) else late


def _lay_out(
    traced: structured.Traced,
    counted: Passes,
    block: Block,
    chunk: int | None,
    limit: int,
    room: float,
    early: bool,
) -> Layout:
    """Lay out with J formed early or late, and ``room`` bytes for what passes while a piece is differentiated."""
    itemsize, outputs = traced.output.dtype.itemsize, block.outputs

    # in parameter or in sample space, whichever is cheaper by count
    def choose(size: structured.forms.Sizes) -> str:
        if cost.by_gram(block, size).total < cost.by_jacobian(block, size).total:
            return "gram"
        # J takes less room than the cotangents that it is made of where there are more positions than inputs
        return "slices" if not early and size.inputs >= size.positions else "jacobian"

    shares = structured.shares(traced, choose)
    # How many samples are differentiated at a time. Cotangents reach the taps one after the other, and the compiler
    # uses the room in between again.
    stored = sum(_stored(traced, s, outputs) for s in shares)
    passing = counted.stored + outputs * (traced.taps + 2 * counted.largest) + stored
    piece = fitting(block.samples, room, itemsize * passing)
    # How many rows are contracted at a time, and whether the factors of all samples fit meanwhile.
    held = itemsize * stored * block.samples <= limit / 4
    row_bytes = (
        itemsize * block.columns * (max((_pairs(s, block) for s in shares), default=0) + 2 * block.kernel)
    )
    rows = chunk if chunk is not None else fitting(block.rows, limit / 32, row_bytes)
    if not held:
        # three blocks are alive at once, or two larger ones where blocks divide the kernel
        most = min(rows, fitting(block.rows, 3 * limit / 16, itemsize * stored))
        even = max(n for n in range(1, most + 1) if block.rows % n == 0)
        rows = min(rows, fitting(block.rows, limit / 8, itemsize * stored))
        rows = even if chunk is None and even >= rows else rows
    rows = min(rows, block.rows)
    piece = piece if held else min(piece, rows)
    rounds = 1.0 if held else 1.0 + math.ceil(block.rows / rows) * block.columns / block.samples
    # one forward and C backward passes a sample, again for every block of rows if the factors of columns are not held
    total = (counted.forward + counted.backward * outputs) * block.samples * rounds
    for share in shares:
        way = cost.by_jacobian if share.mode in ("jacobian", "slices") else cost.by_gram
        total = total + way(block, share.sizes)
    # a last block of fewer rows is a program of its own, for which the compiler keeps room
    left_over = block.rows % rows > 0 or block.columns % rows > 0
    samples = block.samples if held else (3 if left_over else 2) * rows
    kept = samples * (stored + max((_formed(s, outputs) for s in shares), default=0))
    if piece < samples:  # what a loop leaves is there whole
        alive = kept + piece * passing + _slice(shares, block)
    else:  # layer by layer: its cotangents, those that are pulled through it, its factors and a slice of its J
        alive = _PLACING * (kept + samples * 2 * outputs * counted.largest + _slice(shares, block))
    memory = itemsize * (block.rows * block.columns * block.kernel + alive) + rows * row_bytes
    return Layout(shares, rows, held, piece, total, memory)


def _slice(plan: list[structured.Share], block: Block) -> int:
    """Return how many numbers are formed at a time when factors are contracted: of J, or of (h h') D'."""
    many, most = block.outputs if block.kept == "full" else 1, 0
    for share in plan:
        groups, positions, inputs, width, _ = share.sizes
        if share.mode == "slices":
            most = max(most, block.samples * block.outputs * groups * inputs * width)
        elif share.mode == "gram" and many > 1 and positions > 1:
            most = max(most, block.samples * groups * positions * width * many)
    return min(most, WHOLE)


def _stored(traced: structured.Traced, share: structured.Share, outputs: int) -> int:
    """Return how many numbers are kept of one sample after its backward passes, for one share."""
    if share.mode == "jacobian":
        return outputs * share.sizes.entries
    sites = [traced.sites[n] for n in share.sites]
    return sum(math.prod(s.lengths) * s.partner + outputs * s.tap for s in sites)


def _formed(share: structured.Share, outputs: int) -> int:
    """Return how many numbers one share's factors take for one sample while they are contracted."""
    groups, positions, inputs, width, _ = share.sizes
    if share.mode == "jacobian" or groups * positions == 1:
        return 0
    return groups * positions * ((0 if share.mode == "rows" else inputs) + outputs * width)


def _pairs(share: structured.Share, block: Block) -> int:
    """Return the numbers that one share takes for a pair of samples while it is contracted."""
    groups, positions, *_ = share.sizes
    # a full kernel of several outputs is contracted one row at a time, whatever the chunk
    by_row = block.kept == "full" and block.outputs > 1
    if share.mode in ("jacobian", "slices") or groups * positions == 1 or by_row:
        return block.kernel
    return 2 * groups * positions**2 * (block.outputs if block.kept == "diagonal" else 1)


# Bytes of cotangents that are pulled back at a time through coupled samples: a part of the cache. Batch norm at 128
# samples takes 1.07 times as long with a sixteenth of it, 1.37 times with thirty times as much.
_PULLED = 2**25


def coupled_layout(
    traced: structured.Traced, counted: Passes, block: Block, chunk: int | None, limit: int
) -> Layout:
    """Lay out the kernel of samples that depend on each other; ``traced`` maps the whole batch x."""
    item, many = traced.output.dtype.itemsize, block.outputs
    rows, columns = block.rows * many, block.columns * many
    sides = rows if block.symmetric else rows + columns
    full = block.kept == "full"
    product = block.pairs(math.inf) * (many**2 if full else many)

    def ways(size: structured.forms.Sizes) -> dict[str, Cost]:
        entries, spread = size.entries, size.groups * size.positions * size.outputs
        # J of every row of outputs, each a sum over all positions of the batch, and then the products of rows
        jacobian = Cost(2.0 * entries * (sides * size.positions + product), 3.0 * sides * entries)
        # h h' once for the whole batch, its product with the D of all columns, and then the products of rows
        inner = size.groups * size.positions**2 * (size.inputs + columns * size.outputs)
        return {"jacobian": jacobian, "gram": Cost(2.0 * (inner + product * spread), 3.0 * sides * spread)}

    def choose(size: structured.forms.Sizes) -> str:
        # D of all rows, its slice and its product with h h' are alive at once
        fits = 3 * item * sides * size.groups * size.positions * size.outputs <= limit / 4
        both = ways(size)
        return "gram" if fits and both["gram"].total < both["jacobian"].total else "jacobian"

    plan = structured.shares(traced, choose)
    entries = sum(math.prod(traced.leaves[i].shape) for i in traced.used)
    row = item * many * (2 * traced.taps + counted.stored / 2 + entries)
    piece = chunk if chunk is not None else fitting(block.rows, min(limit / 8, _PULLED), row)
    piece = min(piece, block.rows)
    total, stored = counted.forward + counted.backward * sides, 0
    for share in plan:
        mode, size = "jacobian" if share.mode == "jacobian" else "gram", share.sizes
        total = total + ways(size)[mode]
        stored += sides * size.groups * size.outputs * (size.inputs if mode == "jacobian" else size.positions)
    kernel = block.rows * block.columns * block.kernel * (2 if full else 1)
    memory = item * (kernel + stored + 2 * counted.stored) + piece * row
    return Layout(plan, block.rows, True, piece, total, memory)
