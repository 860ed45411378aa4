"""From each parameter's factors at all samples to the kernel of all pairs of samples."""

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, PyTree

from meanflow.kernels._empirical.forms import Windowed, windowed_products

HIGH = jax.lax.Precision.HIGHEST


class Jacobian(NamedTuple):
    """One parameter's gradients at T samples, for C outputs each."""

    value: Float[Array, "T C M"]


class Gram(NamedTuple):
    """One parameter's factors at T samples: J[g, k, o] = sum_p h[g, p, k] D[g, p, o], contracted without J."""

    activation: Float[Array, "T G P K"] | Windowed
    cotangent: Float[Array, "T C G P O"]


class Slices(NamedTuple):
    """The same factors, of which J is formed when it is contracted; for a few o at a time if it exceeds the cache."""

    activation: Float[Array, "T G P K"]
    cotangent: Float[Array, "T C G P O"]


class Rows(NamedTuple):
    """The factors of a table whose rows are looked up: J[k, o] = sum_p [row_p = k] D[p, o]."""

    looked: Int[Array, "T P"]
    cotangent: Float[Array, "T C 1 P O"]


class Coupled(NamedTuple):
    """The factors of one parameter where samples depend on each other, so that positions run over all samples.

    J[t, g, k, o] = sum_p h[g, p, k] D[t, g, p, o]; h is the same for all t.
    """

    activation: Float[Array, "G P K"] | Int[Array, " P"]  # the rows that are looked up, for a table
    cotangent: Float[Array, "T C G O P"]


Factor: TypeAlias = Jacobian | Gram | Slices | Rows | Coupled

# A block of the kernel: which part of the rows, and which of the columns.
Pair: TypeAlias = tuple[int, int]


def by_pieces(function: Callable[[Any], Any], tree: PyTree, size: int) -> PyTree:
    """Apply a function to ``size`` entries of the leading axis at a time, and put the results together.

    >>> by_pieces(lambda a: 2 * a, jnp.arange(5), 2).tolist()
    [0, 2, 4, 6, 8]
    """
    count = jax.tree.leaves(tree)[0].shape[0]
    if size >= count:
        return function(tree)
    whole = count // size
    # a loop over full pieces; what is left over runs once more, as a program of its own size
    head = jax.tree.map(lambda a: a[: whole * size].reshape((whole, size) + a.shape[1:]), tree)
    out = jax.tree.map(lambda a: a.reshape((whole * size,) + a.shape[2:]), jax.lax.map(function, head))
    if whole * size == count:
        return out
    rest = function(jax.tree.map(lambda a: a[whole * size :], tree))
    return jax.tree.map(lambda a, b: jnp.concatenate([a, b]), out, rest)


def fitting(most: int, limit: float, one: float) -> int:
    """Return how many things of size ``one`` fit, at least one and at most ``most``, in even parts of ``most``."""
    parts = math.ceil(most / max(1, min(most, int(limit / max(one, 1.0)))))
    return math.ceil(most / parts)


def blocks(rows: int, wide: int, length: float) -> int:
    """Return into how many blocks of rows a symmetric kernel is cut, of which those above the diagonal are reflected.

    Args:
        rows: of the kernel.
        wide: how many rows of the product belong to each of them.
        length: of the rows of the product; blocks of few or short rows multiply at a lower speed.

    >>> blocks(32, 1, 5000), blocks(32, 10, 5000), blocks(128, 10, 5000), blocks(128, 10, 512)
    (1, 2, 4, 1)
    """
    # Ten products compile longer than one. With 1280 rows of length 512 (dense and layer norm, 10 outputs) cutting took
    # 1.2 times as long, and 2.5 times in the first call; with 3200 it takes 0.9 times as long (dense, 100 outputs), and
    # with 320 of length 4096 it takes 0.85 times as long (transformer).
    if rows * wide < (2048 if length <= 1024 else 256):
        return 1
    return 2 if rows * wide < 1024 else 4


