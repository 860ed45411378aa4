"""The clipped critic of Algorithm 3 of the unitization paper, as a baseline: it is not the distance W_1.

A network f_w whose weights are clipped to [-c, c] is trained to tell two samples apart. Clipping bounds the weights but
not the Lipschitz constant K: the output is K W_1, and K is not known in advance. Here bounds on K are reported too, so
that value / lipschitz_bound is at least a valid lower bound on W_1.
"""

import math
from functools import partial
from typing import NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float

Weights: TypeAlias = list[tuple[jax.Array, jax.Array]]
"""Matrix (m, n), or kernel (3, 3, m, n) of a convolution, and bias of each layer of the critic."""


Filters: TypeAlias = tuple[tuple[int, int], ...]
Sample: TypeAlias = Float[Array, "n ..."]


class CriticDistance(NamedTuple):
    """Outcome of Algorithm 3 of the unitization paper.

    Attributes:
        value: mean of f_w over the held-out rows of x minus that over the held-out rows of y.
        train_value: the same over the rows the critic was trained on.
        lipschitz_bound: product of the spectral norms of the layers times 1/4 for the sigmoid, at least K; of a
            convolution, the sum of the spectral norms of its nine matrices, which is at least its own.
        lipschitz_estimate: largest norm of the gradient at the samples, at most K.
        lower_bound: |value| / lipschitz_bound, a lower bound on W_1 between the held-out rows.
    """

    value: Float[Array, ""]
    train_value: Float[Array, ""]
    lipschitz_bound: Float[Array, ""]
    lipschitz_estimate: Float[Array, ""]
    lower_bound: Float[Array, ""]


def critic_distance(
    x: Sample,
    y: Sample,
    *,
    key: jax.Array,
    hidden: tuple[int, ...] = (64, 64),
    filters: Filters = (),
    clip: float = 0.01,
    steps: int = 1000,
    batch: int = 128,
) -> CriticDistance:
    """Train a clipped critic on the first half of two samples and evaluate it on the second half.

    This is Algorithm 3 of the unitization paper, by ascent with RMSProp at rate 1e-3 (the paper names no optimizer) in
    one compiled loop. Its critic, with a sigmoid at the end as here, is convolutional: ``hidden=(), steps=1500,
    filters=((64, 2), (64, 1), (128, 2), (128, 1))``.

    Args:
        x: outputs of a layer after some training, (N, ...); flattened to (N, d), images (N, H, W, C) after the
            convolutions.
        y: outputs before it, (N, ...), on the same inputs: minibatches take the same rows of both.
        key: PRNG key for the initial weights and the minibatches.
        hidden: widths of the hidden dense layers.
        filters: channels and stride of 3 x 3 convolutions with ReLU before them, for images (N, H, W, C).
        clip: weights are clipped to [-clip, clip] after each step.
        steps: number of training steps.
        batch: size of a minibatch, drawn with replacement from the first half of the rows.

    >>> x = jax.random.normal(jax.random.key(0), (40, 2))
    >>> found = critic_distance(x + 3.0, x, key=jax.random.key(1), steps=50)
    >>> bool(0 < found.lower_bound <= 3 * 2**0.5)
    True
    """
    if not filters:
        x, y = (u.reshape(u.shape[0], -1) for u in (x, y))
    return _train(x, y, key, hidden, filters, clip, steps, batch)


def _convolve(x: jax.Array, kernel: jax.Array, stride: int) -> jax.Array:
    """Return the 3 x 3 convolution of images (n, h, w, m) with a kernel (3, 3, m, n), padded with zeros."""
    layout = ("NHWC", "HWIO", "NHWC")
    return jax.lax.conv_general_dilated(x, kernel, (stride, stride), "SAME", dimension_numbers=layout)


def _forward(filters: Filters, weights: Weights, x: jax.Array) -> jax.Array:
    """Return the critic's score of each row of x."""
    *inner, (last, shift) = weights
    for (_, stride), (kernel, bias) in zip(filters, inner, strict=False):
        x = jax.nn.relu(_convolve(x, kernel, stride) + bias[None, None, None, :])
    x = x.reshape(x.shape[0], -1)
    for matrix, bias in inner[len(filters) :]:
        x = jax.nn.relu(x @ matrix + bias[None, :])
    return jax.nn.sigmoid((x @ last + shift[None, :])[:, 0])


