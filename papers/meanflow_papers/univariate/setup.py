"""Data sets, starts and statistics that the figures of paper 004 share.

Set-ups and pass criteria are those that were measured independently; where they correct the paper's story
the finding says so. Gradient descent uses the step kappa / lambda_max(K), renewed every few epochs
(``KernelStep``).
"""

from collections.abc import Callable
from typing import TypeAlias, TypeVar

import jax
import jax.numpy as jnp

from meanflow import univariate as uni
from meanflow.flows import Flow
from meanflow.measures import Affine, Cloud, Dataset, Polar
from meanflow.solvers import KernelStep, descend
from meanflow.univariate import balance, knots

Rate: TypeAlias = float | jax.Array  # a number, which may be traced
Tree = TypeVar("Tree")  # arrays of times, or dictionaries and tuples of them

SQUARE_WAVE = (1.0, 1, 1, -1, -1, -1, 1, 1, 1, -1)


def square_wave() -> Dataset:
    """Ten points of a square wave on [-1, 1], losses summed."""
    return Dataset(jnp.linspace(-1, 1, 10), jnp.array(SQUARE_WAVE), weights="sum")


def sinusoid(count: int = 20) -> Dataset:
    """``count`` points of sin(2 pi x) on [-1, 1], losses summed."""
    x = jnp.linspace(-1, 1, count)
    return Dataset(x, jnp.sin(2 * jnp.pi * x), weights="sum")


def random_neurons(key: jax.Array, width: int, scale: float = 3.0) -> Polar:
    """Angles of (a, b) uniform in a square, r uniform in (-scale, scale)."""
    ab = jax.random.uniform(key, (2, width), minval=-1.0)
    r = scale * jax.random.uniform(jax.random.fold_in(key, 1), (width,), minval=-1.0)
    return Polar(r, jnp.arctan2(-ab[1], ab[0]))


def random_weights(key: jax.Array, width: int, law: str) -> tuple[jax.Array, jax.Array]:
    """Draw a and b, (width,) each, of a law of ``univariate.wide_kernel`` by its name, with its usual parameters."""
    if law == "radial":
        a, b = jax.random.normal(key, (2, width))
        return a, b
    slopes, biases = jax.random.split(key)
    b = jax.random.uniform(biases, (width,), minval=-1.0)
    if law == "signs":
        return jax.random.rademacher(slopes, (width,), b.dtype), b
    return jax.random.uniform(slopes, (width,), minval=-1.0), b


def concentrations(w: Affine, x: jax.Array, bins: int) -> dict[str, jax.Array]:
    """Return the share of the slope jumps |c a| in the ``bins`` fullest of 110 bins on [-1.1, 1.1], in three readings.

    They differ in what the whole is: the jumps inside that window ("concentration"), all jumps of the network
    ("concentration_of_all"), or the jumps of the neurons that are active on some sample ("concentration_of_live").
    The first is the one by definition: the bins cover the window, and a knot outside it does not bend f there. Criteria
    are stated for all three, so that nothing hangs on the choice.
    """
    knot, jump = w.b / jnp.where(w.a == 0, jnp.inf, w.a), jnp.abs(w.c * w.a)
    live = jnp.maximum(w.a * jnp.max(x), w.a * jnp.min(x)) > w.b
    inside = jnp.abs(knot) <= 1.1

    def of(mass: jax.Array) -> jax.Array:
        return knots.concentration(knot, mass, bins) * jnp.sum(jnp.where(inside, mass, 0)) / jnp.sum(mass)

    return {
        "concentration": knots.concentration(knot, jump, bins),
        "concentration_of_all": of(jump),
        "concentration_of_live": of(jnp.where(live, jump, 0)),
    }


