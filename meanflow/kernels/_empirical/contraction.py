"""From each parameter's factors at all samples to the kernel of all pairs of samples."""

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
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


def is_halved(rows: int, length: float) -> bool:
    """Tell whether the Gram matrix of so many rows, of this length each, is taken by half."""
    # Blocks of few or short rows multiply at a lower speed: with 1280 rows of length 512 (dense and layer norm, 10
    # outputs) blocks took 1.2 times as long as the whole, with 320 of length 4096 (transformer) 0.85 times as long.
    return rows >= 256 and length > 1024


def contract(
    left: Sequence[Factor], right: Sequence[Factor], outputs: str, rows: int | None = None
) -> Float[Array, "T S ..."]:
    """Sum all shares: (T, S, C, C) for "full", (T, S, C) for "diagonal", (T, S) for "trace".

    Args:
        left, right: the factors of each parameter at all rows and columns; the same list for a symmetric kernel.
        outputs: which outputs are kept.
        rows: how many are contracted at a time, default all.
    """
    if rows is not None and rows < _held(left[0]).shape[0]:
        return by_pieces(lambda some: contract(some, right, outputs), left, rows)
    shares = [_contract_one(mine, theirs, outputs) for mine, theirs in zip(left, right, strict=True)]
    # the axes of samples in front: (T, C, S, C) and (C, T, S) as ``_contract_one`` has them
    order = {"full": (0, 2, 1, 3), "diagonal": (1, 2, 0), "trace": (0, 1)}[outputs]
    return jnp.transpose(sum(shares[1:], shares[0]), order)


def _is_by_row(factor: Gram | Rows, outputs: str) -> bool:
    """Tell whether a full kernel of several outputs, and of a parameter of several positions, is made row by row."""
    _, many, groups, positions, _ = factor.cotangent.shape
    return outputs == "full" and many > 1 and groups * positions > 1


def _held(factor: Factor) -> Array:
    """Return the array of a factor whose leading axis is that of the samples."""
    return factor.value if isinstance(factor, Jacobian) else factor.cotangent


def _contract_one(left: Any, right: Any, outputs: str) -> Array:
    """Return one share as (T, C, S, C), (C, T, S) or (T, S)."""
    if isinstance(left, Jacobian):
        return _features(left.value, None if right is left else right.value, outputs)
    if isinstance(left, Slices):
        return _contract_slices(left, right, outputs)
    return (_contract_coupled if isinstance(left, Coupled) else _contract_grams)(left, right, outputs)


def _features(left: Float[Array, "T C M"], right: Float[Array, "S C M"] | None, outputs: str) -> Array:
    """Return the inner products of features, with themselves if ``right`` is None: (T, C, S, C), (C, T, S) or (T, S).

    Matrices are products' fastest form: contracting several axes at once takes up to three times as long on a CPU.
    """
    rows = {
        "full": lambda a: a.reshape(-1, a.shape[2]),
        "diagonal": lambda a: jnp.swapaxes(a, 0, 1),
        "trace": lambda a: a.reshape(a.shape[0], -1),  # the sum over c is a part of the product
    }[outputs]
    product = _rows_products(rows(left), None if right is None else rows(right))
    other = left if right is None else right
    return product.reshape(left.shape[:2] + other.shape[:2]) if outputs == "full" else product


def _rows_products(
    rows: Float[Array, "*c n M"], others: Float[Array, "*c k M"] | None
) -> Float[Array, "*c n k"]:
    """Return the products of rows with others, or with themselves: then a quarter of them are copies of another."""
    times = lambda a, b: jnp.matmul(a, jnp.swapaxes(b, -1, -2), precision=HIGH)
    if others is not None or not is_halved(*rows.shape[-2:]):
        return times(rows, rows if others is None else others)
    half = rows.shape[-2] // 2
    first, lower = times(rows[..., :half, :], rows[..., :half, :]), times(rows[..., half:, :], rows)
    upper = jnp.concatenate([first, jnp.swapaxes(lower[..., :half], -1, -2)], -1)
    return jnp.concatenate([upper, lower], -2)


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


