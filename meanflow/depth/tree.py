"""The tree model: weights (I, -I), recenter, ReLU, at any depth without its 2^t rows.

Every neuron (row x of n values) has two children, relu(x - mean) and relu(mean - x). The children split the
clusters (distinct values) of the parent between them: the sum over rows of (clusters - 2) never increases and
starts at n - 2. So at most n - 2 rows ever have three clusters or more. All others take the value 0 on one
side of a split of the sorted samples and a height c on the other, and only sums of c^2 are needed:

    R_s = sum c^2 of the rows positive to the right of split s (s samples at 0),   L_s = to the left,
    R_s' = (s/n)^2 (R_s + L_s),    L_s' = ((n-s)/n)^2 (R_s + L_s)          + what multi-cluster rows release.

A layer costs O(n^2), the state is O(n^2); scales are kept as logarithms, so depth 10 000 is exact too.
"""

from functools import partial
from typing import NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

from meanflow import _checks
from meanflow._numerics import iterate


class Tree(eqx.Module):
    """One layer of the tree of one input row; the samples are sorted by it, ascending.

    Attributes:
        right: (n - 1,) sums R_s for splits s = 1..n-1.
        left: (n - 1,) sums L_s.
        rows: (n - 2, n) rows with three clusters or more; unused ones are zero.
        log_scale: true rows are exp(log_scale) times these, true sums exp(2 log_scale) times.
    """

    right: jax.Array
    left: jax.Array
    rows: jax.Array
    log_scale: jax.Array

    @property
    def weight(self) -> jax.Array:
        """S_s = R_s + L_s, (..., n - 1): squared height that splits the samples after the s-th."""
        return self.right + self.left

    @property
    def gram(self) -> jax.Array:
        """(n, n) Gram matrix of the sorted samples, without the scale. Cost O(n^3)."""
        n = self.rows.shape[-1]
        i = jnp.arange(n)
        low, high = jnp.minimum(i[:, None], i[None, :]), jnp.maximum(i[:, None], i[None, :])
        zero = jnp.zeros(1, self.right.dtype)
        # a right block after split s holds the pair i <= j when s <= i, a left block when s > j
        right = jnp.concatenate([zero, jnp.cumsum(self.right)])
        left = jnp.concatenate([jnp.cumsum(self.left[::-1])[::-1], zero])
        return right[low] + left[high] + self.rows.T @ self.rows


def _clusters(rows: jax.Array) -> jax.Array:
    """Distinct values of monotone rows (..., n)."""
    return 1 + jnp.sum(rows[..., 1:] != rows[..., :-1], axis=-1)


def _sort_out(rows: jax.Array, right: jax.Array, left: jax.Array) -> tuple[jax.Array, ...]:
    """Moves two-cluster rows into the sums and packs the others into the first n - 2 places."""
    n = rows.shape[1]
    count = _clusters(rows)
    jump = jnp.argmax(rows[:, 1:] != rows[:, :-1], axis=1)  # split s - 1 of a two-cluster row
    pair = (count == 2).astype(rows.dtype)
    right = right.at[jump].add(pair * jnp.square(rows[:, -1]))
    left = left.at[jump].add(pair * jnp.square(rows[:, 0]))
    # by the conservation law no more than n - 2 rows are kept; the others go to a place that is cut off
    keep = count > 2
    place = jnp.where(keep, jnp.cumsum(keep) - 1, n - 2)
    packed = jnp.zeros((n - 1, n), rows.dtype).at[place].set(jnp.where(keep[:, None], rows, 0.0))
    return packed[: n - 2], right, left


def _rescaled(tree: Tree) -> Tree:
    """Divides the scale out; drops rows whose squares would underflow."""
    size = jnp.sqrt(jnp.max(tree.weight) + jnp.max(jnp.square(tree.rows), initial=0.0))
    size = jnp.where(size > 0, size, 1.0)
    rows = tree.rows / size
    top = jnp.max(rows, axis=1, keepdims=True)
    rows = jnp.where(jnp.square(top) > jnp.finfo(rows.dtype).tiny, rows, 0.0)
    return Tree(tree.right / size**2, tree.left / size**2, rows, tree.log_scale + jnp.log(size))


def _children(rows: jax.Array) -> jax.Array:
    """Positive and negative transformations (Definition 5) of rows (m, n): (2m, n)."""
    centred = rows - jnp.mean(rows, axis=1, keepdims=True)
    # a value equal to the mean must become 0 in both children, whatever the rounding of the mean
    snap = 512 * jnp.finfo(rows.dtype).eps * jnp.max(jnp.abs(rows), axis=1, keepdims=True)
    centred = jnp.where(jnp.abs(centred) < snap, 0.0, centred)
    return jnp.concatenate([jnp.maximum(centred, 0.0), jnp.maximum(-centred, 0.0)])


