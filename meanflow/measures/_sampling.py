"""Clouds from laws: random, quasi-random and tensor-grid particles."""

from __future__ import annotations

import math
from typing import Annotated

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import ArrayLike, Float

from meanflow import _boundary
from meanflow._boundary import (
    Count,
    PRNGKey,
    checked,
    choice,
    either,
    mapping,
    optional,
    prng_key,
    sequence,
    subclass,
)
from meanflow.measures._cloud import LABELS, Cloud
from meanflow.measures.laws import Law, as_law

Labels = Annotated[float | Float[ArrayLike, "*m"] | None, optional(LABELS)]


def _gauss(count: int) -> tuple[np.ndarray, np.ndarray]:
    # numpy has them on (-1, 1), laws take numbers in (0, 1)
    nodes, weights = np.polynomial.legendre.leggauss(count)
    return (nodes + 1) / 2, weights / 2


# the nodes in (0, 1) and their weights
_NODES = {"midpoint": lambda k: ((np.arange(k) + 0.5) / k, np.full(k, 1.0 / k)), "gauss": _gauss}
RULE = choice(*_NODES)

Laws = Annotated[dict[str, Law], mapping(as_law)]

Record = Annotated[type, subclass(tuple, hint="for instance meanflow.Neurons")]


def _particles(record: type, laws: dict[str, Law], u: jax.Array) -> tuple:
    """Return particles made of numbers ``u`` (k, total size), each law taking its own columns."""
    fields = getattr(record, "_fields", ())
    if set(laws) != set(fields):
        raise ValueError(f"laws must name the coordinates {list(fields)}, got {sorted(laws)}")
    values, start = {}, 0
    for name in fields:
        values[name] = laws[name](u[:, start : start + laws[name].size])
        start += laws[name].size
    return record(**values)


def _total(laws: dict[str, Law]) -> int:
    return sum(law.size for law in laws.values())


@checked
def sample(
    key: PRNGKey | None,
    width: Count,
    record: Record,
    laws: Laws,
    *,
    labels: Labels = None,
    quasi: bool = False,
) -> Cloud:
    """Draw ``width`` particles of type ``record``, coordinate ``name`` from ``laws[name]``: independent or well spread.

    Args:
        key: PRNG key; may be None for ``quasi``.
        width: number of particles.
        record: type of the particles, a NamedTuple.
        laws: a law for each coordinate. It may also be a number, or a function that maps uniform numbers (width,) in
            (0, 1) to values (width,).
        labels: a number or one per particle, as in ``Cloud``.
        quasi: take an additive low-discrepancy (Weyl) sequence, nested in ``width``: the k-th point of the unit cube is
            frac(shift + k / g^j), j = 1..size, with g the root of g^(size+1) = g + 1. Function errors fall almost like
            1/width instead of 1/sqrt(width). The shift is 1/2, or uniform with a key: then averages over keys are
            unbiased, and their spread measures the error.

    >>> import jax
    >>> from meanflow.measures import Polar, laws
    >>> given = {"r": laws.uniform(), "theta": laws.angle()}
    >>> cloud = sample(jax.random.key(0), 5, Polar, given)
    >>> cloud.particles.r.shape, float(cloud.width)
    ((5,), 5.0)
    >>> cloud = sample(None, 64, Polar, given, quasi=True)
    >>> abs(float(cloud.weights @ cloud.particles.r)) < 2 / 64
    True
    """
    size = _total(laws)
    if quasi:
        root = 2.0
        # the fixed point of g = (1 + g)^(1/(size + 1)), which contracts
        for _ in range(64):
            root = (1.0 + root) ** (1.0 / (size + 1))
        shift = jnp.full((size,), 0.5) if key is None else jax.random.uniform(key, (size,))
        # whole turns are taken off in float64, before the shift is added in the working precision
        turns = np.mod(np.arange(1, width + 1)[:, None] * root ** -np.arange(1.0, size + 1), 1.0)
        u = jnp.mod(shift[None, :] + jnp.asarray(turns, shift.dtype), 1.0)
    else:
        # None is for quasi-random particles alone
        prng_key("key", key)
        # 0 itself must not be drawn: the normal law would map it to minus infinity
        tiny = jnp.finfo(jnp.result_type(float)).tiny
        u = jax.random.uniform(key, (width, size), minval=tiny)  # type: ignore[arg-type]
    return Cloud(_particles(record, laws, u), labels=labels)


@checked
def quadrature(
    counts: tuple[Count, ...],
    record: Record,
    laws: Laws,
    *,
    rule: Annotated[str | tuple[str, ...], either(RULE, sequence(RULE))] = "midpoint",
    labels: Labels = None,
) -> Cloud:
    """Build a tensor-product quadrature cloud that stands for m = infinity (``cloud.width`` is infinite).

    Args:
        counts: nodes for each of the numbers the laws consume, in the order of the record's fields.
        rule: ``"midpoint"`` (spectrally accurate for angles) or ``"gauss"`` (Gauss-Legendre, for smooth
            non-periodic coordinates); a tuple gives one rule per number.
        labels: a number or one per particle, as in ``Cloud``.

    >>> from meanflow.measures import Polar, laws
    >>> cloud = quadrature((3, 8), Polar, {"r": laws.uniform(), "theta": laws.angle()}, rule=("gauss", "midpoint"))
    >>> cloud.size, float(cloud.width), round(float(cloud.weights @ cloud.particles.r**2), 12)
    (24, inf, 0.333333333333)
    """
    size = _total(laws)
    if len(counts) != size:
        raise ValueError(f"counts must list {size} numbers of nodes for these laws, got {counts}")
    if math.prod(counts) * max(size, 1) > _boundary.MOST:
        raise ValueError(f"counts must multiply to at most {_boundary.MOST} nodes, got {counts}")
    rules = (rule,) * size if isinstance(rule, str) else rule
    if len(rules) != size:
        raise ValueError(f"rule must be one name, or {size} names for these laws, got {rules}")
    axes, shares = zip(*(_NODES[kind](count) for count, kind in zip(counts, rules, strict=True)), strict=True)
    # the last number varies fastest in both, so that nodes and weights stay together
    u = np.stack([axis.ravel() for axis in np.meshgrid(*axes, indexing="ij")], axis=-1)
    p = np.prod([share.ravel() for share in np.meshgrid(*shares, indexing="ij")], axis=0)
    return Cloud(_particles(record, laws, jnp.asarray(u)), jnp.asarray(p / p.sum()), labels, width=np.inf)
