"""The clipped critic of Algorithm 3 of the unitization paper, as a baseline: it is not the distance W_1.

A network f_w whose weights are clipped to [-c, c] is trained to tell two samples apart. Clipping bounds the weights but
not the Lipschitz constant K: the output is K W_1, and K is not known in advance. Here bounds on K are reported too, so
that value / lipschitz_bound is at least a valid lower bound on W_1.
"""

from functools import partial
from typing import NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, ArrayLike, Float, Key

from meanflow import _checks
from meanflow._numerics import iterate

Weights: TypeAlias = list[tuple[jax.Array, jax.Array]]
"""Matrix and bias of each layer of the critic."""


class CriticDistance(NamedTuple):
    """Outcome of Algorithm 3 of the unitization paper.

    Attributes:
        value: mean of f_w over the held-out rows of x minus that over the held-out rows of y.
        train_value: the same over the rows the critic was trained on.
        lipschitz_bound: product of the spectral norms of the layers (times 1/4 for the sigmoid), at least K.
        lipschitz_estimate: largest norm of the gradient at the samples, at most K.
        lower_bound: |value| / lipschitz_bound, a lower bound on W_1 between the held-out rows.
    """

    value: Float[Array, ""]
    train_value: Float[Array, ""]
    lipschitz_bound: Float[Array, ""]
    lipschitz_estimate: Float[Array, ""]
    lower_bound: Float[Array, ""]


def critic_distance(
    x: Float[ArrayLike, "n ..."],
    y: Float[ArrayLike, "n ..."],
    *,
    key: Key[Array, ""],
    hidden: tuple[int, ...] = (64, 64),
    clip: float = 0.01,
    steps: int = 1000,
    batch: int = 128,
    learning_rate: float = 1e-3,
    head: str = "sigmoid",
) -> CriticDistance:
    """Train a clipped critic on the first half of two samples and evaluate it on the second half.

    This is Algorithm 3 of the unitization paper, with a dense ReLU network in place of its convolutional one. The paper
    names no optimizer; this is ascent by RMSProp. It is one compiled loop in pure JAX.

    Args:
        x: outputs of a layer after some training, (N, ...); flattened to (N, d).
        y: outputs before it, (N, ...), on the same inputs: minibatches take the same rows of both.
        key: PRNG key for the initial weights and the minibatches.
        hidden: widths of the hidden layers.
        clip: weights are clipped to [-clip, clip] after each step.
        steps: number of training steps.
        batch: size of a minibatch, drawn with replacement from the first N // 2 rows.
        learning_rate: of RMSProp.
        head: ``"sigmoid"`` as in the paper, which caps the value at 1, or ``"linear"``.

    >>> x = jax.random.normal(jax.random.key(0), (40, 2))
    >>> found = critic_distance(x + 3.0, x, key=jax.random.key(1), steps=50)
    >>> bool(found.lower_bound <= 3 * 2**0.5)
    True
    """
    _checks.one_of("head", head, ("sigmoid", "linear"))
    _checks.at_least("clip", clip, 0.0, strict=True)
    _checks.whole("steps", steps, 1)
    _checks.whole("batch", batch, 1)
    if jnp.shape(x) != jnp.shape(y) or jnp.ndim(x) < 2 or jnp.shape(x)[0] < 2:
        raise ValueError(f"x and y must both be (N, ...) with N >= 2, got {jnp.shape(x)} and {jnp.shape(y)}")
    _checks.finite("x", x)
    _checks.finite("y", y)
    x, y = (jnp.asarray(u).reshape(jnp.shape(u)[0], -1) for u in (x, y))
    return _train(x, y, key, tuple(hidden), clip, steps, batch, learning_rate, head)


def _forward(weights: Weights, x: jax.Array, head: str) -> jax.Array:
    """Return the critic's score of each row of x."""
    *inner, (last, shift) = weights
    for matrix, bias in inner:
        x = jax.nn.relu(x @ matrix + bias[None, :])
    score = (x @ last + shift[None, :])[:, 0]
    return jax.nn.sigmoid(score) if head == "sigmoid" else score


@partial(jax.jit, static_argnames=("hidden", "clip", "steps", "batch", "learning_rate", "head"))
def _train(
    x: jax.Array,
    y: jax.Array,
    key: jax.Array,
    hidden: tuple[int, ...],
    clip: float,
    steps: int,
    batch: int,
    learning_rate: float,
    head: str,
) -> CriticDistance:
    """Train and evaluate the critic, compiled."""
    widths = (x.shape[1], *hidden, 1)
    init_key, batch_key = jax.random.split(key)
    weights = [
        (jax.random.normal(k, (m, n), x.dtype) * jnp.sqrt(2 / m).astype(x.dtype), jnp.zeros(n, x.dtype))
        for k, m, n in zip(jax.random.split(init_key, len(widths) - 1), widths[:-1], widths[1:], strict=True)
    ]
    half = x.shape[0] // 2
    optimizer = optax.rmsprop(learning_rate)

    def gap(weights: Weights, rows_x: jax.Array, rows_y: jax.Array) -> jax.Array:
        return jnp.mean(_forward(weights, rows_x, head)) - jnp.mean(_forward(weights, rows_y, head))

    def step(state: tuple[Weights, optax.OptState], rows: jax.Array) -> tuple[Weights, optax.OptState]:
        weights, opt_state = state
        grads = jax.grad(lambda w: -gap(w, x[rows], y[rows]))(weights)  # ascent
        updates, opt_state = optimizer.update(grads, opt_state, weights)
        moved = optax.apply_updates(weights, updates)
        return jax.tree.map(lambda w: jnp.clip(w, -clip, clip), moved), opt_state

    rows = jax.random.randint(batch_key, (steps, batch), 0, half)
    (weights, _), _ = iterate(step, (weights, optimizer.init(weights)), rows, steps, steps, lambda s: 0)

    value = gap(weights, x[half:], y[half:])
    bound = jnp.prod(jnp.stack([jnp.linalg.norm(m, 2) for m, _ in weights]))
    bound = bound / 4 if head == "sigmoid" else bound
    slopes = jax.vmap(jax.grad(lambda u: _forward(weights, u[None, :], head)[0]))(jnp.concatenate([x, y]))
    estimate = jnp.max(jnp.linalg.norm(slopes, axis=1))
    safe = jnp.where(bound > 0, bound, 1)
    return CriticDistance(value, gap(weights, x[:half], y[:half]), bound, estimate, jnp.abs(value) / safe)