def tree_start(x: jax.Array) -> Tree:
    """Layer 1 of the tree of a sorted input row x (n,), n >= 3."""
    n = x.shape[0]
    zero = jnp.zeros(n - 1, x.dtype)
    rows, right, left = _sort_out(_children(x[None] - x[:1, None]), zero, zero)
    return _rescaled(Tree(right, left, rows, jnp.zeros((), x.dtype)))


def tree_step(tree: Tree) -> Tree:
    """The next layer. Cost O(n^2)."""
    n = tree.rows.shape[1]
    s = jnp.arange(1, n, dtype=tree.right.dtype)
    right, left = jnp.square(s / n) * tree.weight, jnp.square((n - s) / n) * tree.weight
    rows, right, left = _sort_out(_children(tree.rows), right, left)
    return _rescaled(Tree(right, left, rows, tree.log_scale))


class TreeRecord(eqx.Module):
    """The tree at the observed layers (leading axis).

    Attributes:
        layer: (T,) layer numbers.
        gram: (T, n, n) Gram matrices of the samples in the order given, divided by exp(2 log_scale).
        log_scale: (T,).
        weight: (T, d, n - 1) S_s of each input row, each with its own scale (ratios within a row are meant).
        multi_rows: (T, d) rows with three clusters or more.
        max_clusters: (T, d) largest number of clusters of a row; stable (Theorem 10) when at most 3.
        order: (d, n) sample at each sorted place of each input row.
    """

    layer: jax.Array
    gram: jax.Array
    log_scale: jax.Array
    weight: jax.Array
    multi_rows: jax.Array
    max_clusters: jax.Array
    order: jax.Array

    @property
    def rho(self) -> jax.Array:
        """S_{n-1} / S_1 at the last layer seen, (d,): below 1 the least sample escapes, above it the top."""
        return self.weight[-1, :, -1] / self.weight[-1, :, 0]

    def escaped(self, tolerance: float = 1e-6) -> jax.Array:
        """(d, n) which samples escape in the tree of each input row: an extreme one, or both when rho is 1.

        Call it on a record deep enough for rho to have settled (some 40 n layers).
        """
        log_rho = jnp.log(self.rho)
        n = self.order.shape[1]
        first = (log_rho < tolerance)[:, None] & (jnp.arange(n)[None, :] == self.order[:, :1])
        last = (log_rho > -tolerance)[:, None] & (jnp.arange(n)[None, :] == self.order[:, -1:])
        return first | last

    @property
    def unmerged(self) -> jax.Array:
        """(T, d) share of the weight that separates interior samples; decays by ``merge_rate`` a layer."""
        total = jnp.sum(self.weight, axis=-1)
        inner = jnp.sum(self.weight[..., 1:-1], axis=-1)
        return jnp.where(total > 0, inner / jnp.where(total > 0, total, 1), 1.0)


@partial(jax.jit, static_argnames=("depth", "every"))
def _tree(x: jax.Array, depth: int, every: int) -> TreeRecord:
    n, d = x.shape
    order = jnp.argsort(x.T, axis=1)
    start = jax.vmap(tree_start)(jnp.take_along_axis(x.T, order, axis=1))

    def observe(trees: Tree) -> tuple:
        place = jnp.argsort(order, axis=1)
        unsorted = jax.vmap(lambda tree, p: tree.gram[p[:, None], p[None, :]])(trees, place)
        # an input row that is constant has no children: its Gram matrix is 0 and its scale means nothing
        alive = jnp.any(trees.weight > 0, axis=1) | jnp.any(trees.rows > 0, axis=(1, 2))
        scale = jnp.max(jnp.where(alive, trees.log_scale, -jnp.inf))
        scale = jnp.where(jnp.isfinite(scale), scale, 0.0)
        share = jnp.where(alive, jnp.exp(2 * (trees.log_scale - scale)), 0.0)
        count = _clusters(trees.rows)
        two = jnp.where(alive, 2, 1)
        return (
            jnp.sum(share[:, None, None] * unsorted, axis=0),
            scale,
            trees.weight,
            jnp.sum(count > 2, axis=1),
            jnp.maximum(two, jnp.max(count, axis=1)),
        )

    first = observe(start)
    step = lambda trees, _: jax.vmap(tree_step)(trees)
    rounds = (depth - 1) // every
    last, rest = iterate(step, start, None, rounds * every, every, observe)
    seen = jax.tree.map(lambda a, b: jnp.concatenate([a[None], b]), first, rest)
    gram, log_scale, weight, multi, most = seen
    layer = 1 + every * jnp.arange(rounds + 1)
    return TreeRecord(layer, gram, log_scale, weight, multi, most, order)


