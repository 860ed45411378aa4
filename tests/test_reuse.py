"""Functions of equal value are one function; anything else stays apart. What is compiled again, and what is not."""

import gc
import importlib
import os
import pathlib
import subprocess
import sys
import time
import weakref

import diffrax
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import problem

import meanflow as mf
from meanflow import _reuse
from meanflow._identity import describe
from meanflow._reuse import KEPT, canonical, compiled

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
    from meanflow.solvers import ConstantStep

    limit = ConstantStep(np.asarray(1.0 / count)).limit(np.asarray(0.0), np.asarray(1.0), 0)
    assert count + 2 <= limit <= max(4096, 16 * (count + 2))


class Held:
    """Something that a closure captures."""

    value = 1.0


def closure(held, number=0.0):
    return lambda z: jnp.tanh(held.value * z) + number


def calls(kind):
    """A function that uses a fresh closure once."""
    flow, cloud, data = problem("vanilla", width=3, points=6)
    return {
        "velocity": lambda f: mf.velocity(mf.vanilla(f), cloud, data),
        "observed": lambda f: mf.descend(
            flow, cloud, data, 2, step=0.1, observe={"size": lambda flow, cloud, data: f(cloud.particles.a)}
        ),
        "solve": lambda f: mf.solve(mf.vanilla(f), cloud, data, 0.5),
        "kernel": lambda f: mf.kernels.empirical_ntk(lambda w, x: f(x @ w), jnp.ones(2), data.x[:, :2]),
    }[kind]


@pytest.mark.parametrize("kind", ["velocity", "kernel", "observed"])
def test_programs_of_closures_that_are_gone_are_let_go(kind):
    use, kept = calls(kind), []
    for _ in range(3):
        held = Held()
        kept.append(weakref.ref(held))
        use(closure(held))
    del held
    gc.collect()
    assert all(one() is not None for one in kept)
    mf.clear_caches()
    gc.collect()
    assert [one() for one in kept] == [None, None, None]


def test_the_number_of_programs_is_bounded():
    scale, kept = compiled(lambda u, held: held.value * u), []
    for number in range(KEPT + 3):
        held = Held()
        held.value = float(number)
        kept.append(weakref.ref(held))
        assert float(scale(jnp.ones(()), held)) == number
    del held
    gc.collect()
    assert [one() is not None for one in kept] == [False] * 3 + [True] * KEPT


def test_types_decide_a_program():
    kinds = compiled(lambda u, other: u * other)
    assert kinds(jnp.ones((), int), 1).dtype != kinds(jnp.ones((), int), 1.0).dtype


def test_unhashable_settings_are_compiled_but_not_kept():
    @compiled
    def total(u, names):
        return u * len(names.value)

    held = type("Names", (Held,), {"__hash__": None, "value": "ab"})()
    assert float(total(jnp.ones(()), held)) == 2


def test_recursion_and_shared_helpers_are_walked_once():
    """Helpers that call each other would be walked again on every path: 2^40 of them here."""
    helpers = {"__name__": "helpers_of_a_user"}
    for level in range(40):
        exec(f"def f{level}(z): return f{level + 1}(f{level + 1}(z)) + g{level + 1}(z)", helpers)
        exec(f"def g{level}(z): return f{level + 1}(z) - g{level + 1}(z)", helpers)
    exec("def f40(z): return f0(z)\ndef g40(z): return z", helpers)
    before = describe(helpers["f0"])
    assert canonical(helpers["f0"]) is helpers["f0"] and before == describe(helpers["f0"])
    exec("def g40(z): return -z", helpers)
    assert describe(helpers["f0"]) != before
    assert describe([helpers["f0"], helpers["f0"]]) == [describe(helpers["f0"])] * 2


def test_names_are_imported_once_and_helpers_are_not_listed(monkeypatch):
    assert mf.solve is mf.solve
    monkeypatch.setattr(importlib, "import_module", None)
    assert callable(mf.solve) and not [name for name in dir(mf) if name.startswith("_")]


GROWTH = """
import gc, pathlib, resource, jax
jax.config.update("jax_enable_x64", True)
from test_reuse import Held, calls, closure
pages = lambda: int(pathlib.Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()
use = calls("{kind}")
use(closure(Held()))
gc.collect()
before = pages()
for number in range({count}):
    use(closure(Held(), number / {count}))
gc.collect()
print((pages() - before) / 1e6)
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads the memory of a process from /proc")
@pytest.mark.parametrize("kind", ["velocity", "kernel", "observed"])
def test_fresh_closures_do_not_fill_the_memory(kind):
    code = GROWTH.format(kind=kind, count=500)
    done = subprocess.run([sys.executable, "-c", code], cwd="tests", capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    assert float(done.stdout) < 300


KEEP = """
import jax, jax.numpy as jnp, meanflow as mf
hits = []
jax.monitoring.register_event_listener(lambda event, **_: hits.append(event.endswith("cache_hits")))
place = mf.keep_programs()
print(float(jnp.sum(jax.jit(lambda u: jnp.linalg.inv(jnp.sin(u) @ u.T + jnp.eye(9)))(jnp.ones((9, 3))))))
print(sum(hits), place)
"""


def test_programs_are_found_by_the_next_process(tmp_path):
    """Silently, in a part of the user's cache for this processor; a folder that is too full loses the oldest."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("JAX_", "TF_", "XLA_"))}
    environment |= {"XDG_CACHE_HOME": str(tmp_path), "PYTHONPATH": os.pathsep.join(sys.path)}

    def run():
        command = [sys.executable, "-c", KEEP]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
        value, hits = done.stdout.splitlines()
        return float(value), int(hits.split()[0]), pathlib.Path(hits.split()[1]), done.stderr

    value, hits, place, _ = run()
    assert hits == 0 and place.parent == tmp_path / "meanflow"
    files = sorted(place.iterdir())
    again, hits, same, said = run()
    assert again == value and hits > 0 and same == place and said == ""
    assert sorted(place.iterdir()) == files
    for number, name in enumerate(("old", "new")):
        (place / name).write_bytes(bytes(1000))
        os.utime(place / name, (number, number))
    before = {name: getattr(jax.config, name) for name in KEPT_OPTIONS}
    try:
        room = 1500 + sum(file.stat().st_size for file in files)
        assert mf.keep_programs(tmp_path / "meanflow", megabytes=1e-6 * room) == place
    finally:
        for name, old in before.items():
            jax.config.update(name, old)
    assert (place / "new").exists() and not (place / "old").exists()


KEPT_OPTIONS = ("jax_compilation_cache_dir", "jax_persistent_cache_min_compile_time_secs")


def test_long_compilations_say_so_on_a_terminal(monkeypatch, capsys):
    monkeypatch.setattr(_reuse, "PATIENCE", 0.02)

    def said():
        slow = compiled(lambda u: (time.sleep(0.2), u)[1])
        within = compiled(lambda u: slow(u) + slow(-u))  # one line for all that is traced inside
        assert float(within(jnp.ones(()))) == float(within(jnp.zeros(())))
        return capsys.readouterr().err

    assert said() == ""
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    assert said() == "meanflow: compiling, 0 s (mf.keep_programs() spares it the next time)\n"
    monkeypatch.setenv("MEANFLOW_QUIET", "1")
    assert said() == ""
