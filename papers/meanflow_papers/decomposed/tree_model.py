"""The tree model: weights (I, -I), recenter, ReLU, at any depth without its 2^t rows.

Every neuron, a row x of n values, has two children, relu(x - mean) and relu(mean - x). The children split the clusters
(the distinct values) of the parent between them: the sum over rows of (clusters - 2) never increases, and it starts at
n - 2. So at most n - 2 rows ever have three clusters or more. All other rows are 0 on one side of a split of the sorted
samples and have a height c on the other, and only sums of c^2 are needed:

    R_s = sum of c^2 over the rows that are positive to the right of split s (with s samples at 0), L_s to the left,
    R_s' = (s/n)^2 (R_s + L_s),    L_s' = ((n-s)/n)^2 (R_s + L_s)          + what rows of many clusters release.

A layer costs O(n^2), and so does the state. Scales are kept as logarithms, so depth 10 000 is exact too.
"""

from __future__ import annotations

from functools import partial

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, ArrayLike, Bool, Float, Int, Shaped


class Tree(eqx.Module):
    """One layer of the tree of one input row. The samples are sorted by their values in that row, ascending.

    Attributes:
        right: sums R_s for the splits s = 1..n-1.
        left: sums L_s.
        rows: the rows with three clusters or more; unused ones are zero.
        log_scale: true rows are exp(log_scale) times these, true sums exp(2 log_scale) times these.
    """

    right: Float[Array, "*trees splits"]
    left: Float[Array, "*trees splits"]
    rows: Float[Array, "*trees splits-1 splits+1"]
    log_scale: Float[Array, "*trees"]

    @property
    def weight(self) -> Float[Array, "*trees splits"]:
        """S_s = R_s + L_s, the squared height of the rows that split the samples after the s-th."""
        return self.right + self.left

    @property
    def gram(self) -> Float[Array, "n n"]:
        """Gram matrix of the sorted samples, without the scale; it costs O(n^3)."""
        n = self.rows.shape[-1]
        i = jnp.arange(n)
        low, high = jnp.minimum(i[:, None], i[None, :]), jnp.maximum(i[:, None], i[None, :])
        zero = jnp.zeros(1, self.right.dtype)
        # a right block after split s holds the pair i <= j when s <= i, a left block when s > j
        right = jnp.concatenate([zero, jnp.cumsum(self.right)])
        left = jnp.concatenate([jnp.cumsum(self.left[::-1])[::-1], zero])
        return right[low] + left[high] + self.rows.T @ self.rows


def _clusters(rows: jax.Array) -> jax.Array:
    """Count the distinct values of monotone rows (..., n)."""
    return 1 + jnp.sum(rows[..., 1:] != rows[..., :-1], axis=-1)


def _sort_out(rows: jax.Array, right: jax.Array, left: jax.Array) -> tuple[jax.Array, ...]:
    """Move rows of two clusters into the sums, and pack the others into the first n - 2 places."""
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
    """Divide the scale out, and drop rows whose squares would underflow."""
    size = jnp.sqrt(jnp.max(tree.weight) + jnp.max(jnp.square(tree.rows), initial=0.0))
    size = jnp.where(size > 0, size, 1.0)
    rows = tree.rows / size
    top = jnp.max(rows, axis=1, keepdims=True)
    rows = jnp.where(jnp.square(top) > jnp.finfo(rows.dtype).tiny, rows, 0.0)
    return Tree(tree.right / size**2, tree.left / size**2, rows, tree.log_scale + jnp.log(size))


def _children(rows: jax.Array) -> jax.Array:
    """Return both children of rows (m, n), the positive and negative transformations of Definition 5: (2m, n)."""
    centered = rows - jnp.mean(rows, axis=1, keepdims=True)
    # a value equal to the mean must become 0 in both children, whatever the rounding of the mean: at most n eps for n
    # samples, so that 512 covers all batches of up to 512
    snap = 512 * jnp.finfo(rows.dtype).eps * jnp.max(jnp.abs(rows), axis=1, keepdims=True)
    centered = jnp.where(jnp.abs(centered) < snap, 0.0, centered)
    return jnp.concatenate([jnp.maximum(centered, 0.0), jnp.maximum(-centered, 0.0)])


def tree_start(x: Float[Array, "n"]) -> Tree:
    """Return layer 1 of the tree of an input row x with n >= 3 values in ascending order."""
    n = x.shape[0]
    zero = jnp.zeros(n - 1, x.dtype)
    # children see differences only; measured from the least value, a tie is judged relative to the spread of x, and
    # in units of the spread no square is out of range
    spread = x - x[0]
    size = jnp.where(jnp.any(spread != 0), jnp.max(jnp.abs(spread)), 1.0)
    rows, right, left = _sort_out(_children((spread / size)[None]), zero, zero)
    return _rescaled(Tree(right, left, rows, jnp.log(size)))