def _shapes(hidden: tuple[int, ...], filters: Filters, shape: tuple[int, ...]) -> list[tuple[int, ...]]:
    """Return the shapes of the critic's kernels and matrices, for inputs of a shape (N, ...)."""
    kernels: list[tuple[int, ...]] = []
    *sides, channels = shape[1:]
    for filters_out, stride in filters:  # a side of length n becomes ceil(n / stride)
        kernels.append((3, 3, channels, filters_out))
        sides, channels = [-(-side // stride) for side in sides], filters_out
    widths = (math.prod(sides) * channels, *hidden, 1)
    return [*kernels, *zip(widths[:-1], widths[1:], strict=True)]


def _spectral_norm(weight: jax.Array) -> jax.Array:
    """Return the spectral norm of a matrix, or the sum of those of the matrices of a convolution."""
    matrices = weight.reshape(-1, *weight.shape[-2:])
    # one after the other: several batched factorizations in one program can wait for each other for ever on a CPU
    return jnp.sum(jax.lax.map(lambda matrix: jnp.linalg.norm(matrix, 2), matrices))


@partial(jax.jit, static_argnums=(3, 4, 6, 7))
def _train(
    x: jax.Array,
    y: jax.Array,
    key: jax.Array,
    hidden: tuple[int, ...],
    filters: Filters,
    clip: float,
    steps: int,
    batch: int,
) -> CriticDistance:
    """Train and evaluate the critic, compiled."""
    init_key, batch_key = jax.random.split(key)
    shapes = _shapes(hidden, filters, x.shape)
    # He's weights, variance 2 over the number of inputs of a neuron; biases start at 0
    weights = [
        (
            jax.random.normal(k, shape, x.dtype) * jnp.sqrt(2 / math.prod(shape[:-1])).astype(x.dtype),
            jnp.zeros(shape[-1], x.dtype),
        )
        for k, shape in zip(jax.random.split(init_key, len(shapes)), shapes, strict=True)
    ]
    score = partial(_forward, filters)
    # the first half trains, the second one evaluates: in training the critic can learn the samples by heart
    half = x.shape[0] // 2
    optimizer = optax.rmsprop(1e-3)

    def gap(weights: Weights, rows_x: jax.Array, rows_y: jax.Array) -> jax.Array:
        return jnp.mean(score(weights, rows_x)) - jnp.mean(score(weights, rows_y))

    def step(state: tuple[Weights, optax.OptState], rows: jax.Array) -> tuple[Weights, optax.OptState]:
        weights, opt_state = state
        grads = jax.grad(lambda w: -gap(w, x[rows], y[rows]))(weights)  # ascent
        updates, opt_state = optimizer.update(grads, opt_state, weights)
        moved = optax.apply_updates(weights, updates)
        return jax.tree.map(lambda w: jnp.clip(w, -clip, clip), moved), opt_state

    rows = jax.random.randint(batch_key, (steps, batch), 0, half)
    (weights, _), _ = jax.lax.scan(
        lambda state, rows: (step(state, rows), None), (weights, optimizer.init(weights)), rows
    )

    value = gap(weights, x[half:], y[half:])
    # ReLU has slope at most 1, so K is at most the product of the spectral norms; the sigmoid has slope at most 1/4
    bound = jnp.prod(jnp.stack([_spectral_norm(w) for w, _ in weights])) / 4
    # gradients at the samples: a lower bound on K
    slopes = jax.vmap(jax.grad(lambda u: score(weights, u[None])[0]))(jnp.concatenate([x, y]))
    estimate = jnp.max(jnp.linalg.norm(slopes.reshape(len(slopes), -1), axis=1))
    # a bound of 0 means that the critic is constant, so that its value is 0 as well
    safe = jnp.where(bound > 0, bound, 1)
    return CriticDistance(value, gap(weights, x[:half], y[:half]), bound, estimate, jnp.abs(value) / safe)