def _contract_slices(left: Slices, right: Slices, outputs: str) -> Array:
    """Add up the kernel over slices of J, each formed once for both sides of a symmetric kernel."""
    sides = [left] if right is left else [left, right]
    rows, columns = len(left.cotangent), len(right.cotangent)
    width = left.cotangent.shape[4]
    step = slice_width(rows, columns, left.cotangent.shape[1:], left.activation.shape[-1], outputs)

    def cut(factor: Slices) -> Array:
        """Return D (T, C, G, P, O) as (slices, T, G, C and o, P)."""
        count, many, groups, positions, _ = factor.cotangent.shape
        parts = factor.cotangent.reshape(count, many, groups, positions, width // step, step)
        moved = jnp.transpose(parts, (4, 0, 2, 1, 5, 3))
        return moved.reshape(width // step, count, groups, many * step, positions)

    def form(cotangent: Array, factor: Slices) -> Float[Array, "T C M"]:
        """Return a slice of J, J[g, c o, k] = sum_p D[g, c o, p] h[g, p, k], with M = (g, o, k)."""
        product = jnp.matmul(cotangent, factor.activation, precision=HIGH)
        (count, groups, _, inputs), many = product.shape, factor.cotangent.shape[1]
        split = jnp.swapaxes(product.reshape(count, groups, many, step * inputs), 1, 2)
        return split.reshape(count, many, groups * step * inputs)

    def multiply(cuts: list[Array]) -> Array:
        formed = [form(d, side) for d, side in zip(cuts, sides, strict=True)]
        return _features(formed[0], formed[1] if len(sides) > 1 else None, outputs)

    return _added(multiply, [cut(side) for side in sides], width // step)


def _added(multiply: Callable[[Any], Array], over: PyTree, count: int) -> Array:
    """Add up what a function returns for each of ``count`` entries along the leading axes of ``over``."""
    first = jax.tree.map(lambda a: a[0], over)
    if count == 1:
        return multiply(first)
    shape = jax.eval_shape(multiply, first)
    add = lambda total, some: (total + multiply(some), None)
    return jax.lax.scan(add, jnp.zeros(shape.shape, shape.dtype), over)[0]


def _contract_grams(left: Gram | Rows, right: Gram | Rows, outputs: str) -> Array:
    """Return sum over g, p, q of (h_gp . h'_gq) (D_gp . D'_gq)."""
    d, e = left.cotangent, right.cotangent  # (T, C, G, P, O), (S, C, G, Q, O)
    groups, positions = d.shape[2], d.shape[3] * e.shape[3]
    h, other = (f.activation if isinstance(f, Gram) else None for f in (left, right))
    if groups * positions == 1 and isinstance(h, Array) and isinstance(other, Array):
        # one position: the kernel is the elementwise product of two Gram matrices, (h . h') (D . D')
        inner = jnp.einsum("tk,sk->ts", h[:, 0, 0], other[:, 0, 0], precision=HIGH)
        outer = _features(d[:, :, 0, 0], None if right is left else e[:, :, 0, 0], outputs)
        return outer * (inner[:, None, :, None] if outputs == "full" else inner[(None,) * (outer.ndim - 2)])
    if _is_by_row(left, outputs):
        return _contract_outputs(left, right) if right is not left else _by_blocks(left)
    # all pairs of positions of all pairs of samples at once; the plan has counted that they fit
    inner = jax.vmap(lambda a: _inner_products(a, right), out_axes=1)(left)  # (g, t, p, s, q)
    if outputs == "diagonal":
        outer = jnp.einsum("tcgpo,scgqo->cgtpsq", d, e, precision=HIGH)
        return jnp.sum(outer * inner[None], axis=(1, 3, 5))
    outer = jnp.einsum("tcgpo,scgqo->gtpsq", d, e, precision=HIGH)
    total = jnp.sum(outer * inner, axis=(0, 2, 4))
    return total[:, None, :, None] if outputs == "full" else total


def _by_blocks(factor: Gram | Rows) -> Float[Array, "T C S C"]:
    """Contract a factor with itself by blocks of rows, of which those above the diagonal are copies of those below.

    With 4 blocks a recurrent network takes 0.93 times as long as with 2.
    """
    samples, many = factor.cotangent.shape[:2]
    count = min(4, samples)
    size = math.ceil(samples / count)
    # samples whose factors are 0 fill the last block
    fill = lambda a: jnp.pad(a, [(0, count * size - samples)] + [(0, 0)] * (a.ndim - 1))
    cut = jax.tree.map(lambda a: fill(a).reshape(count, size, *a.shape[1:]), factor)
    block = lambda number: jax.tree.map(lambda a: a[number], cut)
    # a loop, so that one program serves all pairs of blocks
    i, j = np.tril_indices(count)
    below = jax.lax.map(lambda pair: _contract_outputs(*map(block, pair)), (i, j))
    place = np.zeros((count, count), int)
    place[i, j] = place[j, i] = np.arange(len(i))
    found = below[place]  # (i, j, T, C, S, C)
    mirrored = jnp.transpose(found, (0, 1, 4, 5, 2, 3))
    whole = jnp.where(np.tri(count, dtype=bool)[(...,) + (None,) * 4], found, mirrored)
    flat = jnp.transpose(whole, (0, 2, 3, 1, 4, 5)).reshape((count * size, many) * 2)
    return flat[:samples, :, :samples]


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


def _contract_coupled(left: Coupled, right: Coupled, outputs: str) -> Array:
    """Add up <D, (h h') D'> over slices of o."""
    h, other = left.activation, right.activation
    if h.ndim == 1:
        # rows of a table have the inner product 1 with themselves and 0 with others
        inner = (h[:, None] == other[None]).astype(left.cotangent.dtype)[None]
    else:
        inner = jnp.einsum("gpk,gqk->gpq", h, other, precision=HIGH)
    _, many, groups, width, positions = left.cotangent.shape
    rows, columns = left.cotangent.shape[0], right.cotangent.shape[0]
    step = slice_width(rows, columns, (many, groups, positions, width), positions, outputs)
    flat = lambda a: a.reshape(a.shape[:2] + (-1,))

    def multiply(start: Array) -> Array:
        slice_of = lambda a: jax.lax.dynamic_slice_in_dim(a.cotangent, start, step, 3)
        return _features(flat(slice_of(left)), flat(spread(slice_of(right))), outputs)

    def spread(some: Array) -> Array:
        moved = jnp.moveaxis(some, 2, 0)  # (G, S, C, o, Q), whose product with h h' is one of matrices
        product = jnp.matmul(
            moved.reshape(groups, -1, moved.shape[-1]), jnp.swapaxes(inner, 1, 2), precision=HIGH
        )
        return jnp.moveaxis(product.reshape(moved.shape[:-1] + (positions,)), 0, 2)

    return _added(multiply, jnp.arange(0, width, step), width // step)
