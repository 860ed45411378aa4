"""Infinitely wide layers iterated for ever: Gram matrices that a layer reproduces up to scale, and their stability."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from meanflow.depth import Layer, expected_gram


def kappa(r: float | np.ndarray | jax.Array) -> jax.Array:
    """Return the cosine of two samples after a wide ReLU layer, given their cosine r before it (elementwise)."""
    r = jnp.asarray(r, float)
    # (1 - r)(1 + r), not 1 - r^2, which has no digits left near r = 1
    return (jnp.sqrt((1 - r) * (1 + r)) + (jnp.pi - jnp.arccos(r)) * r) / jnp.pi


def batchnorm_cosine(n: float) -> jax.Array:
    """Return the cosine between any two samples at the fixed point of batch norm + ReLU, for a batch of n.

    It is kappa(-1/(n-1)): recentered orthogonal samples have pairwise cosine -1/(n-1), and rescaling does not change
    the cosines of an exchangeable batch. n = inf gives 1/pi, that is 71.44 degrees. The same state is a fixed point of
    recenter + ReLU.
    """
    return kappa(-1.0 / (n - 1.0))


def unit_layer(gram: jax.Array, layer: Layer, nodes: int = 100) -> jax.Array:
    """Return the expected Gram matrix after one layer, scaled to mean squared length 1."""
    return expected_gram(gram, 1, layer, renormalize=True, nodes=nodes)[1]


@partial(jax.jit, static_argnames=("layer", "nodes", "max_steps"))
def fixed_point(
    gram: jax.Array, layer: Layer, *, nodes: int = 100, tolerance: float = 1e-12, max_steps: int = 100_000
) -> jax.Array:
    """Apply one layer, up to scale, until the Gram matrix no longer changes; only states that attract are found.

    Args:
        gram: Gram matrix (n, n) to start from.
        layer: the layer that is iterated.
        nodes: of the rescaling integral, see ``expected_gram``.
        tolerance: stop when no entry moves by more than this.
        max_steps: stop after so many layers in any case.
    """

    def step(state: tuple) -> tuple:
        gram, _, count = state
        image = unit_layer(gram, layer, nodes)
        return image, jnp.max(jnp.abs(image - gram)), count + 1

    going = lambda state: (state[1] > tolerance) & (state[2] < max_steps)
    start = gram * (gram.shape[0] / jnp.trace(gram))
    return jax.lax.while_loop(going, step, (start, jnp.asarray(jnp.inf, gram.dtype), 0))[0]


def stability(gram: jax.Array, layer: Layer) -> np.ndarray:
    """Return the eigenvalues of one layer, up to scale, linearized at a Gram matrix (n, n); largest modulus first.

    The derivative acts on symmetric matrices, so there are n(n+1)/2 eigenvalues. The direction of ``gram`` itself has
    eigenvalue 0, because the scale is divided out. A fixed point attracts when all moduli are below 1. The cost is
    O(n^6).
    """
    n = gram.shape[0]
    i, j = np.triu_indices(n)

    def step(entries: jax.Array) -> jax.Array:
        upper = jnp.zeros((n, n), gram.dtype).at[i, j].set(entries)
        full = upper + upper.T - jnp.diag(jnp.diagonal(upper))
        return unit_layer(full, layer)[i, j]

    start = gram * (n / jnp.trace(gram))
    values = np.linalg.eigvals(np.asarray(jax.jit(jax.jacfwd(step))(start[i, j])))
    return values[np.argsort(-np.abs(values))]