def _cut(factor: Factor, outputs: str) -> int:
    """Return into how many blocks one parameter's share of a symmetric kernel is cut."""
    held = factor.value if isinstance(factor, Jacobian) else factor.cotangent
    positions = held.shape[3] if isinstance(factor, Gram | Rows) else 1
    length: float = math.inf
    if isinstance(factor, Jacobian) or (isinstance(factor, Gram) and held.shape[2:4] == (1, 1)):
        length = held.shape[-1]
    return blocks(held.shape[0], positions * (held.shape[1] if outputs == "full" else 1), length)


def all_pairs(
    left: Sequence[Factor], right: Sequence[Factor], outputs: str, rows: int, symmetric: bool
) -> Float[Array, "T S ..."]:
    """Contract all rows with all columns, ``rows`` at a time; a symmetric kernel by half where that is faster."""
    held = left[0].value if isinstance(left[0], Jacobian) else left[0].cotangent
    count = held.shape[0]
    if not symmetric or rows < count:
        return by_pieces(lambda some: contract(some, right, outputs), left, rows)
    # parameters with rows of other widths are cut into other numbers of blocks, each kind at once
    groups: dict[int, list[Factor]] = {}
    for factor in left:
        groups.setdefault(_cut(factor, outputs), []).append(factor)
    total = []
    for cut, some in sorted(groups.items()):
        parts = [[_part(a, *span) for a in some] for span in spans(count, cut)]
        total.append(pairs_of_blocks(parts, outputs))
    return sum(total[1:], total[0])


def _part(factor: Factor, start: int, stop: int) -> Factor:
    """Return the factors of some samples."""
    if isinstance(factor, Coupled):  # whose h is that of all samples
        return factor._replace(cotangent=factor.cotangent[start:stop])
    return jax.tree.map(lambda a: a[start:stop], factor)


