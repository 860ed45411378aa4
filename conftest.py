"""Strict test configuration: float64, no silent broadcasting of ranks, one fixed key per test."""

import zlib

import jax
import pytest

jax.config.update("jax_enable_x64", True)
jax.config.update("jax_numpy_rank_promotion", "raise")


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
