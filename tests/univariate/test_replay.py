"""What reverse mode differentiates of an event: the same values and derivatives as the event itself."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from meanflow.flows._kinks import passage
from meanflow.univariate import _events as events
from meanflow.univariate import _forces as forces

SMOOTH = ("u", "v", "c", "left")


def pairs(seed, samples, rates, turns=12, m=300):
    """Neurons before and after each of their first events, from random starts, some at p = 0 or c = 0."""
    rng = np.random.default_rng(seed)
    x = jnp.asarray(np.sort(rng.uniform(-1, 1, samples)))
    covector = jnp.asarray(rng.standard_normal(samples))
    u, v, c = (rng.standard_normal(m) for _ in range(3))
    c[:10] = 0.0
    region = forces.find_regions(jnp.stack([u, v], axis=-1), x)
    ray = np.full(m, -1, np.int32)
    ray[10:40] = rng.integers(0, 2 * samples, 30)  # on a ray, of which the last ones are at p = 0
    ends = np.asarray(events.freeze(x, covector, forward=True).rays)[ray[10:40], :2] * rng.uniform(
        0, 2, (30, 1)
    )
    ends[20:] = 0.0
    u[10:40], v[10:40] = ends.T
    region = region.at[10:40].set(jnp.asarray(ray[10:40]))
    own = passage.Rates(*(jnp.full(m, rate) for rate in rates), jnp.ones(m, bool))
    now = events.MovingNeurons(
        *map(jnp.asarray, (u, v, c)), region, jnp.asarray(ray), jnp.zeros(m, bool), jnp.full(m, 4.0)
    )
    field = events.freeze(x, covector, forward=True)
    advance, found = jax.jit(events.advance), []
    for _ in range(turns):
        after, _ = advance(now, own, field)
        found.append((now, after))
        now = after
    return x, covector, own, found


@jax.jit
def both(before, after, rates, x, covector, slopes):
    """The smooth fields after the event and what ``slopes`` of them pull back to, by the event and by its replay."""

    def given(smooth, inner, outer, x, covector, forward):
        start = before._replace(**dict(zip(SMOOTH, smooth, strict=True)))
        own = rates._replace(inner=inner, outer=outer)
        field = events.freeze(x, covector, forward=forward)
        end = events.advance(start, own, field)[0] if forward else events.replay(start, after, own, field)
        return tuple(getattr(end, name) for name in SMOOTH)

    arguments = tuple(getattr(before, name) for name in SMOOTH), rates.inner, rates.outer, x, covector
    results = []
    for forward in (True, False):
        value, pull = jax.vjp(lambda *a, forward=forward: given(*a, forward), *arguments)
        results.append((value, pull(slopes)))
    return results


@pytest.mark.parametrize(
    ("samples", "rates"),
    [(7, (1.0, 1.0)), (7, (0.7, 1.6)), (7, (1.0, 0.0)), (7, (0.0, 1.0)), (1, (1.0, 1.0))],
)
def test_replay_is_the_event(samples, rates):
    """Crossings, captures, sliding, releases, p = 0, c = 0, neurons that are done, and frozen layers."""
    x, covector, own, found = pairs(samples, samples, rates)
    rng = np.random.default_rng(1)
    kinds = dict.fromkeys(("arrives", "slides", "through", "halts", "leaves", "done"), 0)
    for before, after in found:
        slopes = tuple(jnp.asarray(rng.standard_normal(before.u.shape)) for _ in SMOOTH)
        (value, pulled), (again, lean) = both(before, after, own, x, covector, slopes)
        np.testing.assert_allclose(np.stack(again), np.stack(value), rtol=0, atol=1e-12)
        wanted, got = np.stack([*pulled[0], *pulled[1:3]]), np.stack([*lean[0], *lean[1:3]])
        # At p = 0, which is a constant of the event before, the height over every ray is a tie of max(z, 0).
        origin = np.asarray((before.u == 0) & (before.v == 0))
        wanted[:2, origin] = got[:2, origin] = 0.0
        # near grazing a derivative is large, and so is its rounding
        size = 1 + np.max(np.abs(wanted), axis=0)
        np.testing.assert_allclose(got / size, wanted / size, rtol=0, atol=1e-8)
        for u, v in zip(lean[3:], pulled[3:], strict=True):
            np.testing.assert_allclose(u, v, rtol=1e-8, atol=1e-8 * float(np.max(size)))
        moving = np.asarray(before.left > 0)
        slides = np.asarray((after.ray >= 0) & ~after.fresh) & moving
        passed = slides & np.asarray(after.ray != before.ray)
        kinds["arrives"] += int(np.sum(moving & np.asarray(after.fresh)))
        kinds["slides"] += int(np.sum(slides))
        kinds["through"] += int(np.sum(passed))
        kinds["halts"] += int(np.sum(slides & ~passed & np.asarray(after.left > 0)))
        kinds["leaves"] += int(np.sum(moving & np.asarray(before.ray >= 0) & ~slides))
        kinds["done"] += int(np.sum(~moving))
    assert kinds["done"] > 0
    if samples > 1 and min(rates) > 0:
        assert min(kinds.values()) > 0, kinds