def statistics(start: Affine, end: Affine, x: jax.Array, bins: int) -> dict[str, jax.Array]:
    """Return the share of knots on samples, concentrations, rms turn and drift of the balance of one run."""
    knot = lambda w: w.b / jnp.where(w.a == 0, jnp.inf, w.a)
    moved = jnp.abs(balance.balance(end) - balance.balance(start))
    return {
        "share": knots.on_sample_share(knot(end), x),
        "weighted_share": knots.on_sample_share(knot(end), x, mass=jnp.abs(end.c * end.a)),
        "share_before": knots.on_sample_share(knot(start), x),
        **concentrations(end, x, bins),
        "concentration_before": concentrations(start, x, bins)["concentration"],
        "turn": rms_turn(start, end),
        "drift": jnp.max(moved / (1 + jnp.abs(balance.balance(start)))),
        "dead": knots.dead_share(end.a, end.b, x),
        "fraction": jnp.median(tangential_fraction(balance.balance(end), end.c * jnp.hypot(end.a, end.b))),
    }


def tangential_fraction(delta: Rate, q: Rate) -> jax.Array:
    """Return c^2/(c^2 + n^2), the share of a neuron's mobility that turns it, from its balance and q = c n.

    0 is the kernel regime (delta -> -inf), 1 the adaptive one (delta -> +inf). The share equals
    (1 + k/sqrt(1 + k^2))/2 with k = delta/(2 |q|), q = alpha r/m, but is computed without its cancellation; it is 1/2
    at delta = q = 0.
    """
    delta, q = jnp.broadcast_arrays(*(jnp.asarray(u, jnp.result_type(delta, q, float)) for u in (delta, q)))
    endless = jnp.isinf(delta)
    c, n = balance.split(q, jnp.where(endless, 0.0, delta))
    whole = c**2 + n**2
    fraction = jnp.where(whole > 0, c**2 / jnp.where(whole > 0, whole, 1.0), 0.5)
    return jnp.where(endless, (delta > 0).astype(fraction.dtype), fraction)


def rms_turn(start: Affine, end: Affine) -> jax.Array:
    """Return the root mean square, over neurons, of the angle by which (a, -b) has turned."""
    turn = jnp.arctan2(-end.b, end.a) - jnp.arctan2(-start.b, start.a)
    return jnp.sqrt(jnp.mean(jnp.arctan2(jnp.sin(turn), jnp.cos(turn)) ** 2))


def layer_rates(delta: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return the rates of the inner and the outer layer: 0 for (a, b) at delta = -inf and for c at +inf, else 1."""
    return jnp.where(jnp.isneginf(delta), 0.0, 1.0), jnp.where(jnp.isposinf(delta), 0.0, 1.0)


def train(
    data: Dataset, epochs: int, refresh: int | None, bins: int, alpha: str | float = "sqrt", saves: int = 1
) -> Callable[..., tuple[jax.Array, dict[str, jax.Array], Affine]]:
    """One run (particles, inner, outer, kappa) -> losses, statistics (both at ``saves`` + 1 times), final neurons.

    The step is kappa / lambda_max(K), renewed every ``refresh`` epochs; with None it is kappa. Made for vmap.
    """

    def see(flow: Flow, cloud: Cloud, data: Dataset, start: Cloud) -> dict[str, jax.Array]:
        return statistics(start.particles, cloud.particles, data.x, bins)

    def run(
        w: Affine, inner: Rate, outer: Rate, kappa: Rate
    ) -> tuple[jax.Array, dict[str, jax.Array], Affine]:
        flow = uni.full(alpha=alpha, inner=inner, outer=outer)
        step = kappa if refresh is None else KernelStep(kappa, refresh)
        out = descend(
            flow, Cloud(w), data, epochs, step=step, every=epochs // saves, observe=see, clock="gradient"
        )
        return out.energy, out.observed, out.final.particles

    return run


def last(values: Tree) -> Tree:
    """The entries at the last save."""
    return jax.tree.map(lambda u: u[..., -1], values)


def planar_start(key: jax.Array, width: int, scale: float = 3.0) -> Affine:
    """Draw neurons with delta = +inf and |r| up to ``scale``, in raw coordinates with alpha = sqrt m."""
    return balance.lift(Cloud(random_neurons(key, width, scale), labels=jnp.inf), "sqrt").particles