def tree(x: jax.Array | np.ndarray, depth: int, every: int = 1) -> TreeRecord:
    """The tree model ("BN decomposed", equations (9), (10)) of a batch, exactly.

    Args:
        x: (n,) or (n, d), n >= 3. Each of the d input features grows its own tree; their Gram matrices add.
            Equal entries are allowed.
        depth: last layer, at least 1.
        every: layers between two observations, which cost O(d n^3) each; observed are layers 1, 1 + every,
            ...

    Returns:
        A ``TreeRecord``. Cost O(depth d n^2) and the observations; nothing grows with 2^depth.

    >>> import jax.numpy as jnp, meanflow as mf
    >>> record = mf.depth.tree(jnp.array([0.0, 1.0, 2.0, 4.0, 9.0]), 1001, every=1000)
    >>> int(mf.depth.odd_point(record.gram[-1]).sample)
    4
    """
    x = jnp.asarray(x)
    x = x if jnp.issubdtype(x.dtype, jnp.floating) else x.astype(jnp.result_type(float))
    x = x[:, None] if x.ndim == 1 else x
    _checks.shape("x", x, (None, None))
    if x.shape[0] < 3:
        raise ValueError(f"x must hold at least 3 samples, got {x.shape[0]}")
    _checks.finite("x", x)
    return _tree(x, _checks.whole("depth", depth, 1), _checks.whole("every", every, 1))


def merge_rate(n: int) -> float:
    """Factor per layer (a scalar) of the weight separating interior samples: ((n-2)^2 + 4) / ((n-1)^2 + 1)."""
    return ((n - 2) ** 2 + 4) / ((n - 1) ** 2 + 1)


class Limits(NamedTuple):
    """Geometry of the tree as the depth grows, for an interior sample i and the extreme ones 1, n (sorted).

    Attributes:
        ratio_first: |x_i| / |x_1|.
        ratio_last: |x_i| / |x_n|.
        cos_first: cos(x_i, x_1).
        cos_last: cos(x_i, x_n).
    """

    ratio_first: jax.Array
    ratio_last: jax.Array
    cos_first: jax.Array
    cos_last: jax.Array


def tree_limits(n: int, rho: jax.Array | float) -> Limits:
    """Limits of norm ratios and cosines given rho = lim S_{n-1} / S_1.

    x_1 . x_n = 0 and interior samples merge. rho < 1: x_1 is odd; rho > 1: x_n; rho = 1 (symmetric inputs):
    both.
    """
    rho = jnp.asarray(rho)
    m = (n - 1) ** 2
    return Limits(
        jnp.sqrt((1 + rho) / (m + rho)),
        jnp.sqrt((1 + rho) / (1 + m * rho)),
        rho / jnp.sqrt((1 + rho) * (m + rho)),
        1 / jnp.sqrt((1 + rho) * (1 + m * rho)),
    )


class TreeBounds(NamedTuple):
    """Theorem 11, items 3 and 4: bounds for the escaped sample, sharp and as printed.

    Attributes:
        ratio: sharp bound of |x_i| / |x_odd|, attained by symmetric inputs: sqrt(2 / ((n-1)^2 + 1)).
        angle: sharp bound of the angle in radians, arccos(1 / sqrt(2 ((n-1)^2 + 1))).
        printed_ratio: 3 / (n-2), not sharp.
        printed_angle: pi/2 - sqrt(2) pi / (n-2), not sharp; negative, hence empty, for n <= 4.
    """

    ratio: float
    angle: float
    printed_ratio: float
    printed_angle: float


def tree_bounds(n: int) -> TreeBounds:
    """The bounds of Theorem 11 for n >= 3 samples (the printed ones are infinite at n = 2)."""
    n = _checks.whole("n", n, 3)
    m = (n - 1) ** 2 + 1
    return TreeBounds(
        float(np.sqrt(2 / m)),
        float(np.arccos(1 / np.sqrt(2 * m))),
        3 / (n - 2),
        float(np.pi / 2 - np.sqrt(2) * np.pi / (n - 2)),
    )
