"""The clipped critic of the unitization paper's Algorithm 3, kept as a baseline, never as the distance.

A network f_w with weights clipped to [-c, c] is trained to tell two samples apart. Clipping bounds the
weights, not the Lipschitz constant: the output is K W_1 for no fixed K. Here K is reported, so that
value / lipschitz_bound is at least a valid lower bound on W_1.
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from meanflow import _checks
from meanflow._numerics import iterate


class CriticDistance(NamedTuple):
    """Outcome of Algorithm 3.

    Attributes:
        value: mean of f_w over the held-out x minus that over the held-out y.
        train_value: the same on the training half.
        lipschitz_bound: product of the layers' spectral norms (and 1/4 for the sigmoid): K <= this.
        lipschitz_estimate: largest gradient norm at the sample points: K >= this.
        lower_bound: |value| / lipschitz_bound, a lower bound on the W_1 of the held-out samples.
    """

    value: jax.Array
    train_value: jax.Array
    lipschitz_bound: jax.Array
    lipschitz_estimate: jax.Array
    lower_bound: jax.Array


def critic_distance(
    x: jax.Array,
    y: jax.Array,
    *,
    key: jax.Array,
    hidden: tuple[int, ...] = (64, 64),
    clip: float = 0.01,
    steps: int = 1000,
    batch: int = 128,
    learning_rate: float = 1e-3,
    head: str = "sigmoid",
) -> CriticDistance:
    """Trains the critic on the first half of the samples and evaluates it on the second (Algorithm 3).

    A dense relu network stands in for the paper's convolutional one; the paper names no optimiser, this is
    RMSProp ascent. One compiled loop of ``steps`` steps; pure JAX.

    Args:
        x: outputs after, (N, ...) (flattened to (N, d)).
        y: outputs before, (N, ...), on the same inputs: minibatches take the same rows of both.
        key: PRNG key for weights and minibatches.
        hidden: widths of the hidden layers.
        clip: c > 0.
        steps: T.
        batch: minibatch size, at most N // 2 rows are available to draw from (with replacement).
        learning_rate: of RMSProp.
        head: ``"sigmoid"`` as in the paper (caps the value at 1) or ``"linear"``.
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


def _forward(weights: Any, x: jax.Array, head: str) -> jax.Array:
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
    widths = (x.shape[1], *hidden, 1)
    init_key, batch_key = jax.random.split(key)
    weights = [
        (jax.random.normal(k, (m, n), x.dtype) * jnp.sqrt(2 / m).astype(x.dtype), jnp.zeros(n, x.dtype))
        for k, m, n in zip(jax.random.split(init_key, len(widths) - 1), widths[:-1], widths[1:], strict=True)
    ]
    half = x.shape[0] // 2
    optimizer = optax.rmsprop(learning_rate)

    def gap(weights: Any, rows_x: jax.Array, rows_y: jax.Array) -> jax.Array:
        return jnp.mean(_forward(weights, rows_x, head)) - jnp.mean(_forward(weights, rows_y, head))

    def step(state: Any, rows: jax.Array) -> Any:
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
