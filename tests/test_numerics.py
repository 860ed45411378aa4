"""Shared numerics against textbook formulas, their derivatives where those have none, and atomic files."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from meanflow._loops import iterate, iterate_until
from meanflow._numerics import (
    loglog_slope,
    safe_divide,
    safe_norm,
    safe_root,
    safe_sqrt,
    wrap_angle,
)
from meanflow.files import PART, atomic_write


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.float64])
def test_safe_roots_and_quotients_are_the_textbook_ones_away_from_zero(dtype):
    u = jnp.asarray([0.3, 2.0, 7.5], dtype)
    for ours, theirs in (
        (safe_sqrt(u), jnp.sqrt(u)),
        (safe_root(u, 3.0), u ** (1 / 3.0)),
        (safe_divide(1 + u, u), (1 + u) / u),
        (safe_norm(u), jnp.sqrt(jnp.sum(u**2))),
    ):
        np.testing.assert_array_equal(ours, theirs)
        assert ours.dtype == dtype


def test_derivatives_at_zero_are_zero():
    zero = jnp.zeros(())
    for function in (safe_sqrt, lambda u: safe_root(u, 3.0), lambda v: safe_divide(jnp.ones(()), v)):
        assert float(function(zero)) == 0.0
        assert float(jax.grad(function)(zero)) == 0.0 == float(jax.jvp(function, (zero,), (1 + zero,))[1])
    np.testing.assert_array_equal(jax.grad(safe_norm)(jnp.zeros(3)), 0.0)


def test_norm_over_axes():
    v = jax.random.normal(jax.random.key(0), (4, 5))
    np.testing.assert_allclose(safe_norm(v), np.linalg.norm(v, axis=1), rtol=1e-14)
    np.testing.assert_allclose(safe_norm(v, 0), np.linalg.norm(v, axis=0), rtol=1e-14)
    np.testing.assert_allclose(safe_norm(v, None), np.linalg.norm(v), rtol=1e-14)
    assert safe_norm(v, keepdims=True).shape == (4, 1)


def test_wrapped_angles_are_the_same_up_to_whole_turns():
    turn = jnp.linspace(-20.0, 20.0, 101)
    wrapped = wrap_angle(turn)
    assert float(jnp.max(jnp.abs(wrapped))) <= np.pi
    np.testing.assert_allclose((turn - wrapped) / (2 * np.pi) % 1 % (1 - 1e-12), 0, atol=1e-12)


def test_slope_of_a_power_law():
    n = np.array([3, 10, 80])
    assert loglog_slope(n, 5.0 * n**-0.5) == pytest.approx(-0.5, abs=1e-12)


def test_iterate_observes_every_few_steps():
    end, seen = iterate(lambda s, u: 2 * s + u, jnp.ones(()), jnp.arange(6.0), 6, 3, lambda s: {"s": s})
    by_hand, states = 1.0, []
    for u in range(6):
        by_hand = 2 * by_hand + u
        states.append(by_hand)
    assert float(end) == by_hand
    assert seen["s"].tolist() == states[2::3]
    with pytest.raises(ValueError, match="multiple of every"):
        iterate(lambda s, u: s, 0.0, None, 5, 2, lambda s: s)


@pytest.mark.parametrize("steps", [1, 4, 5, 23, 60])
def test_derivatives_of_a_loop_until_a_time_are_those_of_the_closed_form(steps):
    """u <- c u + 1 in 4 places, so that the stride of the states that are kept grows up to 16; alone and in a batch."""

    def end(u, c, until):
        state = (u, jnp.asarray(0))
        step = lambda now, stop: (c * now[0] + 1, now[1] + 1)
        more = lambda now, stop: now[1] < stop
        (u, _), seen = iterate_until(
            step,
            state,
            more,
            until[None],
            lambda now, stop: now[0],
            limit=64,
            kind="checkpointed",
            checkpoints=4,
        )
        return u + seen[0]

    closed = lambda u, c, until: 2 * (c**until * u + (1 - c**until) / (1 - c))
    found = jax.grad(end, (0, 1))(0.5, 0.9, jnp.asarray(float(steps)))
    wanted = jax.grad(closed, (0, 1))(0.5, 0.9, float(steps))
    np.testing.assert_allclose(found, wanted, rtol=1e-12)
    batch = jnp.array([float(steps), 3.0, 40.0])
    many = jax.vmap(jax.grad(end, (0, 1)), (None, None, 0))(0.5, 0.9, batch)
    one_by_one = jax.vmap(jax.grad(closed, (0, 1)), (None, None, 0))(0.5, 0.9, batch)
    np.testing.assert_allclose(many, one_by_one, rtol=1e-12)


def test_a_file_is_whole_or_as_before(tmp_path):
    path = tmp_path / "data.npz"
    with atomic_write(path) as part:
        np.savez(part, a=np.arange(3))
        assert part.suffix == ".npz" and part.name.startswith(PART) and not path.exists()
    with pytest.raises(KeyboardInterrupt), atomic_write(path) as part:
        part.write_text("half")
        raise KeyboardInterrupt
    assert [p.name for p in tmp_path.iterdir()] == ["data.npz"]
    assert np.load(path)["a"].tolist() == [0, 1, 2]


def test_a_folder_is_whole_or_absent(tmp_path):
    for fails in (True, False):
        try:
            with atomic_write(tmp_path / "chunk") as part:
                part.mkdir()
                (part / "a").write_text("a")
                if fails:
                    raise OSError("disk full")
        except OSError:
            assert not list(tmp_path.iterdir())
    assert [p.name for p in tmp_path.rglob("*")] == ["chunk", "a"]