def spans(rows: int, count: int) -> list[tuple[int, int]]:
    """Return where each of ``count`` blocks of rows begins and ends.

    >>> spans(10, 4)
    [(0, 2), (2, 5), (5, 7), (7, 10)]
    """
    return [(rows * i // count, rows * (i + 1) // count) for i in range(count)]


def pairs_of_blocks(parts: Sequence[Sequence[Factor]], outputs: str) -> Float[Array, "T T ..."]:
    """Contract a symmetric kernel from the factors of each block of its rows; blocks above the diagonal are reflected.

    The factors of a block are arrays of their own. Cut out of larger ones for every product anew, they would cost more
    than half of what reflecting saves.
    """
    pairs = [(i, j) for i in range(len(parts)) for j in range(i + 1)]
    below = dict(zip(pairs, _contract_pairs(parts, parts, outputs, pairs), strict=True))
    mirror = {"full": (1, 0, 3, 2), "diagonal": (1, 0, 2), "trace": (1, 0)}[outputs]
    block = lambda i, j: below[i, j] if j <= i else jnp.transpose(below[j, i], mirror)
    each = range(len(parts))
    return jnp.concatenate([jnp.concatenate([block(i, j) for j in each], axis=1) for i in each])


def contract(left: Sequence[Factor], right: Sequence[Factor], outputs: str) -> Float[Array, "T S ..."]:
    """Sum all shares: (T, S, C, C) for "full", (T, S, C) for "diagonal", (T, S) for "trace"."""
    return _contract_pairs([left], [right], outputs, [(0, 0)])[0]


def _contract_pairs(
    left: Sequence[Sequence[Factor]], right: Sequence[Sequence[Factor]], outputs: str, pairs: Sequence[Pair]
) -> list[Float[Array, "t s ..."]]:
    """Sum all shares in these blocks of the kernel, from the factors of each part of its rows and columns."""
    sides = zip(zip(*left, strict=True), zip(*right, strict=True), strict=True)
    shares = [_contract_one(mine, theirs, outputs, pairs) for mine, theirs in sides]
    # the axes of samples in front: (T, C, S, C) and (C, T, S) as ``_contract_one`` has them
    order = {"full": (0, 2, 1, 3), "diagonal": (1, 2, 0), "trace": (0, 1)}[outputs]
    return [jnp.transpose(sum(terms[1:], terms[0]), order) for terms in zip(*shares, strict=True)]


def _contract_one(
    left: Sequence[Any], right: Sequence[Any], outputs: str, pairs: Sequence[Pair]
) -> list[Array]:
    """Return one share in these blocks, each as (T, C, S, C), (C, T, S) or (T, S)."""
    if isinstance(left[0], Slices):
        return _contract_slices(left, right, outputs, pairs)
    if isinstance(left[0], Coupled):
        return _contract_coupled(left, right, outputs, pairs)
    if isinstance(left[0], Jacobian):
        return [_features(left[i].value, right[j].value, outputs) for i, j in pairs]
    return [_contract_grams(left[i], right[j], outputs) for i, j in pairs]


def _features(left: Float[Array, "T C M"], right: Float[Array, "S C M"], outputs: str) -> Array:
    """Return the inner products of features as (T, C, S, C), (C, T, S) or (T, S).

    Matrices are products' fastest form: contracting several axes at once takes up to three times as long on a CPU.
    """
    if outputs == "diagonal":
        return jnp.einsum("tcm,scm->cts", left, right, precision=HIGH)
    # "trace": the sum over c is a part of the product
    flat = lambda a: a.reshape(-1, a.shape[2]) if outputs == "full" else a.reshape(a.shape[0], -1)
    product = jnp.matmul(flat(left), flat(right).T, precision=HIGH)
    return product.reshape(left.shape[:2] + right.shape[:2]) if outputs == "full" else product


# Numbers of J up to which it is formed at once, and those that are formed at a time above: a small part of the cache.
# The full kernel of a transformer took 1.08 times as long with a quarter of both, 1.13 times with four times as much.
WHOLE, _SLICE = 2**22, 2**20


def slice_width(rows: int, columns: int, shape: tuple[int, ...], inputs: int, outputs: str) -> int:
    """Return for how many o at a time J is formed: a divisor of their number, which is all of them where J is small.

    Args:
        rows, columns: numbers of samples on both sides.
        shape: of one sample's cotangents (C, G, P, O).
        inputs: K.
        outputs: which outputs are kept.

    >>> slice_width(64, 64, (10, 1, 20, 128), 128, "trace")
    8
    """
    many, groups, _, width = shape
    kept = {"full": many**2, "diagonal": many, "trace": 1}[outputs]
    # every slice adds to the whole kernel, which must not cost more than the slice itself
    numbers = max(_SLICE, 2 * rows * columns * kept)
    column = max(rows, columns) * many * groups * inputs
    if column * width <= WHOLE:
        return width
    most = max(1, numbers // column)
    return max(b for b in range(1, min(most, width) + 1) if width % b == 0)


def _contract_slices(
    left: Sequence[Slices], right: Sequence[Slices], outputs: str, pairs: Sequence[Pair]
) -> list[Array]:
    """Add up the kernel over slices of J."""
    rows, columns = (sum(a.cotangent.shape[0] for a in side) for side in (left, right))
    step = slice_width(rows, columns, left[0].cotangent.shape[1:], left[0].activation.shape[-1], outputs)

    def cut(factor: Slices) -> Array:
        """Return D (T, C, G, P, O) as (slices, T, G, C and o, P)."""
        count, many, groups, positions, width = factor.cotangent.shape
        parts = factor.cotangent.reshape(count, many, groups, positions, width // step, step)
        moved = jnp.transpose(parts, (4, 0, 2, 1, 5, 3))
        return moved.reshape(width // step, count, groups, many * step, positions)

    def form(cotangent: Array, factor: Slices) -> Float[Array, "T C M"]:
        """Return a slice of J, J[g, c o, k] = sum_p D[g, c o, p] h[g, p, k], with M = (g, o, k)."""
        product = jnp.matmul(cotangent, factor.activation, precision=HIGH)
        (count, groups, _, inputs), many = product.shape, factor.cotangent.shape[1]
        split = jnp.swapaxes(product.reshape(count, groups, many, step * inputs), 1, 2)
        return split.reshape(count, many, groups * step * inputs)

    same = all(a is b for a, b in zip(left, right, strict=False))
    sides = [left] if same else [left, right]

    def multiply(cuts: list[list[Array]]) -> list[Array]:
        formed = [[form(d, a) for d, a in zip(*both, strict=True)] for both in zip(cuts, sides, strict=True)]
        return [_features(formed[0][i], formed[-1][j], outputs) for i, j in pairs]

    cuts = [[cut(a) for a in side] for side in sides]
    return _added(multiply, cuts, left[0].cotangent.shape[4] // step)


def _added(multiply: Callable[[Any], list[Array]], over: PyTree, count: int) -> list[Array]:
    """Add up what a function returns for each of ``count`` entries along the leading axes of ``over``."""
    first = jax.tree.map(lambda a: a[0], over)
    if count == 1:
        return multiply(first)
    start = [jnp.zeros(s.shape, s.dtype) for s in jax.eval_shape(multiply, first)]
    add = lambda total, some: (jax.tree.map(jnp.add, total, multiply(some)), None)
    return jax.lax.scan(add, start, over)[0]


def _contract_grams(left: Gram | Rows, right: Gram | Rows, outputs: str) -> Array:
    """Return sum over g, p, q of (h_gp . h'_gq) (D_gp . D'_gq)."""
    d, e = left.cotangent, right.cotangent  # (T, C, G, P, O), (S, C, G, Q, O)
    groups, positions = d.shape[2], d.shape[3] * e.shape[3]
    h, other = (f.activation if isinstance(f, Gram) else None for f in (left, right))
    if groups * positions == 1 and isinstance(h, Array) and isinstance(other, Array):
        # one position: the kernel is the elementwise product of two Gram matrices, (h . h') (D . D')
        inner = jnp.einsum("tk,sk->ts", h[:, 0, 0], other[:, 0, 0], precision=HIGH)
        outer = _features(d[:, :, 0, 0], e[:, :, 0, 0], outputs)
        return outer * (inner[:, None, :, None] if outputs == "full" else inner[(None,) * (outer.ndim - 2)])
    if outputs == "full" and d.shape[1] > 1:
        return _contract_outputs(left, right)
    # all pairs of positions of all pairs of samples at once; the plan has counted that they fit
    inner = jax.vmap(lambda a: _inner_products(a, right), out_axes=1)(left)  # (g, t, p, s, q)
    if outputs == "diagonal":
        outer = jnp.einsum("tcgpo,scgqo->cgtpsq", d, e, precision=HIGH)
        return jnp.sum(outer * inner[None], axis=(1, 3, 5))
    outer = jnp.einsum("tcgpo,scgqo->gtpsq", d, e, precision=HIGH)
    total = jnp.sum(outer * inner, axis=(0, 2, 4))
    return total[:, None, :, None] if outputs == "full" else total


def _contract_outputs(left: Gram | Rows, right: Gram | Rows) -> Float[Array, "T C S C"]:
    """Return sum over g, p, q of (h_gp . h'_gq) (D_gp . D'_gq) for all pairs of many outputs.

    With many outputs E_p = sum over q of (h_gp . h'_gq) D'_gq is smaller than D D'. For one row of the kernel at a time
    E has (o, p) as its last axes, so that it falls out of one product of matrices as it enters the next.
    """
    _, many, groups, positions, width = left.cotangent.shape
    # for how many columns E, and for how many rows h h', is formed at a time
    most = fitting(right.cotangent.shape[0], WHOLE, many * groups * positions * width)
    some = fitting(left.cotangent.shape[0], _SLICE, most * groups * positions * right.cotangent.shape[3])
    turn = lambda d: jnp.transpose(d, (0, 2, 1, 4, 3))  # (T, G, C, O, P)

    def columns(theirs: tuple[Gram | Rows, Array]) -> Float[Array, "S T C C"]:
        other, turned = theirs
        count, *_, there = turned.shape
        # D' with its columns (s, c, o) side by side, ready to be multiplied by h h' over q
        spread = jnp.moveaxis(turned, 1, 0).reshape(groups, count, many * width, there)

        def row(mine: tuple[Array, Array]) -> Float[Array, "S C C"]:
            inner, cotangent = mine
            # E[s c o, p] = sum_q D'[s c o, q] (h_q' . h_p), and then D E' over (o, p)
            e = jnp.matmul(spread, inner, precision=HIGH).reshape(groups, count * many, -1)
            each = jnp.matmul(e, jnp.swapaxes(cotangent.reshape(groups, many, -1), 1, 2), precision=HIGH)
            return jnp.sum(each, axis=0).reshape(count, many, many)

        def rows(mine: tuple[Gram | Rows, Array]) -> Float[Array, "T S C C"]:
            inner = jax.vmap(lambda one: _inner_products(one, other))(mine[0])
            return jax.lax.map(row, (jnp.transpose(inner, (0, 1, 3, 4, 2)), mine[1]))

        return jnp.swapaxes(by_pieces(rows, (left, turn(left.cotangent)), some), 0, 1)

    found = by_pieces(columns, (right, turn(right.cotangent)), most)
    return jnp.transpose(found, (1, 3, 0, 2))


def _inner_products(one: Any, many: Any) -> Float[Array, "G P S Q"]:
    """Return h_gp . h'_gq of one sample with many; equality of rows for a table."""
    if isinstance(one, Rows):
        same = one.looked[:, None, None] == many.looked[None]
        return same[None].astype(one.cotangent.dtype)
    if isinstance(one.activation, Windowed):
        return windowed_products(one.activation, many.activation)
    return jnp.einsum("gpk,sgqk->gpsq", one.activation, many.activation, precision=HIGH)


def _contract_coupled(
    left: Sequence[Coupled], right: Sequence[Coupled], outputs: str, pairs: Sequence[Pair]
) -> list[Array]:
    """Add up <D, (h h') D'> over slices of o."""
    h, other = left[0].activation, right[0].activation  # those of all samples, in every part
    if h.ndim == 1:
        # rows of a table have the inner product 1 with themselves and 0 with others
        inner = (h[:, None] == other[None]).astype(left[0].cotangent.dtype)[None]
    else:
        inner = jnp.einsum("gpk,gqk->gpq", h, other, precision=HIGH)
    _, many, groups, width, positions = left[0].cotangent.shape
    rows, columns = (sum(a.cotangent.shape[0] for a in side) for side in (left, right))
    step = slice_width(rows, columns, (many, groups, positions, width), positions, outputs)
    flat = lambda a: a.reshape(a.shape[:2] + (-1,))

    def multiply(start: Array) -> list[Array]:
        slice_of = lambda a: jax.lax.dynamic_slice_in_dim(a.cotangent, start, step, 3)
        mine = [flat(slice_of(a)) for a in left]
        theirs = [flat(spread(slice_of(a))) for a in right]
        return [_features(mine[i], theirs[j], outputs) for i, j in pairs]

    def spread(some: Array) -> Array:
        moved = jnp.moveaxis(some, 2, 0)  # (G, S, C, o, Q), whose product with h h' is one of matrices
        product = jnp.matmul(
            moved.reshape(groups, -1, moved.shape[-1]), jnp.swapaxes(inner, 1, 2), precision=HIGH
        )
        return jnp.moveaxis(product.reshape(moved.shape[:-1] + (positions,)), 0, 2)

    return _added(multiply, jnp.arange(0, width, step), width // step)
