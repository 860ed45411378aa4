"""The clipped critic of Algorithm 3 of the unitization paper, as a baseline: it is not the distance W_1.

A network f_w whose weights are clipped to [-c, c] is trained to tell two samples apart. Clipping bounds the weights but
not the Lipschitz constant K: the output is K W_1, and K is not known in advance. Here bounds on K are reported too, so
that value / lipschitz_bound is at least a valid lower bound on W_1.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from typing import Annotated, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, ArrayLike, Float

from meanflow._boundary import Count, Length, PRNGKey, array, checked, choice, count, sequence
from meanflow._numerics import iterate

Weights: TypeAlias = list[tuple[jax.Array, jax.Array]]
"""Matrix (m, n), or kernel (3, 3, m, n) of a convolution, and bias of each layer of the critic."""


class CriticDistance(NamedTuple):
    """Outcome of Algorithm 3 of the unitization paper.

    Attributes:
        value: mean of f_w over the held-out rows of x minus that over the held-out rows of y.
        train_value: the same over the rows the critic was trained on.
        lipschitz_bound: product of the spectral norms of the layers (times 1/4 for the sigmoid), at least K; of a
            convolution, the sum of the spectral norms of its nine matrices, which is at least its own.
        lipschitz_estimate: largest norm of the gradient at the samples, at most K.
        lower_bound: |value| / lipschitz_bound, a lower bound on W_1 between the held-out rows.
    """

    value: Float[Array, ""]
    train_value: Float[Array, ""]
    lipschitz_bound: Float[Array, ""]
    lipschitz_estimate: Float[Array, ""]
    lower_bound: Float[Array, ""]


@checked
@dataclass(frozen=True)
class Critic:
    """The network of ``critic_distance`` and its training.

    By default it is a dense ReLU network. That of the unitization paper is convolutional:
    ``Critic(hidden=(), filters=(64, 64, 128, 128), strides=(2, 1, 2, 1), steps=1500)``.

    Args:
        hidden: widths of the hidden dense layers.
        filters: channels of 3 x 3 convolutions with ReLU before them, for images (N, H, W, C).
        strides: of these convolutions, equally many.
        clip: weights are clipped to [-clip, clip] after each step.
        steps: number of training steps.
        batch: size of a minibatch, drawn with replacement from the first half of the rows.
        learning_rate: of RMSProp; the paper names no optimizer.
        head: ``"sigmoid"`` as in the paper, which caps the value at 1, or ``"linear"``.

    >>> Critic(steps=50).hidden
    (64, 64)
    """

    hidden: Annotated[tuple[int, ...], sequence(count(1), least=0)] = (64, 64)
    filters: Annotated[tuple[int, ...], sequence(count(1), least=0)] = ()
    strides: Annotated[tuple[int, ...], sequence(count(1), least=0)] = ()
    clip: Length = 0.01
    steps: Count = 1000
    batch: Count = 128
    learning_rate: Length = 1e-3
    head: Annotated[str, choice("sigmoid", "linear")] = "sigmoid"

    def __post_init__(self) -> None:
        """Refuse convolutions without a stride."""
        if len(self.strides) != len(self.filters):
            raise ValueError(
                f"filters and strides must be equally many, got {self.filters} and {self.strides}"
            )


@checked
def critic_distance(
    x: Annotated[Float[ArrayLike, "n ..."], array(rank=2, least=2)],
    y: Annotated[Float[ArrayLike, "n ..."], array(rank=2, least=2)],
    *,
    key: PRNGKey,
    critic: Critic = Critic(),  # noqa: B008
) -> CriticDistance:
    """Train a clipped critic on the first half of two samples and evaluate it on the second half.

    This is Algorithm 3 of the unitization paper, by ascent with RMSProp in one compiled loop of pure JAX.

    Args:
        x: outputs of a layer after some training, (N, ...); flattened to (N, d), images (N, H, W, C) after the
            convolutions.
        y: outputs before it, (N, ...), on the same inputs: minibatches take the same rows of both.
        key: PRNG key for the initial weights and the minibatches.
        critic: the network and its training.

    >>> x = jax.random.normal(jax.random.key(0), (40, 2))
    >>> found = critic_distance(x + 3.0, x, key=jax.random.key(1), critic=Critic(steps=50))
    >>> bool(found.lower_bound <= 3 * 2**0.5)
    True
    """
    if jnp.shape(x) != jnp.shape(y):
        raise ValueError(f"x and y must both be (N, ...) with N >= 2, got {jnp.shape(x)} and {jnp.shape(y)}")
    images = bool(critic.filters)
    if images and jnp.ndim(x) != 4:
        raise ValueError(f"x must be images (N, H, W, C) for a critic with filters, got shape {jnp.shape(x)}")
    x, y = (jnp.asarray(u) if images else jnp.asarray(u).reshape(jnp.shape(u)[0], -1) for u in (x, y))
    return _train(x, y, key, critic)


def _convolve(x: jax.Array, kernel: jax.Array, stride: int) -> jax.Array:
    """Return the 3 x 3 convolution of images (n, h, w, m) with a kernel (3, 3, m, n), padded with zeros."""
    layout = ("NHWC", "HWIO", "NHWC")
    return jax.lax.conv_general_dilated(x, kernel, (stride, stride), "SAME", dimension_numbers=layout)


def _forward(critic: Critic, weights: Weights, x: jax.Array) -> jax.Array:
    """Return the critic's score of each row of x."""
    *inner, (last, shift) = weights
    # layers with a stride are convolutions, the others dense
    for stride, (kernel, bias) in zip(critic.strides, inner, strict=False):
        x = jax.nn.relu(_convolve(x, kernel, stride) + bias[None, None, None, :])
    x = x.reshape(x.shape[0], -1)
    for matrix, bias in inner[len(critic.strides) :]:
        x = jax.nn.relu(x @ matrix + bias[None, :])
    score = (x @ last + shift[None, :])[:, 0]
    return jax.nn.sigmoid(score) if critic.head == "sigmoid" else score


