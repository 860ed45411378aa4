"""The kernel under batch norm as paper 000 prints it, beside the exact one."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from meanflow import kernels
from meanflow_papers.ntk.networks import normalize
from meanflow_papers.ntk.printed_kernel import one_sided, one_sided_error


def network(key, outputs=1, samples=7, activation=jnp.tanh):
    k = jax.random.split(key, 4)
    params = {
        "w": jax.random.normal(k[0], (3, 20)),
        "b": jax.random.normal(k[1], (20,)),
        "v": jax.random.normal(k[2], (20, outputs)) / np.sqrt(20),
    }
    x = jax.random.normal(k[3], (samples, 3))

    def before(p, x):
        return activation(x @ p["w"] + p["b"][None]) @ p["v"]

    return before, params, x


class TestPrintedForm:
    """eq. A.3 / A.18 treats B and K as commuting."""

    @pytest.mark.parametrize(
        ("inputs", "activation", "off", "square"),
        [
            ("random", "relu", 0.0789, 1.0062),
            ("line", "relu", 0.921, 1.848),
            ("line", "tanh", 1.553, 3.411),
        ],
    )
    def test_one_sided_is_wrong_yet_isospectral(self, inputs, activation, off, square):
        key = jax.random.key(5)
        samples = 24
        widths = (64 if inputs == "random" else 1, 64, 64, 1)
        sizes = list(zip(widths[:-1], widths[1:], strict=True))
        keys = jax.random.split(key, len(sizes))
        params = [jax.random.normal(k, s) * np.sqrt(2 / s[0]) for k, s in zip(keys, sizes, strict=True)]
        biases = [
            0.5 * jax.random.normal(jax.random.fold_in(k, 3), (s[1],))
            for k, s in zip(keys, sizes, strict=True)
        ]
        phi = {"relu": jax.nn.relu, "tanh": jnp.tanh}[activation]
        x = (
            jax.random.normal(key, (samples, 64))
            if inputs == "random"
            else jnp.linspace(-1, 1, samples)[:, None]
        )

        def apply(p, x):
            h = x
            for w, b in zip(p[:-1], biases, strict=False):
                h = phi(h @ w + b[None])
            return (h @ p[-1])[:, 0]

        kernel, f = kernels.empirical_ntk(apply, params, x), apply(params, x)
        exact, printed = kernels.batchnorm_ntk(kernel, f), one_sided(kernel, f)
        normed = lambda p, x: normalize(apply(p, x))
        truth = kernels.empirical_ntk(normed, params, x, stats="batch")
        np.testing.assert_allclose(exact, truth, rtol=0, atol=1e-14 * float(jnp.abs(truth).max()))
        error = np.linalg.norm(printed - truth) / np.linalg.norm(truth)
        assert error == pytest.approx(off, rel=5e-3)
        np.testing.assert_allclose(one_sided_error(kernel, f), error, rtol=1e-10)
        assert float(jnp.max(jnp.abs(printed - printed.T))) > 1e-3 * float(jnp.max(jnp.abs(exact)))
        # isospectral: eig(P A) = eig(P A P) for a projection P
        eigenvalues = np.sort(np.linalg.eigvals(np.asarray(printed)).real)
        np.testing.assert_allclose(
            eigenvalues, np.linalg.eigvalsh(exact), rtol=0, atol=1e-10 * eigenvalues.max()
        )
        # so its trace is right and its Frobenius norm, the paper's second moment, is not
        assert float(jnp.sum(printed**2) / jnp.sum(exact**2)) == pytest.approx(square, rel=5e-3)

    def test_isospectral_only_without_epsilon(self, key):
        before, net, x = network(key)
        kernel, f = kernels.empirical_ntk(before, net, x)[:, :, 0, 0], before(net, x)[:, 0]
        soft = kernels.batchnorm_ntk(kernel, f, epsilon=0.5)
        difference = np.trace(np.asarray(soft)) - np.trace(np.asarray(one_sided(kernel, f)))
        assert abs(difference) > 1e-2 * np.trace(np.asarray(soft))
