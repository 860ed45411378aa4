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


def _conv(x: Any, w: Any, groups: int = 1, stride: int = 1) -> Any:
    return jax.lax.conv_general_dilated(
        x,
        w,
        (stride, stride),
        "SAME" if stride == 1 else "VALID",
        dimension_numbers=("NHWC", "HWIO", "NHWC"),
        feature_group_count=groups,
    )


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


def convnext(samples: int, size: int, channels: int, outputs: int = 10) -> Network:
    """Patches of 2 x 2 pixels, two blocks of a depthwise 7 x 7 convolution, a layer norm and a hidden layer."""
    draw = _Draw()
    x = draw.batch(samples, 2 * size, 2 * size, 3)
    shapes = {"depth": (7, 7, 1, channels), "up": (channels, 4 * channels), "down": (4 * channels, channels)}
    blocks = [
        {n: draw(*s) for n, s in shapes.items()} | {"s": jnp.ones(channels, jnp.float32)} for _ in range(2)
    ]

    def apply(p: Any, x: Any) -> Any:
        x = _conv(x, p["first"], stride=2)
        for block in p["blocks"]:
            h = _unit(_conv(x, block["depth"], channels), -1) * block["s"].reshape(1, 1, 1, -1)
            x = x + jax.nn.gelu(h @ block["up"], approximate=False) @ block["down"]
        return x.mean((1, 2)) @ p["head"]

    return apply, {"first": draw(2, 2, 3, channels), "blocks": blocks, "head": draw(channels, outputs)}, x