def _shapes(critic: Critic, x: jax.Array) -> list[tuple[int, ...]]:
    """Return the shapes of the critic's kernels and matrices."""
    channels = (x.shape[-1], *critic.filters)
    kernels = [(3, 3, m, n) for m, n in zip(channels[:-1], channels[1:], strict=True)]
    sizes = list(x.shape[1:])
    for stride in critic.strides:  # a side of length n becomes ceil(n / stride)
        sizes[:2] = [-(-size // stride) for size in sizes[:2]]
    width = math.prod(sizes[:-1]) * channels[-1] if critic.filters else x.shape[1]
    widths = (width, *critic.hidden, 1)
    return [*kernels, *zip(widths[:-1], widths[1:], strict=True)]


def _spectral_norm(weight: jax.Array) -> jax.Array:
    """Return the spectral norm of a matrix, or the sum of those of the matrices of a convolution."""
    matrices = weight.reshape(-1, *weight.shape[-2:])
    # one after the other: several batched factorizations in one program can wait for each other for ever on a CPU
    return jnp.sum(jax.lax.map(lambda matrix: jnp.linalg.norm(matrix, 2), matrices))


@partial(jax.jit, static_argnames="critic")
def _train(x: jax.Array, y: jax.Array, key: jax.Array, critic: Critic) -> CriticDistance:
    """Train and evaluate the critic, compiled."""
    init_key, batch_key = jax.random.split(key)
    shapes = _shapes(critic, x)
    # He's weights, variance 2 over the number of inputs of a neuron; biases start at 0
    weights = [
        (
            jax.random.normal(k, shape, x.dtype) * jnp.sqrt(2 / math.prod(shape[:-1])).astype(x.dtype),
            jnp.zeros(shape[-1], x.dtype),
        )
        for k, shape in zip(jax.random.split(init_key, len(shapes)), shapes, strict=True)
    ]
    score = partial(_forward, critic)
    # the first half trains, the second one evaluates: in training the critic can learn the samples by heart
    half = x.shape[0] // 2
    optimizer = optax.rmsprop(critic.learning_rate)

    def gap(weights: Weights, rows_x: jax.Array, rows_y: jax.Array) -> jax.Array:
        return jnp.mean(score(weights, rows_x)) - jnp.mean(score(weights, rows_y))

    def step(state: tuple[Weights, optax.OptState], rows: jax.Array) -> tuple[Weights, optax.OptState]:
        weights, opt_state = state
        grads = jax.grad(lambda w: -gap(w, x[rows], y[rows]))(weights)  # ascent
        updates, opt_state = optimizer.update(grads, opt_state, weights)
        moved = optax.apply_updates(weights, updates)
        return jax.tree.map(lambda w: jnp.clip(w, -critic.clip, critic.clip), moved), opt_state

    rows = jax.random.randint(batch_key, (critic.steps, critic.batch), 0, half)
    (weights, _), _ = iterate(
        step, (weights, optimizer.init(weights)), rows, critic.steps, critic.steps, lambda s: 0
    )

    value = gap(weights, x[half:], y[half:])
    # ReLU has slope at most 1, so K is at most the product of the spectral norms; the sigmoid has slope at most 1/4
    bound = jnp.prod(jnp.stack([_spectral_norm(w) for w, _ in weights]))
    bound = bound / 4 if critic.head == "sigmoid" else bound
    # gradients at the samples: a lower bound on K
    slopes = jax.vmap(jax.grad(lambda u: score(weights, u[None])[0]))(jnp.concatenate([x, y]))
    estimate = jnp.max(jnp.linalg.norm(slopes.reshape(len(slopes), -1), axis=1))
    # a bound of 0 means that the critic is constant, so that its value is 0 as well
    safe = jnp.where(bound > 0, bound, 1)
    return CriticDistance(value, gap(weights, x[:half], y[:half]), bound, estimate, jnp.abs(value) / safe)