def tree_step(tree: Tree) -> Tree:
    """Return the next layer of a tree; it costs O(n^2)."""
    n = tree.rows.shape[1]
    s = jnp.arange(1, n, dtype=tree.right.dtype)
    # rows of two clusters have mean (n-s)/n or s/n of their height: the recursion of R_s and L_s above
    right, left = jnp.square(s / n) * tree.weight, jnp.square((n - s) / n) * tree.weight
    rows, right, left = _sort_out(_children(tree.rows), right, left)
    return _rescaled(Tree(right, left, rows, tree.log_scale))


class TreeRecord(eqx.Module):
    """The tree at the layers that were observed; each of the d input features grows its own tree.

    Attributes:
        layer: numbers of the observed layers.
        gram: Gram matrices of the samples in the order given, divided by exp(2 log_scale).
        log_scale: logarithm of the scale of each observed layer.
        weight: S_s of each feature. Each feature has a scale of its own, so only ratios within a feature have a
            meaning.
        multi_rows: number of rows with three clusters or more.
        max_clusters: largest number of clusters of a row. The tree is stable (Theorem 10) when it is at most 3.
        order: which sample stands at each place when a feature is sorted.
    """

    layer: Int[Array, "observed"]
    gram: Float[Array, "observed n n"]
    log_scale: Float[Array, "observed"]
    weight: Float[Array, "observed d n-1"]
    multi_rows: Int[Array, "observed d"]
    max_clusters: Int[Array, "observed d"]
    order: Int[Array, "d n"]

    @property
    def rho(self) -> Float[Array, "d"]:
        """S_{n-1} / S_1 at the last observed layer: the smallest sample escapes below 1, the largest above 1."""
        return self.weight[-1, :, -1] / self.weight[-1, :, 0]

    def escaped(self, tolerance: float = 1e-6) -> Bool[Array, "d n"]:
        """Return which samples escape in the tree of each feature: an extreme one, or both when rho is 1.

        Call it on a record that is deep enough for rho to have settled, some 40 n layers.

        Args:
            tolerance: rho counts as 1 when its logarithm is below this in absolute value.
        """
        log_rho = jnp.log(self.rho)
        n = self.order.shape[1]
        first = (log_rho < tolerance)[:, None] & (jnp.arange(n)[None, :] == self.order[:, :1])
        last = (log_rho > -tolerance)[:, None] & (jnp.arange(n)[None, :] == self.order[:, -1:])
        return first | last


@partial(jax.jit, static_argnames=("depth", "every"))
def _tree(x: jax.Array, depth: int, every: int) -> TreeRecord:
    """Grow the trees of all features in one compiled scan."""
    order = jnp.argsort(x.T, axis=1)
    ranks = jnp.broadcast_to(jnp.arange(order.shape[1], dtype=order.dtype), order.shape)
    start = jax.vmap(tree_start)(jnp.take_along_axis(x.T, order, axis=1))

    def observe(trees: Tree) -> tuple[jax.Array, ...]:
        # where each sample stands in the order; to sort the order again broke compilers for GPUs in float64 (jax 0.8.2)
        place = jnp.put_along_axis(jnp.zeros_like(order), order, ranks, axis=1, inplace=False)
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

    def block(trees: Tree, number: jax.Array) -> tuple[Tree, tuple[jax.Array, ...]]:
        # no steps before the first observation
        steps = jnp.where(number > 0, every, 0)
        trees = jax.lax.fori_loop(0, steps, lambda _, trees: jax.vmap(tree_step)(trees), trees)
        return trees, observe(trees)

    rounds = (depth - 1) // every
    gram, log_scale, weight, multi, most = jax.lax.scan(block, start, jnp.arange(rounds + 1))[1]
    return TreeRecord(1 + every * jnp.arange(rounds + 1), gram, log_scale, weight, multi, most, order)


def tree(x: Shaped[ArrayLike, "n *d"], depth: int, every: int = 1) -> TreeRecord:
    """Follow a batch through the tree model of "BN decomposed" (equations (9) and (10)), exactly and at any depth.

    The model is a network with the weights (I, -I), recenter and ReLU, whose width doubles in each layer.

    Args:
        x: batch (n, d) of at least 3 samples, or (n,) for one feature. Each feature grows its own tree, and their Gram
            matrices add. Equal entries are allowed.
        depth: number of the last layer, at least 1.
        every: layers between two observations, which cost O(d n^3) each. Layers 1, 1 + every, 1 + 2 every, ... are
            observed.

    Returns:
        A ``TreeRecord``. Besides the observations the cost is O(depth d n^2); nothing grows with 2^depth.

    >>> record = tree(jnp.array([0.0, 1.0, 2.0, 4.0, 9.0]), 1001, every=1000)
    >>> record.escaped()[0].tolist()
    [False, False, False, False, True]
    """
    x = jnp.asarray(x) * 1.0  # integers become floats
    if x.ndim not in (1, 2) or x.size == 0 or min(depth, every) < 1:
        raise ValueError(
            f"x must have shape (n,) or (n, d), depth and every must be >= 1, got {x.shape}, {depth}, {every}"
        )
    if x.shape[0] < 3:
        raise ValueError(f"x must hold at least 3 samples, got shape {x.shape}")
    return _tree(x[:, None] if x.ndim == 1 else x, depth, every)
