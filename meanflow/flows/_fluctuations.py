"""Fluctuations: how networks of random neurons scatter around the run of one cloud, to first order in 1/m.

Let F(mu) be what is observed of a run that starts at the measure mu, and mu_m the measure of m neurons that are drawn
independently from mu = sum_i p_i delta_i. A network of finite width obeys the same equation as the limit, so only the
start is random, and

    m Cov F(mu_m)          ->  sum_i p_i (I_i - <I>)^2 ,  I_i = dF/dp_i                  (the influence)
    m (E F(mu_m) - F(mu))  ->  1/2 sum_i p_i D^2 F[delta_i - mu, delta_i - mu]

Both are derivatives of F along the directions u_i = sqrt(p_i) (delta_i - mu) of the weights, which keep the total mass:
the covariance is sum_i (D_i F)^2 and the bias 1/2 sum_i D_i^2 F, which is also the mean of 1/2 D_v^2 F over the random
directions v = sum_i +-u_i (Hutchinson).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PyTree

from meanflow._loops import KeyBits
from meanflow._numerics import safe_divide, safe_sqrt
from meanflow._observable import Observable, Observables, Values
from meanflow.measures._cloud import Cloud

EXACT = 1024  # most units of a quadrature cloud whose bias is summed over all of them unless asked otherwise
RANDOM = 8  # random directions otherwise
# offsets in steps and weights of the second difference, without the weight of the middle
NARROW = ((1.0, -1.0), (1.0, 1.0))  # error of order h^2
WIDE = ((1.0, -1.0, 2.0, -2.0), (4 / 3, 4 / 3, -1 / 12, -1 / 12))  # error of order h^4


class Difference(NamedTuple):
    """How second derivatives are taken.

    Attributes:
        step: the distance h of the points.
        smooth: whether F has fourth derivatives; otherwise h is as large as the fluctuations themselves.
        exact: whether the sum runs over all units instead of random directions.
    """

    step: float
    smooth: bool
    exact: bool


class Fluctuations(Observable):
    """Mean, covariance and bias over initializations of what another observable sees along the run.

    It looks at runs, not at states: solvers and sweeps compute it from runs of the same kind with other weights.

    Attributes:
        of: the observable, or several by name.
        key: of the random directions; None for ``jax.random.key(0)``.
        directions: how many random directions the bias is averaged over; 0 for no bias; None for the default.
        paired: whether two neighbours each were drawn together.
        chunk: most runs that are computed at once.
    """

    of: Observables
    key: KeyBits | None = None
    directions: int | None = eqx.field(static=True, default=None)
    paired: bool = eqx.field(static=True, default=False)
    chunk: int = eqx.field(static=True, default=64)

    def measure(self, problem: object, cloud: Cloud, memory: Values) -> Values:
        """Refuse: one state does not tell how others would have come about."""
        raise ValueError(
            "observe must not hold fluctuations here: solve, descend and sweep record them, of whole runs"
        )

    def parts(self, cloud: Cloud) -> int:
        """Return how many parts of the cloud are independent: neurons, or pairs of them."""
        if self.paired and cloud.size % 2:
            raise ValueError(f"paired needs an even number of particles, got {cloud.size}")
        return cloud.size // (1 + self.paired)

    def moved(self, cloud: Cloud, z: Float[Array, " units"]) -> Cloud:
        """Return the cloud with the weights p + sum_i z_i u_i."""
        members = 1 + self.paired
        mass = jnp.sum(cloud.weights.reshape(-1, members), axis=1)
        root = safe_sqrt(mass / cloud.total)
        each = safe_divide(cloud.total * root * z, mass)  # padding has no mass, and keeps none
        weights = cloud.weights * (1 + jnp.repeat(each, members) - root @ z)
        return eqx.tree_at(lambda c: c.weights, cloud, weights)

    def of_runs(
        self, run: Callable[[Cloud, bool], Values], cloud: Cloud, forward: bool, how: Difference
    ) -> dict[str, Values]:
        """Return ``mean``, ``covariance``, ``bias`` and its standard error ``bias_error``.

        Args:
            run: (cloud, whether forward mode will differentiate) -> what ``of`` sees along a run that starts there,
                with a leading axis of times.
            cloud: where the run starts.
            forward: whether only forward mode passes through it.
            how: how the second derivatives are taken.
        """
        units = self.parts(cloud)
        zero = jnp.zeros(units, cloud.weights.dtype)
        like = jax.eval_shape(lambda: run(cloud, True))
        shapes = [u.shape for u in jax.tree.leaves(like)]
        times = shapes[0][0]
        joined = lambda tree: jnp.concatenate(
            [u.reshape(times, -1).astype(zero.dtype) for u in jax.tree.leaves(tree)], axis=1
        )
        apply = lambda z, forward: joined(run(self.moved(cloud, z), forward))
        # neurons of weight 1/m each: m of them are m / members independent units
        members = 1 + self.paired
        entries = sum(jax.tree.leaves(jax.tree.map(lambda u: u.size // times, like)))
        if forward or units <= times * entries:
            mean = apply(zero, True)
            push = lambda v: jax.jvp(lambda z: apply(z, True), (zero,), (v,))[1]
            rows = _chunked(lambda k: push(_unit(units, k, zero.dtype)), units, self.chunk)
            covariance = members * jnp.einsum("ite,itf->tef", rows, rows)
        else:
            mean, pull = jax.vjp(lambda z: apply(z, False), zero)

            def block(time: Array) -> Array:  # one time after the other: no array of particles and times
                one = lambda entry: pull(jnp.zeros_like(mean).at[time, entry].set(1.0))[0]
                rows = _chunked(one, entries, self.chunk)
                return members * rows @ rows.T

            covariance = _mapped(block, jnp.arange(times))
        found = {"mean": _split(mean, like, 1), "covariance": _split(covariance, like, 2)}
        if self.directions == 0:
            return found
        bias, error = self._bias(lambda z: apply(z, True), mean, units, how)
        return found | {
            "bias": _split(members * bias, like, 1),
            "bias_error": _split(members * error, like, 1),
        }

    def _bias(
        self, apply: Callable[[Array], Array], mean: Array, units: int, how: Difference
    ) -> tuple[Array, Array]:
        """Return half the sum of the second derivatives along all u_i, and its standard error."""
        count = units if how.exact else (self.directions or RANDOM)
        key = jax.random.key(0) if self.key is None else self.key.key
        offsets, shares = WIDE if how.smooth else NARROW
        shift, share = how.step * jnp.asarray(offsets, mean.dtype), jnp.asarray(shares, mean.dtype)

        # in this order of the axes padding changes no sign
        signs = None if how.exact else jax.random.rademacher(key, (units, count), jnp.int8)

        def half_curvature(number: Array) -> Array:
            v = _unit(units, number, mean.dtype) if signs is None else signs[:, number].astype(mean.dtype)
            around = jax.vmap(lambda h: apply(h * v))(shift)
            return jnp.tensordot(share, around - mean[None], 1) / (2 * how.step**2)

        rows = _chunked(half_curvature, count, max(self.chunk // len(offsets), 1))
        if how.exact:
            return jnp.sum(rows, axis=0), jnp.zeros_like(mean)
        spread = jnp.std(rows, axis=0, ddof=1) if count > 1 else jnp.full_like(mean, jnp.inf)
        return jnp.mean(rows, axis=0), spread / count**0.5


def _unit(size: int, place: Array, dtype: jnp.dtype) -> Array:
    return (jnp.arange(size) == place).astype(dtype)


def _chunked(function: Callable[[Array], Array], count: int, chunk: int) -> Array:
    """Return function(0), ..., function(count - 1), stacked; at most ``chunk`` of them are computed at once."""
    rounds = -(-count // chunk)
    size = -(-count // rounds)
    # what is too many in the last round repeats the first numbers: a shorter round would be another program
    numbers = (jnp.arange(rounds * size) % count).reshape(rounds, size)
    found = _mapped(jax.vmap(function), numbers)
    return found.reshape(rounds * size, *found.shape[2:])[:count]


def _mapped(function: Callable[[Array], Array], numbers: Array) -> Array:
    """Return ``jax.lax.map(function, numbers)``; a loop of one round is left out, which compiles sooner."""
    return function(numbers[0])[None] if len(numbers) == 1 else jax.lax.map(function, numbers)


def _split(joined: Array, like: PyTree, copies: int) -> Values:
    """Return the parts of an array (times, entries, ...) of all entries in the structure of ``like``.

    With two ``copies`` of the axis of entries each part is the block of its own entries.
    """
    leaves, structure = jax.tree.flatten(like)
    start, parts = 0, []
    for leaf in leaves:
        times, *shape = leaf.shape
        own = slice(start, start := start + leaf.size // times)
        parts.append(joined[(slice(None), *(own,) * copies)].reshape(times, *shape * copies))
    return jax.tree.unflatten(structure, parts)
