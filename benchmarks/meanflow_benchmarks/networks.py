"""Networks whose tangent kernels are timed, in plain JAX that old versions run too: the peers import this very file.

Every function returns (apply, params, x) in float32, drawn by numpy, whose numbers do not depend on the version.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

Network = tuple[Callable[[Any, Any], Any], Any, Any]


class _Draw:
    """Weights of variance 1 / fan-in, one after the other."""

    def __init__(self) -> None:
        self.rng = np.random.default_rng(0)

    def __call__(self, *shape: int) -> Any:
        return jnp.asarray(self.rng.normal(size=shape) / np.sqrt(np.prod(shape[:-1])), jnp.float32)

    def batch(self, *shape: int) -> Any:
        return jnp.asarray(self.rng.normal(size=shape), jnp.float32)


def _conv(x: Any, w: Any) -> Any:
    return jax.lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))


def _unit(x: Any, axis: Any) -> Any:
    mean = x.mean(axis, keepdims=True)
    return (x - mean) / jnp.sqrt(((x - mean) ** 2).mean(axis, keepdims=True) + 1e-5)


def dense(samples: int, widths: tuple[int, ...], axis: int | None = None) -> Network:
    """ReLU layers with biases; hidden ones normalized along ``axis`` (-1: layer norm, 0: batch norm)."""
    draw = _Draw()
    x = draw.batch(samples, widths[0])
    params = [
        {"w": draw(m, n), "b": jnp.zeros(n, jnp.float32)}
        for m, n in zip(widths[:-1], widths[1:], strict=True)
    ]

    def apply(p: Any, x: Any) -> Any:
        for layer in p[:-1]:
            x = x @ layer["w"] + layer["b"].reshape(1, -1)
            x = jax.nn.relu(x if axis is None else _unit(x, axis))
        return x @ p[-1]["w"] + p[-1]["b"].reshape(1, -1)

    return apply, params, x


def convolutional(
    samples: int, size: int, channels: int, outputs: int = 10, batch_norm: bool = False
) -> Network:
    """Three 3 x 3 convolutions with biases on size x size pixels, mean over space, a dense layer."""
    draw = _Draw()
    x = draw.batch(samples, size, size, 3)
    widths = [3, channels, channels, channels]
    layers = [
        {"w": draw(3, 3, m, n), "b": jnp.zeros(n, jnp.float32)}
        for m, n in zip(widths[:-1], widths[1:], strict=True)
    ]

    def apply(p: Any, x: Any) -> Any:
        for layer in p["layers"]:
            x = _conv(x, layer["w"]) + layer["b"].reshape(1, 1, 1, -1)
            x = jax.nn.relu(_unit(x, (0, 1, 2)) if batch_norm else x)
        return x.mean((1, 2)) @ p["head"]

    return apply, {"layers": layers, "head": draw(channels, outputs)}, x


def residual(samples: int, size: int, channels: int, outputs: int = 10) -> Network:
    """Three residual blocks of two convolutions."""
    draw = _Draw()
    x = draw.batch(samples, size, size, 3)
    params = {
        "first": draw(3, 3, 3, channels),
        "blocks": [{n: draw(3, 3, channels, channels) for n in "ab"} for _ in range(3)],
        "head": draw(channels, outputs),
    }

    def apply(p: Any, x: Any) -> Any:
        x = _conv(x, p["first"])
        for block in p["blocks"]:
            x = x + _conv(jax.nn.relu(_conv(jax.nn.relu(x), block["a"])), block["b"])
        return x.mean((1, 2)) @ p["head"]

    return apply, params, x


def transformer(samples: int, length: int, width: int, outputs: int = 10, heads: int = 4) -> Network:
    """Two blocks of attention and a hidden layer, with the scales of layer norms."""
    draw = _Draw()
    x = draw.batch(samples, length, width)
    shapes = {n: (width, width) for n in "qkvo"} | {"up": (width, 4 * width), "down": (4 * width, width)}
    blocks = [
        {n: draw(*s) for n, s in shapes.items()} | {"s": jnp.ones((2, width), jnp.float32)} for _ in range(2)
    ]

    def apply(p: Any, x: Any) -> Any:
        for block in p["blocks"]:
            h = _unit(x, -1) * block["s"][0].reshape(1, 1, -1)
            q, k, v = ((h @ block[n]).reshape(h.shape[0], length, heads, -1) for n in "qkv")
            weight = jax.nn.softmax(jnp.einsum("bthk,bshk->bhts", q, k) / (width / heads) ** 0.5, -1)
            x = x + jnp.einsum("bhts,bshk->bthk", weight, v).reshape(h.shape) @ block["o"]
            h = _unit(x, -1) * block["s"][1].reshape(1, 1, -1)
            x = x + jax.nn.relu(h @ block["up"]) @ block["down"]
        return x.mean(1) @ p["head"]

    return apply, {"blocks": blocks, "head": draw(width, outputs)}, x


def recurrent(samples: int, length: int, width: int, outputs: int = 10) -> Network:
    """The same weights in every step of a sequence."""
    draw = _Draw()
    x = draw.batch(samples, length, width)
    params = {"u": draw(width, width), "w": draw(width, width), "head": draw(width, outputs)}

    def apply(p: Any, x: Any) -> Any:
        h = jnp.zeros((x.shape[0], width), jnp.float32)
        for i in range(length):
            h = jnp.tanh(x[:, i] @ p["u"] + h @ p["w"])
        return h @ p["head"]

    return apply, params, x


NETWORKS: dict[str, Callable[[], Network]] = {
    "dense, 1 output": lambda: dense(256, (2, 1024, 1024, 1)),
    "dense, 10 outputs": lambda: dense(128, (64, 512, 512, 10)),
    "dense, 100 outputs": lambda: dense(32, (64, 512, 512, 100)),
    "dense, deep": lambda: dense(128, (64, *(256,) * 8, 10)),
    "layer norm": lambda: dense(128, (64, 512, 512, 10), -1),
    "cnn": lambda: convolutional(32, 16, 32),
    "cnn, 64 channels": lambda: convolutional(64, 16, 64),
    "cnn, 256 channels": lambda: convolutional(32, 8, 256),
    "resnet": lambda: residual(32, 16, 32),
    "transformer": lambda: transformer(32, 16, 64),
    "recurrent": lambda: recurrent(64, 20, 128),
    "batch norm, 128": lambda: dense(128, (64, 512, 512, 1), 0),
    "batch norm, 256": lambda: dense(256, (64, 512, 512, 1), 0),
}
