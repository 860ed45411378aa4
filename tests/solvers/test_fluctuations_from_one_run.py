"""Error bars over initializations from one network, against ensembles: long experiments, seeds fixed beforehand."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import meanflow as mf

M, N, ENSEMBLE, TIMES = 400, 20, 400, (1.0, 4.0, 16.0)


def problem(dim):
    x = jax.random.normal(jax.random.fold_in(jax.random.key(2024), dim), (N, dim))
    points = jax.random.normal(jax.random.fold_in(jax.random.key(2025), dim), (10, dim))
    return mf.Dataset(x, jnp.sin(x[:, 0]) + 0.5 * x[:, 1]), points


CASES = {
    "tanh, d = 2": (mf.vanilla("tanh"), 2, {}),
    "tanh, d = 10": (mf.vanilla("tanh"), 10, {}),
    "relu, d = 2": (mf.vanilla("relu"), 2, {"solver": "sliding", "step": mf.KernelStep(0.25)}),
    "batch norm, d = 2": (mf.batchnorm("tanh"), 2, {}),
}

# The covariance of one network is that of the measure it was drawn as: where what is left of the error decays, the
# estimate varies from network to network with the rates of that decay.
MISSED = pytest.param(
    "tanh, d = 2",
    marks=pytest.mark.xfail(strict=True, reason="7 of 10 seeds: at t = 16 three are 22 to 27 % too large"),
)


def rms(deviation):
    """Return the root mean square over points of standard deviations (times, points)."""
    return np.sqrt(np.mean(np.asarray(deviation) ** 2, axis=-1))


@pytest.mark.slow
@pytest.mark.parametrize("name", [MISSED if name == "tanh, d = 2" else name for name in CASES])
def test_one_network_has_the_error_bars_of_an_ensemble(name):
    flow, dim, settings = CASES[name]
    data, points = problem(dim)
    flow, ts = flow.bind(data), jnp.asarray(TIMES)
    predict = lambda flow, cloud, data: mf.predict(flow, cloud, points)

    def one(key):
        cloud = flow.init(key, M, dim=dim)
        return mf.solve(
            flow, cloud, data, TIMES[-1], ts=ts, observe=predict, throw=False, **settings
        ).observed

    keys = jax.random.split(jax.random.key(7), ENSEMBLE)
    functions = np.asarray(jax.jit(lambda k: jax.lax.map(one, k, batch_size=20))(keys))
    expected = rms(functions.std(axis=0, ddof=1))
    ratios = []
    for seed in range(10):
        cloud = flow.init(jax.random.fold_in(jax.random.key(8), seed), M, dim=dim)
        found = mf.fluctuations(flow, cloud, data, TIMES[-1], points, ts=ts, directions=0, **settings)
        ratios.append(rms(found.deviation()) / expected)
    worst = np.max(np.abs(np.array(ratios) - 1), axis=1)
    assert np.sum(worst <= 0.15) >= 9, np.round(ratios, 3).tolist()
