"""Functions of equal value are one function; anything else stays apart. What is compiled again, and what is not."""

import diffrax
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import problem

import meanflow as mf
from meanflow._reuse import canonical

SCALE = 2.0


def scaled(c):
    return lambda z: c * jnp.tanh(z)


def test_equal_functions_are_one_and_others_are_not():
    assert canonical(scaled(2.0)) is canonical(scaled(2.0))
    assert canonical(scaled(2.0)) is not canonical(scaled(2))
    assert canonical(scaled(np.ones(2))) is canonical(scaled(np.ones(2)))
    assert canonical(scaled(np.ones(2))) is not canonical(scaled(np.zeros(2)))
    assert canonical(optax.adam(0.1)) is canonical(optax.adam(0.1))
    assert canonical(optax.adam(0.1)) is not canonical(optax.adam(0.2))
    assert canonical(optax.adam(0.1)) is not canonical(optax.adamw(0.1))
    chained = lambda: optax.chain(optax.clip(1.0), optax.sgd(optax.cosine_decay_schedule(0.1, 10)))
    assert canonical(chained()) is canonical(chained())
    unknown = [object(), object()]
    assert canonical(scaled(unknown[0])) is not canonical(scaled(unknown[1]))
    assert canonical(scaled(unknown[0])) is canonical(scaled(unknown[0]))


def test_what_a_function_names_and_holds_is_part_of_its_value(monkeypatch):
    make = lambda: lambda z: SCALE * z
    first = make()
    assert canonical(first) is first
    monkeypatch.setitem(globals(), "SCALE", 3.0)
    # the meaning of the old object has changed: nothing new may be mistaken for it, or it for anything new
    assert canonical(first) is first
    second = make()
    assert canonical(second) is second
    monkeypatch.setitem(globals(), "SCALE", 2.0)
    third = make()
    assert canonical(third) in (first, third)
    held = [1.0]
    old = canonical(scaled(held))
    held[0] = 5.0
    new = scaled([1.0])
    assert canonical(new) is new
    assert canonical(scaled([5.0])) is not old


def test_traced_values_are_left_alone():
    seen = []

    @jax.jit
    def inside(c):
        f = scaled(c)
        seen.append(canonical(f) is f)
        return f(c)

    inside(1.0)
    assert seen == [True]


def compilations(caplog, run):
    """How many programs a second, equal call compiles."""
    run()
    caplog.clear()
    with jax.log_compiles():
        run()
    return sum("Finished XLA compilation" in r.getMessage() for r in caplog.records)


def test_calls_with_equal_parts_made_anew_compile_nothing(caplog):
    """A fresh activation, loss, penalty, observer, optimizer; another learning rate compiles, as the page says."""
    _, cloud, data = problem("vanilla", width=3, points=6)

    def run():
        flow = mf.vanilla(scaled(2.0), lambda f, y: (f - y) ** 4, penalty=(lambda w: w.a**2, 0.1))
        watch = {"size": lambda flow, cloud, data: jnp.max(cloud.particles.a)}
        return mf.descend(flow, cloud, data, 2, optimizer=optax.adam(0.1), observe=watch).energy

    assert compilations(caplog, run) == 0


def test_halved_steps_compile_nothing(caplog):
    flow, cloud, data = problem("vanilla", width=3, points=6)
    steps = iter((0.1, 0.05, 0.025))
    run = lambda: mf.solve(flow, cloud, data, 1.0, solver=diffrax.Euler(), step=next(steps)).energy
    assert compilations(caplog, run) == 0


@pytest.mark.parametrize("count", [1, 16, 17, 256, 257, 5000])
def test_limits_of_steps_suffice(count):
    from meanflow.solvers._step import ConstantStep

    limit = ConstantStep(np.asarray(1.0 / count)).limit(np.asarray(0.0), np.asarray(1.0), 0)
    assert count + 2 <= limit <= max(4096, 16 * (count + 2))
