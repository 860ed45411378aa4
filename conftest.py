"""Strict configuration of all tests (tests, benchmarks/tests, papers/tests).

Float64, no silent broadcasting of ranks, one fixed key per test; with ``--beartype`` every call of a function of the
library is checked against the types and array shapes of its signature. ``--brief`` runs a tenth of the tests, some
of every file.
"""

import ctypes
import gc
import itertools
import pathlib
import resource
import sys
import zlib

import jax
import pytest

jax.config.update("jax_enable_x64", True)
jax.config.update("jax_numpy_rank_promotion", "raise")
# Tracing makes and drops many small objects. By default the garbage collector looks through them so often that it takes
# an eighth of the suite's time; `bounded_memory` below collects when memory grows.
gc.set_threshold(100_000, 50, 100)


def pytest_addoption(parser):
    parser.addoption(
        "--beartype", action="store_true", help="check the types and shapes of meanflow's signatures"
    )
    parser.addoption("--brief", action="store_true", help="run the first and every tenth test of each file")


def pytest_configure(config):
    if config.getoption("--beartype"):
        import jaxtyping

        # the hook rewrites modules while they are imported, so it comes before the first import of meanflow
        assert "meanflow" not in sys.modules
        jaxtyping.install_import_hook(["meanflow"], "signatures.check")


def pytest_collection_modifyitems(config, items):
    for item in items:
        if item.get_closest_marker("slow") and not item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(1800))
    if config.getoption("--brief"):
        by_file = {}
        for item in items:
            by_file.setdefault(item.path, []).append(item)
        # the canary, which watches for wrong numbers of the compiler, is kept whole
        chosen = {t for path, tests in by_file.items() for t in tests[:: 1 if "canary" in path.name else 10]}
        config.hook.pytest_deselected(items=[item for item in items if item not in chosen])
        items[:] = [item for item in items if item in chosen]
    if config.getoption("--beartype"):
        skip = pytest.mark.skip(
            reason="passes wrong types on purpose; beartype's own TypeError would come first"
        )
        for item in items:
            if item.get_closest_marker("bad_input"):
                item.add_marker(skip)


MAPS, PAGES = pathlib.Path("/proc/self/maps"), pathlib.Path("/proc/self/statm")
MOST_MAPS = 25_000  # Linux allows a process 65 530 mapped regions; beyond, compiling a program is a segmentation fault
MOST_GROWTH = 2.5e9  # bytes of memory that compiled programs may take until they are forgotten
_tests_done = itertools.count(1)
_held = [0.0]  # bytes that stay when programs have been forgotten


def resident():
    """Return the bytes of memory that this process holds."""
    return float(PAGES.read_text().split()[1]) * resource.getpagesize()


@pytest.fixture(autouse=True)
def double_precision():
    """Fail the test that leaves float64 switched off, in place of those that come after it."""
    yield
    left, _ = jax.config.jax_enable_x64, jax.config.update("jax_enable_x64", True)
    assert left, "this test switched float64 off and did not switch it on again"


@pytest.fixture(autouse=True)
def bounded_memory():
    """Forget compiled programs when they have become many: each keeps memory, in a few mapped regions."""
    yield
    if next(_tests_done) % 10 or not MAPS.exists():
        return
    if MAPS.read_bytes().count(b"\n") > MOST_MAPS or resident() > _held[0] + MOST_GROWTH:
        jax.clear_caches()
        gc.collect()
        # without this the C library keeps the freed memory; others than glibc have no such function
        getattr(ctypes.CDLL(None), "malloc_trim", lambda pad: None)(0)
        _held[0] = resident()


@pytest.fixture
def key(request):
    """A PRNG key fixed by the test's own name, so that no test depends on another."""
    return jax.random.fold_in(jax.random.key(0), zlib.crc32(request.node.name.encode()))


@pytest.fixture
def quick_compilation():
    """For programs that run once on small arrays, where nearly all time goes into compiling them."""
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)
