"""What is differentiated of an event: the same values and derivatives as the event itself."""

from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from meanflow.flows._kinks import passage
from meanflow.univariate import _events as events
from meanflow.univariate import _forces as forces


def smooth_time(scaled, g2):
    """``cell.clock_time`` with derivatives: t = T artanh(u)/u with u = g T/2, by a series if u is small."""
    good = jnp.isfinite(scaled)
    known = jnp.where(good, scaled, 0.0)
    square = g2 * known**2 / 4
    small = square < 0.03
    u = jnp.sqrt(jnp.where(small, 0.25, square))
    series = sum(jnp.where(small, square, 0.0) ** n / (2 * n + 1) for n in range(11))
    return jnp.where(good, known * jnp.where(small, series, jnp.arctanh(u) / u), jnp.inf)


def pairs(seed, samples, rates, turns=12, m=300):
    """Neurons before and after each of their first events, and these, from random starts, some at p = 0, c = 0."""
    rng = np.random.default_rng(seed)
    x = jnp.asarray(np.sort(rng.uniform(-1, 1, samples)))
    covector = jnp.asarray(rng.standard_normal(samples))
    u, v, c = (rng.standard_normal(m) for _ in range(3))
    c[:10] = 0.0
    region = forces.find_regions(jnp.stack([u, v], axis=-1), x)
    ray = np.full(m, -1, np.int32)
    ray[10:40] = rng.integers(0, 2 * samples, 30)  # on a ray, of which the last ones are at p = 0
    ends = np.asarray(events.freeze(x, covector)[1].rays)[ray[10:40], :2] * rng.uniform(0, 2, (30, 1))
    ends[20:] = 0.0
    u[10:40], v[10:40] = ends.T
    region = region.at[10:40].set(jnp.asarray(ray[10:40]))
    own = passage.Rates(*(jnp.full(m, rate) for rate in rates), jnp.ones(m, bool))
    moving = events.Moving(*map(jnp.asarray, (u, v, c)), jnp.full(m, 4.0))
    now = events.MovingNeurons(moving, region, jnp.asarray(ray), jnp.zeros(m, bool))
    frozen = events.freeze(x, covector)
    advance, found = jax.jit(lambda now: events.advance(passage.Task(now, own, *frozen))), []
    for _ in range(turns):
        after, event, _ = advance(now)
        found.append((now, event, after))
        now = after
    return x, covector, own, found


@jax.jit
def both(before, event, rates, x, covector, slopes):
    """The smooth fields after the event and what ``slopes`` of them pull back to, by the event and by ``carry``."""

    def given(smooth, inner, outer, x, covector, whole):
        start = before._replace(moving=events.Moving(*smooth))
        own = rates._replace(inner=inner, outer=outer)
        field, tables = events.freeze(x, covector)
        if whole:
            with mock.patch.object(events, "clock_time", smooth_time):
                return tuple(events.advance(passage.Task(start, own, field, tables))[0].moving)
        end = events.carry(start.moving, event, own, field)
        return tuple(jnp.where(event.moves, u, v) for u, v in zip(end, start.moving, strict=True))

    arguments = tuple(before.moving), rates.inner, rates.outer, x, covector
    results = []
    for whole in (True, False):
        value, pull = jax.vjp(lambda *a, whole=whole: given(*a, whole), *arguments)
        results.append((value, pull(slopes)))
    return results


@pytest.mark.parametrize(
    ("samples", "rates"),
    [(7, (1.0, 1.0)), (7, (0.7, 1.6)), (7, (1.0, 0.0)), (7, (0.0, 1.0)), (1, (1.0, 1.0))],
)
def test_the_smooth_motion_is_the_event(samples, rates):
    """Crossings, captures, sliding, releases, p = 0, c = 0, neurons that are done, and frozen layers."""
    x, covector, own, found = pairs(samples, samples, rates)
    rng = np.random.default_rng(1)
    kinds = dict.fromkeys(("arrives", "slides", "through", "halts", "leaves", "done"), 0)
    for before, event, after in found:
        slopes = tuple(jnp.asarray(rng.standard_normal(before.ray.shape)) for _ in before.moving)
        (value, pulled), (again, lean) = both(before, event, own, x, covector, slopes)
        np.testing.assert_allclose(np.stack(again), np.stack(value), rtol=0, atol=1e-12)
        wanted, got = np.stack([*pulled[0], *pulled[1:3]]), np.stack([*lean[0], *lean[1:3]])
        # At p = 0, which is a constant of the event before, the height over every ray is a tie of max(z, 0).
        origin = np.asarray((before.moving.u == 0) & (before.moving.v == 0))
        wanted[:2, origin] = got[:2, origin] = 0.0
        # near grazing a derivative is large, and so is its rounding
        size = 1 + np.max(np.abs(wanted), axis=0)
        np.testing.assert_allclose(got / size, wanted / size, rtol=0, atol=1e-8)
        for u, v in zip(lean[3:], pulled[3:], strict=True):
            np.testing.assert_allclose(u, v, rtol=1e-8, atol=1e-8 * float(np.max(size)))
        moving = np.asarray(before.moving.left > 0)
        slides = np.asarray((after.ray >= 0) & ~after.fresh) & moving
        passed = slides & np.asarray(after.ray != before.ray)
        kinds["arrives"] += int(np.sum(moving & np.asarray(after.fresh)))
        kinds["slides"] += int(np.sum(slides))
        kinds["through"] += int(np.sum(passed))
        kinds["halts"] += int(np.sum(slides & ~passed & np.asarray(after.moving.left > 0)))
        kinds["leaves"] += int(np.sum(moving & np.asarray(before.ray >= 0) & ~slides))
        kinds["done"] += int(np.sum(~moving))
    assert kinds["done"] > 0
    if samples > 1 and min(rates) > 0:
        assert min(kinds.values()) > 0, kinds
