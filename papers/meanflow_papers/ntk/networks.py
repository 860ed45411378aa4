"""Random networks whose kernels paper 000 compares, and the random keys of its experiments."""

import functools
from collections.abc import Callable
from typing import Protocol, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

Weights: TypeAlias = list[jax.Array]  # one matrix (fan in, fan out) a layer, or one vector of biases
Apply: TypeAlias = Callable[[Weights, jax.Array], jax.Array]  # (weights, inputs (T, d)) -> outputs (T,)


ACTIVATIONS: dict[str, Callable[[jax.Array], jax.Array]] = {
    "relu": jax.nn.relu,
    "tanh": jnp.tanh,
    "erf": jax.scipy.special.erf,
    "sine": jnp.sin,
    "linear": lambda z: z,
}


class Forward(Protocol):
    """A network as a function of its weights, the inputs and, where it has them, its biases."""

    def __call__(self, w: Weights, x: jax.Array, biases: Weights | None = None) -> jax.Array:
        """Return the outputs (T,) at the inputs x (T, d)."""


def dense(
    key: jax.Array,
    widths: tuple[int, ...],
    *,
    activation: str = "relu",
    weight_variance: float = 2.0,
    bias_variance: float = 0.0,
    network: str = "plain",
    dtype: DTypeLike | None = None,
) -> tuple[Apply, Weights]:
    """(apply, weights) of a random network with scalar output; biases are drawn but not trained.

    ``network`` is one of ``NETWORKS``; hidden batch norm stands before every activation, without epsilon.
    """
    keys = jax.random.split(key, len(widths) - 1)
    kind = jnp.zeros((), dtype).dtype
    weights, biases = [], []
    for k, m, n in zip(keys, widths[:-1], widths[1:], strict=True):
        one, two = jax.random.split(k)
        weights.append(jax.random.normal(one, (m, n), kind) * np.sqrt(weight_variance / m).astype(kind))
        biases.append(jax.random.normal(two, (n,), kind) * np.sqrt(bias_variance).astype(kind))
    forward = _forward(activation, network)
    if bias_variance == 0.0:
        return forward, weights
    return (lambda w, x: forward(w, x, biases)), weights


@functools.cache  # one function object for all seeds, so that it is compiled once a size
def _forward(activation: str, network: str) -> Forward:
    phi = ACTIVATIONS[activation]
    inside, outside = network in ("BN hidden", "BN both"), network in ("BN output", "BN both")

    def apply(w: Weights, x: jax.Array, biases: Weights | None = None) -> jax.Array:
        for i, matrix in enumerate(w):
            x = x @ matrix if biases is None else x @ matrix + biases[i][None]
            if i < len(w) - 1:
                x = phi(normalize(x) if inside else x)
        return normalize(x[:, 0]) if outside else x[:, 0]

    return apply


def normalize(outputs: jax.Array, epsilon: float = 0.0, reference: jax.Array | None = None) -> jax.Array:
    """Return batch norm of outputs (T, ...) by their own statistics, or by those of ``reference`` (R, ...)."""
    source = outputs if reference is None else reference
    scale = jnp.sqrt(jnp.var(source, axis=0, keepdims=True) + epsilon)
    return (outputs - jnp.mean(source, axis=0, keepdims=True)) / scale


def seed_key(*numbers: int) -> jax.Array:
    """Return a random key that depends on all the numbers."""
    key = jax.random.key(4)
    for n in numbers:
        key = jax.random.fold_in(key, n)
    return key