def grouped(samples: int, size: int, channels: int, groups: int = 4, outputs: int = 10) -> Network:
    """Two residual blocks of a convolution in groups between two of single pixels."""
    draw = _Draw()
    x = draw.batch(samples, size, size, 3)
    shapes = {
        "in": (channels, channels),
        "mid": (3, 3, channels // groups, channels),
        "out": (channels, channels),
    }
    blocks = [{n: draw(*s) for n, s in shapes.items()} for _ in range(2)]

    def apply(p: Any, x: Any) -> Any:
        x = _conv(x, p["first"])
        for block in p["blocks"]:
            h = _conv(jax.nn.relu(x @ block["in"]), block["mid"], groups)
            x = x + jax.nn.relu(h) @ block["out"]
        return x.mean((1, 2)) @ p["head"]

    return apply, {"first": draw(3, 3, 3, channels), "blocks": blocks, "head": draw(channels, outputs)}, x


def vision_transformer(samples: int, size: int, width: int, outputs: int = 10, heads: int = 4) -> Network:
    """Patches of 4 x 4 pixels with a class token and places, two blocks of attention, the class token read out."""
    draw = _Draw()
    x = draw.batch(samples, size, size, 3)
    tokens = 1 + (size // 4) ** 2
    shapes = {n: (width, width) for n in "qkvo"} | {"up": (width, 4 * width), "down": (4 * width, width)}
    blocks = [
        {n: draw(*s) for n, s in shapes.items()} | {"s": jnp.ones((2, width), jnp.float32)} for _ in range(2)
    ]
    params = {
        "patch": draw(48, width),
        "token": draw(1, 1, width),
        "place": draw(1, tokens, width),
        "blocks": blocks,
        "head": draw(width, outputs),
    }

    def apply(p: Any, x: Any) -> Any:
        count, side = x.shape[0], size // 4
        x = x.reshape(count, side, 4, side, 4, 3).transpose((0, 1, 3, 2, 4, 5)).reshape(count, side**2, 48)
        token = jnp.broadcast_to(p["token"], (count, 1, width))
        x = jnp.concatenate([token, x @ p["patch"]], 1) + p["place"]
        for block in p["blocks"]:
            h = _unit(x, -1) * block["s"][0].reshape(1, 1, -1)
            q, k, v = ((h @ block[n]).reshape(count, tokens, heads, -1) for n in "qkv")
            weight = jax.nn.softmax(jnp.einsum("bthk,bshk->bhts", q, k) / (width / heads) ** 0.5, -1)
            x = x + jnp.einsum("bhts,bshk->bthk", weight, v).reshape(h.shape) @ block["o"]
            h = _unit(x, -1) * block["s"][1].reshape(1, 1, -1)
            x = x + jax.nn.gelu(h @ block["up"], approximate=False) @ block["down"]
        return x[:, 0] @ p["head"]

    return apply, params, x


def mixer(samples: int, length: int, width: int, outputs: int = 10) -> Network:
    """Two blocks of hidden layers across tokens and across channels."""
    draw = _Draw()
    x = draw.batch(samples, length, width)
    shapes = {
        "a": (length, 2 * length),
        "b": (2 * length, length),
        "c": (width, 4 * width),
        "d": (4 * width, width),
    }
    blocks = [{n: draw(*s) for n, s in shapes.items()} for _ in range(2)]

    def apply(p: Any, x: Any) -> Any:
        for block in p["blocks"]:
            h = jax.nn.relu(_unit(x, -1).swapaxes(1, 2) @ block["a"]) @ block["b"]
            x = x + h.swapaxes(1, 2)
            x = x + jax.nn.relu(_unit(x, -1) @ block["c"]) @ block["d"]
        return x.mean(1) @ p["head"]

    return apply, {"blocks": blocks, "head": draw(width, outputs)}, x


def gru(samples: int, length: int, width: int, outputs: int = 10) -> Network:
    """A recurrence with a reset and an update gate, in a loop of the program."""
    draw = _Draw()
    x = draw.batch(samples, length, width)
    params = {n: draw(width, width) for n in ("ur", "uz", "un", "wr", "wz", "wn")}

    def apply(p: Any, x: Any) -> Any:
        def step(h: Any, now: Any) -> Any:
            reset = jax.nn.sigmoid(now @ p["ur"] + h @ p["wr"])
            update = jax.nn.sigmoid(now @ p["uz"] + h @ p["wz"])
            return (1 - update) * jnp.tanh(now @ p["un"] + reset * (h @ p["wn"])) + update * h, None

        start = jnp.zeros((x.shape[0], width), jnp.float32)
        return jax.lax.scan(step, start, x.swapaxes(0, 1))[0] @ p["head"]

    return apply, params | {"head": draw(width, outputs)}, x


def unet(samples: int, size: int, channels: int, outputs: int = 10) -> Network:
    """Down by a convolution of stride 2 and up by repeated pixels, with the pixels before beside those after."""
    draw = _Draw()
    x = draw.batch(samples, size, size, 3)
    params = {
        "in": draw(3, 3, 3, channels),
        "down": draw(2, 2, channels, 2 * channels),
        "mid": draw(3, 3, 2 * channels, 2 * channels),
        "up": draw(3, 3, 3 * channels, channels),
        "head": draw(channels, outputs),
    }

    def apply(p: Any, x: Any) -> Any:
        first = jax.nn.relu(_conv(x, p["in"]))
        h = jax.nn.relu(_conv(first, p["down"], stride=2))
        h = jax.nn.relu(_conv(h, p["mid"]))
        h = jnp.concatenate([h.repeat(2, 1).repeat(2, 2), first], -1)
        return jax.nn.relu(_conv(h, p["up"])).mean((1, 2)) @ p["head"]

    return apply, params, x


def experts(samples: int, width: int, hidden: int, count: int = 4, outputs: int = 10) -> Network:
    """Hidden layers of several experts side by side, added up by the weights of a gate."""
    draw = _Draw()
    x = draw.batch(samples, width)
    params = {
        "gate": draw(width, count),
        "up": draw(width, count, hidden) * np.float32(count**0.5),
        "down": draw(count, hidden, width) * np.float32(count**0.5),
        "head": draw(width, outputs),
    }

    def apply(p: Any, x: Any) -> Any:
        gate = jax.nn.softmax(x @ p["gate"], -1)
        h = jax.nn.relu(jnp.einsum("td,dek->tek", x, p["up"]))
        return jnp.einsum("te,ted->td", gate, jnp.einsum("tek,ekd->ted", h, p["down"])) @ p["head"]

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
    "convnext": lambda: convnext(32, 8, 32),
    "grouped": lambda: grouped(32, 16, 32),
    "vit": lambda: vision_transformer(32, 16, 64),
    "mixer": lambda: mixer(32, 16, 64),
    "gru": lambda: gru(64, 20, 64),
    "unet": lambda: unet(32, 16, 16),
    "experts": lambda: experts(128, 64, 128),
    "batch norm, 128": lambda: dense(128, (64, 512, 512, 1), 0),
    "batch norm, 256": lambda: dense(256, (64, 512, 512, 1), 0),
}
