"""The clipped critic of Algorithm 3: a lower bound on the exact distance, and not a multiple of it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.special

from meanflow.transport import wasserstein
from meanflow_papers.unitization import critic
from meanflow_papers.unitization.critic import critic_distance

CASES = {"shift .3": (1.0, 0.3), "shift 1": (1.0, 1.0), "scale 1.5": (1.5, 0.0), "scale 3": (3.0, 0.0)}


HALVES = (slice(0, 300), slice(300, 600))  # trained on, evaluated on


def gaussian_case(d, scale, shift, n=600):
    z = np.random.default_rng(d).normal(size=(n, d))
    # W_1 of z and scale z + shift: E|(scale - 1) z + shift 1|, both couplings being monotone
    w = (
        shift * np.sqrt(d)
        if scale == 1
        else (scale - 1)
        * np.sqrt(2)
        * np.exp(scipy.special.gammaln((d + 1) / 2) - scipy.special.gammaln(d / 2))
    )
    return jnp.asarray(scale * z + shift), jnp.asarray(z), w


@pytest.mark.parametrize("d", [2, 10, 50])
def test_critic_against_the_exact_distance(d):
    x, y, w = (np.stack(part) for part in zip(*(gaussian_case(d, *c) for c in CASES.values()), strict=True))
    key = jax.random.key(0)
    out = jax.jit(jax.vmap(lambda x, y: critic_distance(x, y, key=key)))(jnp.asarray(x), jnp.asarray(y))
    fitted, held_out = ([float(wasserstein(a[h], b[h])) for a, b in zip(x, y, strict=True)] for h in HALVES)
    np.testing.assert_allclose(fitted, w, rtol=0.2)  # same inputs
    assert np.all(out.lower_bound <= np.array(held_out) * (1 + 1e-9))
    assert np.all(out.lipschitz_estimate <= out.lipschitz_bound * (1 + 1e-9))
    assert np.all(np.abs(out.value) <= np.asarray(out.lipschitz_bound) * held_out * (1 + 1e-9))
    # the bias: the critic sees less than two percent of the distance, by a factor that is not constant
    ratio = np.asarray(out.value) / w
    assert np.all((ratio > 0) & (ratio < 0.02))
    assert ratio.max() / ratio.min() > 1.5


def test_convolutional_critic_is_a_lower_bound(key):
    """Shifted images, exact distance by assignment; the Lipschitz bound against gradients and a dense matrix."""
    y = jax.random.normal(key, (60, 4, 4, 2))
    options = {"hidden": (), "filters": ((3, 2), (3, 1)), "steps": 40, "batch": 16}
    out = critic_distance(y + 0.5, y, key=key, **options)
    exact = float(wasserstein(*((u[30:]).reshape(30, -1) for u in (y + 0.5, y))))
    assert 0 < float(out.lower_bound) <= exact * (1 + 1e-9)
    assert float(out.lipschitz_estimate) <= float(out.lipschitz_bound)
    kernel = jax.random.normal(jax.random.key(5), (3, 3, 2, 3))
    centre = jnp.zeros_like(kernel).at[1, 1].set(kernel[1, 1])
    for weight in (kernel, centre):
        matrix = jax.jacobian(lambda u, w=weight: critic._convolve(u[None], w, 1)[0].ravel())(y[0])
        dense = np.linalg.norm(np.asarray(matrix).reshape(len(matrix), -1), 2)
        bound = float(critic._spectral_norm(weight))
        assert dense <= bound * (1 + 1e-9)
        if weight is centre:  # one matrix at every pixel: equal
            assert dense == pytest.approx(bound, rel=1e-9)
