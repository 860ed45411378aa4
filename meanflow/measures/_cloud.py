"""A network as a measure: particles with weights and frozen labels."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple, Self

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, ArrayLike, Float, PyTree, Real

from meanflow import _boundary
from meanflow._boundary import Count, PRNGKey, checked, floating
from meanflow._module import Module

LABELS = _boundary.array(infinite=True)
WIDTH = _boundary.number(above=0, infinite=True)


class Neurons(NamedTuple):
    """Two-layer neurons a * s(b . x): ``a`` (m,), or (m, k) for k outputs, and ``b`` (m, d).

    On the batch-norm manifold ``b`` is b-bar.
    """

    a: Float[Array, "*batch_m_and_k"]
    b: Float[Array, "*batch m d"]


class BatchNormNeurons(NamedTuple):
    """Two-layer neurons with a trainable batch norm, a * s(scale * t + shift) with t = b . (x - mean) / |b|_S.

    ``a`` (m,) or (m, k), ``b`` (m, d), ``scale`` (m,) and ``shift`` (m,). On the batch-norm manifold ``b`` is b-bar.
    """

    a: Float[Array, "*batch_m_and_k"]
    b: Float[Array, "*batch m d"]
    scale: Float[Array, "*batch m"]
    shift: Float[Array, "*batch m"]


class Polar(NamedTuple):
    """Univariate ReLU neurons r * relu(x cos(theta) + sin(theta)): ``r`` (m,), ``theta`` (m,)."""

    r: Float[Array, "*batch m"]
    theta: Float[Array, "*batch m"]


class Affine(NamedTuple):
    """Univariate ReLU neurons c * relu(a x - b): ``a``, ``b``, ``c`` of shape (m,)."""

    a: Float[Array, "*batch m"]
    b: Float[Array, "*batch m"]
    c: Float[Array, "*batch m"]


class Cloud(Module):
    """The measure sum_i p_i delta(w_i), with one frozen label per particle if the geometry needs it.

    Attributes:
        particles: record of arrays with leading axis m (``Neurons``, ``Polar``, ``Affine`` or any pytree).
        weights: (m,) p_i >= 0 with sum 1; default 1/m each. Zero marks padding. A cloud of free mass (``total=None``)
            has weights of any sum: f = sum_i p_i phi(w_i; x) as always.
        labels: (m,) conserved quantities that the inverse metric depends on, or None.
        width: number of real particles as a float; infinite for quadrature clouds, which stand for m = infinity.

    Raises:
        ValueError: for unequal leading axes, non-finite particles, negative weights or a sum other than ``total``.

    >>> import jax.numpy as jnp
    >>> cloud = Cloud(Neurons(jnp.array([1.0, -1.0]), jnp.eye(2)))
    >>> float(cloud.width), cloud.weights.tolist()
    (2.0, [0.5, 0.5])
    """

    particles: PyTree[jax.Array]
    weights: jax.Array
    labels: jax.Array | None
    width: jax.Array

    def __init__(
        self,
        particles: PyTree[ArrayLike],
        weights: Real[ArrayLike, " m"] | Sequence | None = None,
        labels: Real[ArrayLike, "*m"] | Sequence | None = None,
        *,
        width: Real[ArrayLike, ""] | None = None,
        total: Real[ArrayLike, ""] | None = 1.0,
    ) -> None:
        for name, leaf in _named(particles):
            _boundary.numeric(f"particles.{name}" if name else "particles", leaf)
        if any(part is None for part in (particles if isinstance(particles, tuple) else ())):
            raise ValueError(
                f"particles must have all their coordinates, got None in {_boundary.show(particles)}"
            )
        particles = jax.tree.map(floating, particles, is_leaf=_is_list)
        leaves = jax.tree.leaves(particles)
        sizes = {np.shape(leaf)[:1] for leaf in leaves}
        if len(sizes) != 1 or sizes == {()}:
            raise ValueError(
                f"particles must share one leading axis (m,), got shapes {[np.shape(u) for u in leaves]}"
            )
        ((size,),) = sizes
        if size < 1:
            raise ValueError("particles must hold at least 1 neuron, got width 0")
        for name, leaf in _named(particles):
            _boundary.finite(f"particles.{name}", leaf)
        # one precision for all arrays of a cloud: that of its widest coordinate
        dtype = jnp.result_type(*leaves)
        weights = jnp.full((size,), 1.0 / size, dtype) if weights is None else weights
        # weights may be coarser than the particles: rounding of either is allowed for in their sum
        given = _boundary.array((size,), low=0.0)("weights", weights)
        eps = max(float(jnp.finfo(u).eps) for u in (given.dtype, dtype))
        weights = given.astype(dtype)
        known = _boundary.concrete(weights)
        wanted = None if total is None else _boundary.concrete(_boundary.number(low=0.0)("total", total))
        if known is not None and wanted is not None:
            mass = known.sum(dtype=np.float64)
            if abs(mass - wanted) > 1e3 * eps * max(float(wanted), 1.0):
                hint = "; total=None allows any sum" if wanted == 1 else ""
                raise ValueError(f"weights must sum to {float(wanted):g}, got a sum of {mass}{hint}")
        # they scale the metric of each particle, and so have the precision of the particles
        if labels is not None:
            labels = LABELS("labels", labels).astype(dtype)
            labels = jnp.full((size,), labels) if labels.ndim == 0 else labels
            _boundary.shape("labels", labels, (size,))
        self.particles, self.weights, self.labels = particles, weights, labels
        # padding has no weight and counts as no neuron
        if width is None:
            if known is not None and not known.any():
                raise ValueError("weights must not all be zero: the cloud would have no neuron")
            width = jnp.count_nonzero(weights) if known is None else int(np.count_nonzero(known))
        self.width = jnp.asarray(WIDTH("width", width), dtype)

    @property
    def size(self) -> int:
        """The number of stored particles, padding included."""
        return self.weights.shape[-1]

    @property
    def total(self) -> jax.Array:
        """The total mass, the sum of the weights: 1 to rounding unless the cloud was made with free mass."""
        return jnp.sum(self.weights, axis=-1)

    def __len__(self) -> int:
        """The number of clouds, for those of a run or of ``stack``; a single cloud has no length, see ``size``."""
        return self._stacked()

    def __getitem__(self, index: int | slice | jax.Array) -> Self:
        """Return one of stacked clouds (or several, for a slice), such as the one at a save time of a run.

        >>> import jax.numpy as jnp
        >>> pair = Cloud.stack([Cloud(Polar(jnp.full(2, r), jnp.zeros(2))) for r in (1.0, 3.0)])
        >>> pair[1].particles.r.tolist(), [float(cloud.particles.r[0]) for cloud in pair]
        ([3.0, 3.0], [1.0, 3.0])
        """
        count = self._stacked()
        if not isinstance(index, int | slice | np.integer | jax.Array | np.ndarray) or isinstance(
            index, bool
        ):
            raise TypeError(
                f"index must be an integer, a slice or an array of integers, got {_boundary.show(index)}"
            )
        # jax would clip an index that is too large, and return the last cloud without a word
        if isinstance(index, int | np.integer) and not -count <= index < count:
            raise IndexError(f"index must be from {-count} to {count - 1}, got {index}")
        return jax.tree.map(lambda u: u[index], self)

    def __iter__(self) -> Iterator[Self]:
        """Go through stacked clouds one by one."""
        return (self[k] for k in range(self._stacked()))

    def _stacked(self) -> int:
        if self.weights.ndim < 2:
            raise TypeError("only stacked clouds can be indexed and counted; a single cloud has a size")
        return self.weights.shape[0]

    def at(self, particles: PyTree[jax.Array | np.ndarray]) -> Self:
        """Return the same weights and labels with the particles moved to ``particles``, as many as there are.

        Values are not looked at: solvers call it in every step.
        """
        leaves = jax.tree.leaves(particles)
        if not leaves or any(np.shape(u)[: self.weights.ndim] != self.weights.shape for u in leaves):
            shapes = [np.shape(u) for u in leaves]
            raise ValueError(
                f"particles must be arrays whose shapes begin with that of the weights, {self.weights.shape}, got "
                f"{shapes or _boundary.show(particles)}"
            )
        return eqx.tree_at(lambda c: c.particles, self, particles)

    def pad(self, size: int) -> Self:
        """Append copies of the last particle with weight zero until ``size`` are stored.

        Padding never contributes to predictions, energies or error norms, so a padded cloud follows the
        same trajectory; clouds of different widths can then be stacked and vmapped.
        """
        extra = _boundary.whole("size", size, self.size) - self.size

        def grow(u: jax.Array | np.ndarray) -> jax.Array:
            return jnp.concatenate([u, jnp.broadcast_to(u[-1:], (extra, *u.shape[1:]))])

        # zero, so that no sum over particles sees the copies; the width stays that of the real ones
        weights = jnp.concatenate([self.weights, jnp.zeros((extra,), self.weights.dtype)])
        labels = None if self.labels is None else grow(self.labels)
        return type(self)(jax.tree.map(grow, self.particles), weights, labels, width=self.width, total=None)

    @staticmethod
    def stack(clouds: Sequence[Cloud]) -> Cloud:
        """Pad clouds to their largest size and stack them along a new first axis, ready for ``jax.vmap``.

        Args:
            clouds: at least one cloud; all have particles of one type and dimension, and labels, or none of them has.

        >>> import jax.numpy as jnp
        >>> Cloud.stack([Cloud(Polar(jnp.ones(m), jnp.zeros(m))) for m in (2, 3)]).weights.shape
        (2, 3)
        """
        _boundary.sequence(CLOUD)("clouds", clouds)
        size = max(cloud.size for cloud in clouds)
        padded = [cloud.pad(size) for cloud in clouds]
        shapes = {str(jax.tree.map(lambda u: (u.dtype.name, u.shape), cloud)) for cloud in padded}
        if len(shapes) > 1:
            raise ValueError(f"clouds must hold particles of one kind, got {sorted(shapes)}")
        return jax.tree.map(lambda *u: jnp.stack(u), *padded)

    @checked
    def resample(self, key: PRNGKey, width: Count | None = None) -> Self:
        """Replace weights by copies: return ``width`` equally weighted particles that stand for the same measure.

        Systematic resampling: one random shift, so that particle i gets floor or ceil of width * p_i copies, on average
        width * p_i. The total mass and the labels stay. Reaction concentrates the mass on few particles; noise or
        transport can tell the copies apart again.

        Args:
            key: PRNG key of the shift.
            width: number of particles of the result; default that of the cloud's arrays.

        >>> import jax, jax.numpy as jnp
        >>> cloud = Cloud(Polar(jnp.array([1.0, 2.0]), jnp.zeros(2)), [0.25, 0.75])
        >>> cloud.resample(jax.random.key(0), 4).particles.r.tolist()
        [1.0, 2.0, 2.0, 2.0]
        """
        CLOUD("cloud", self)
        size = self.size if width is None else width
        edges = jnp.cumsum(self.weights) / self.total
        marks = (jnp.arange(size, dtype=edges.dtype) + jax.random.uniform(key, (), edges.dtype)) / size
        # rounding of the last mark must not reach padding
        last = self.size - 1 - jnp.argmax(self.weights[::-1] > 0)
        index = jnp.minimum(jnp.searchsorted(edges, marks, side="right"), last)
        particles, labels = jax.tree.map(lambda u: u[index], (self.particles, self.labels))
        weights = jnp.full((size,), 1.0 / size, edges.dtype) * self.total
        return type(self)(particles, weights, labels, width=size, total=None)


def _is_list(value: object) -> bool:
    """Say whether a part of a record is an array written as a list of numbers."""
    return isinstance(value, list) and all(isinstance(u, int | float) for u in jax.tree.leaves(value))


def _named(record: PyTree[ArrayLike]) -> list[tuple[str, ArrayLike]]:
    paths = jax.tree_util.tree_flatten_with_path(record, is_leaf=_is_list)[0]
    return [(jax.tree_util.keystr(path, simple=True, separator="."), leaf) for path, leaf in paths]


_A_CLOUD = _boundary.instance(Cloud, hint="build one with flow.init(key, width) or meanflow.Cloud(particles)")


def CLOUD(name: str, value: object) -> object:
    """Accept one cloud: several that are stacked go through jax.vmap, or one by one."""
    cloud = _A_CLOUD(name, value)
    weights = cloud.weights  # type: ignore[attr-defined]
    if np.ndim(weights) != 1:
        raise ValueError(
            f"{name} must be a single cloud, got stacked ones with weights of shape {np.shape(weights)}; index "
            "them, or use jax.vmap"
        )
    return value


_boundary.declare(Cloud, CLOUD)
