"""Coordinate networks: MLPs that fit a signal x -> y over a line or an image, with or without batch norm.

Error is measured by frequency and on held-out points. Training error says nothing here: a network of 35 000
parameters with positional encoding fits 1024 pixels of white noise to rounding as well as it fits a picture.
"""

import math
from collections.abc import Callable
from typing import NamedTuple, TypeAlias, TypedDict, Unpack

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Key, PyTree

from meanflow.kernels import Normalized
from meanflow_papers.ntk.networks import ACTIVATIONS

Statistics: TypeAlias = list[
    tuple[Float[Array, "1 n"], Float[Array, "1 n"]]
]  # mean and variance of each batch norm
Plain: TypeAlias = Callable[[PyTree, jax.Array], jax.Array]  # (parameters, inputs (T, d)) -> outputs (T,)

NORMS = ("none", "hidden", "later", "output", "both")


def encode(x: jax.Array, octaves: int) -> jax.Array:
    """Return the positional encoding: x (T, d) with sin and cos of pi 2^j x, j < octaves; (T, d (1 + 2 octaves))."""
    waves = [trig(math.pi * 2.0**j * x) for j in range(octaves) for trig in (jnp.sin, jnp.cos)]
    return jnp.concatenate([x, *waves], axis=1)


class CoordinateMLP(nnx.Module):
    """MLP on coordinates, (T, inputs) -> (T,).

    Weights have variance 2/fan_in (1/fan_in in the output layer), biases are uniform in +-1/sqrt(fan_in).

    Args:
        inputs: number of coordinates.
        width, hidden: units a hidden layer, and number of hidden layers.
        octaves: of the positional encoding; 0 for none.
        norm: where batch norm stands: "none"; "hidden" before every activation; "later" before every
            activation but the first; "output" after the last layer; "both" hidden and output. On raw 1-D
            input batch norm in the first layer makes every unit +-(x - mean)/std and its weights dead
            parameters: take "later", random shifts, or encode first.
        activation: a name in ``ACTIVATIONS``.
        epsilon: added to every variance.
        random_shift: draw the shift beta of hidden batch norms from N(0, 1) instead of 0.
        rngs: of flax, stream "params".
        dtype: of the parameters, default float32 (float64 under x64).

    >>> from flax import nnx
    >>> net = CoordinateMLP(1, width=8, norm="later", rngs=nnx.Rngs(0))
    >>> net(jnp.linspace(-1, 1, 5)[:, None]).shape
    (5,)
    """

    def __init__(
        self,
        inputs: int,
        *,
        width: int = 128,
        hidden: int = 3,
        octaves: int = 0,
        norm: str = "none",
        activation: str = "relu",
        epsilon: float = 1e-5,
        random_shift: bool = False,
        rngs: nnx.Rngs,
        dtype: DTypeLike | None = None,
    ):
        if norm not in NORMS:
            raise ValueError(f"norm must be one of {NORMS}, got {norm!r}")
        self.octaves, self.norm, self.epsilon, self.hidden = octaves, norm, epsilon, hidden
        self.activation = ACTIVATIONS[activation]
        kind = jnp.zeros((), dtype).dtype
        sizes = [inputs * (1 + 2 * octaves), *[width] * hidden, 1]
        layers, scales, shifts = [], [], []
        for i, (m, n) in enumerate(zip(sizes[:-1], sizes[1:], strict=True)):
            gain = 1.0 if i == hidden else 2.0
            layers.append(
                nnx.Linear(
                    m,
                    n,
                    param_dtype=kind,
                    kernel_init=nnx.initializers.normal(math.sqrt(gain / m)),
                    bias_init=lambda key, shape, dtype, m=m: jax.random.uniform(
                        key, shape, dtype, -1 / math.sqrt(m), 1 / math.sqrt(m)
                    ),
                    rngs=rngs,
                )
            )
            if self.is_normalized(i):
                draw = random_shift and i < hidden
                scales.append(nnx.Param(jnp.ones(n, kind)))
                shifts.append(
                    nnx.Param(jax.random.normal(rngs.params(), (n,), kind) if draw else jnp.zeros(n, kind))
                )
        self.layers = nnx.List(layers)
        self.scales, self.shifts = nnx.List(scales), nnx.List(shifts)

    def is_normalized(self, layer: int) -> bool:
        """Whether batch norm follows this layer (0 the first hidden one, ``hidden`` the output)."""
        if layer == self.hidden:
            return self.norm in ("output", "both")
        return self.norm in ("hidden", "both") or (self.norm == "later" and layer > 0)

    def _forward(self, x: jax.Array, given: Statistics | None) -> tuple[jax.Array, Statistics]:
        """Return the outputs and the statistics that were used."""
        h = encode(x, self.octaves)
        used: Statistics = []
        for i, layer in enumerate(self.layers):
            h = layer(h)
            if self.is_normalized(i):
                j = len(used)
                moments = (jnp.mean(h, 0, keepdims=True), jnp.var(h, 0, keepdims=True))
                mean, variance = moments if given is None else given[j]
                used.append((mean, variance))
                h = (h - mean) / jnp.sqrt(variance + self.epsilon)
                h = h * self.scales[j][...][None] + self.shifts[j][...][None]
            h = self.activation(h) if i < self.hidden else h
        return h[:, 0], used

    def __call__(self, x: jax.Array, statistics: Statistics | None = None) -> Float[Array, " t"]:
        """Return the outputs under the batch's own statistics, or under given ones."""
        return self._forward(x, statistics)[0]

    def statistics(self, x: jax.Array) -> Statistics:
        """Return (mean, variance) before each batch norm on the batch x."""
        return self._forward(x, None)[1]


class Options(TypedDict, total=False):
    """Arguments of ``CoordinateMLP`` beside the number of inputs."""

    width: int
    hidden: int
    octaves: int
    norm: str
    activation: str
    epsilon: float
    random_shift: bool
    dtype: DTypeLike | None


def ensemble(
    key: Key[Array, ""], members: int, inputs: int, **options: Unpack[Options]
) -> tuple[Plain | Normalized, PyTree]:
    """Return (apply, params) of independently drawn networks, parameters stacked along the first axis.

    ``apply`` is a function of one member's parameters: a ``Normalized`` one with batch norm, a plain one without.
    Use it under vmap.

    Args:
        key: random key of the parameters.
        members: number of networks.
        inputs: number of coordinates.
        options: further arguments of ``CoordinateMLP``.
    """
    graph, *states = nnx.split(CoordinateMLP(inputs, rngs=nnx.Rngs(0), **options), nnx.Param, ...)
    rest = states[1]

    def draw(k: Key[Array, ""]) -> PyTree:
        return nnx.split(CoordinateMLP(inputs, rngs=nnx.Rngs(params=k), **options), nnx.Param, ...)[1]

    params = jax.jit(jax.vmap(draw))(jax.random.split(key, members))
    build = lambda p: nnx.merge(graph, p, rest)
    if options.get("norm", "none") == "none":
        return (lambda p, x: build(p)(x)), params
    return Normalized(lambda p, x, s: build(p)(x, s), lambda p, x: build(p).statistics(x)), params


class Fit(NamedTuple):
    """``params`` after training; ``steps`` (records,); ``observed``: stacked observations, members first."""

    params: PyTree
    steps: np.ndarray
    observed: PyTree


def fit(
    apply: Plain | Normalized,
    params: PyTree,
    x: Float[Array, "t d"],
    y: Float[Array, " t"],
    *,
    learning_rate: float,
    steps: int,
    every: int,
    observe: Callable[[PyTree], PyTree],
) -> Fit:
    """Train stacked networks at once: full-batch Adam, squared loss, cosine decay of the learning rate to 0.

    Args:
        apply: (params, x) -> (T,), of one member.
        params: stacked along the first axis (members).
        x, y: the training set (T, d), (T,).
        learning_rate: the initial one.
        steps, every: steps, and steps between observations.
        observe: params of one member -> pytree of arrays.
    """
    optimizer = optax.adam(optax.cosine_decay_schedule(learning_rate, steps))
    loss = lambda p: 0.5 * jnp.mean((apply(p, x) - y) ** 2)

    def step(_: jax.Array, state: tuple[PyTree, optax.OptState]) -> tuple[PyTree, optax.OptState]:
        p, memory = state
        updates, memory = optimizer.update(jax.grad(loss)(p), memory, p)
        return optax.apply_updates(p, updates), memory

    def some(state: tuple[PyTree, optax.OptState], _: None) -> tuple[tuple[PyTree, optax.OptState], PyTree]:
        state = jax.lax.fori_loop(0, every, step, state)
        return state, observe(state[0])

    def one(p: PyTree) -> tuple[tuple[PyTree, optax.OptState], PyTree]:
        return jax.lax.scan(some, (p, optimizer.init(p)), length=steps // every)

    (final, _), observed = jax.jit(jax.vmap(one))(params)
    return Fit(final, np.arange(every, steps + 1, every), observed)


def evaluate(
    apply: Plain | Normalized, params: PyTree, z: Float[Array, "s d"], x: Float[Array, "t d"]
) -> Float[Array, " s"]:
    """Return the outputs at z under the batch statistics of the training inputs x."""
    if isinstance(apply, Normalized):
        return apply.apply(params, z, apply.statistics(params, x))
    return apply(params, z)


class Signal(NamedTuple):
    """A sampled signal: points x (T, d), values y (T,), held-out points (S, d) and truth (S,)."""

    x: jax.Array
    y: jax.Array
    held_out: jax.Array
    truth: jax.Array


def sines(frequencies: tuple[int, ...] = (1, 2, 4, 8, 16, 32), samples: int = 256, seed: int = 0) -> Signal:
    """Return a sum of unit sines with random phases on [-1, 1), in cycles a period; held out: the midpoints."""
    phases = np.random.RandomState(seed).uniform(0, 2 * np.pi, len(frequencies))  # noqa: NPY002 the paper's setup
    at = lambda t: np.sum(np.sin(2 * np.pi * np.outer(t, frequencies) + phases[None]), axis=1)
    t = np.arange(samples) / samples
    middle = t + 0.5 / samples
    point = lambda t: jnp.asarray(2 * t[:, None] - 1)
    return Signal(point(t), jnp.asarray(at(t)), point(middle), jnp.asarray(at(middle)))


def picture(size: int = 32) -> Signal:
    """Return three plane waves and a disc at cell centers of [-1, 1]^2, standardized; held out: the cell corners."""

    def at(a: np.ndarray, b: np.ndarray) -> np.ndarray:
        pi = np.pi
        waves = 0.2 * np.cos(pi * (a + b / 2) + 0.3) + 0.15 * np.cos(pi * (4 * a - 3 * b) + 1.1)
        waves = waves + 0.15 * np.cos(pi * (9 * a + 7 * b) + 2)
        return waves + 0.2 * ((a - 0.2) ** 2 + (b + 0.1) ** 2 < 0.3)

    centers = (np.arange(size) + 0.5) * 2 / size - 1
    grid = lambda c: [g.reshape(-1) for g in np.meshgrid(c, c, indexing="ij")]
    y = at(*grid(centers))
    corners = centers[:-1] + 1 / size
    truth = at(*grid(corners))
    point = lambda c: jnp.asarray(np.stack(grid(c), axis=1))
    scale = lambda v: jnp.asarray((v - y.mean()) / y.std())
    return Signal(point(centers), scale(y), point(corners), scale(truth))


def photograph(name: str = "china.jpg", size: int = 64) -> Signal:
    """Return a grey photograph that scikit-learn carries; every second pixel (checkerboard) is held out."""
    from sklearn.datasets import load_sample_image

    image = np.asarray(load_sample_image(name), float).mean(axis=2)
    side = min(image.shape) // size * size
    top, left = ((n - side) // 2 for n in image.shape)
    block = side // size
    image = image[top : top + side, left : left + side].reshape(size, block, size, block).mean(axis=(1, 3))
    centers = (np.arange(size) + 0.5) * 2 / size - 1
    a, b = np.meshgrid(centers, centers, indexing="ij")
    points, values = np.stack([a.reshape(-1), b.reshape(-1)], axis=1), image.reshape(-1)
    keep = (np.add.outer(np.arange(size), np.arange(size)) % 2 == 0).reshape(-1)
    values = (values - values[keep].mean()) / values[keep].std()
    x, y, z, truth = (jnp.asarray(v) for v in (points[keep], values[keep], points[~keep], values[~keep]))
    return Signal(x, y, z, truth)


def frequency_error(outputs: jax.Array, y: jax.Array, frequencies: tuple[int, ...]) -> jax.Array:
    """Return the relative error |DFT_k(outputs - y)| / |DFT_k(y)| at each frequency, (len(frequencies),).

    Frequencies are in cycles a period of an even grid.

    >>> t = jnp.arange(8) / 8
    >>> round(float(frequency_error(0.25 * jnp.sin(2 * jnp.pi * t), jnp.sin(2 * jnp.pi * t), (1,))[0]), 4)
    0.75
    """
    index = np.asarray(frequencies)
    return jnp.abs(jnp.fft.rfft(outputs - y)[index]) / jnp.abs(jnp.fft.rfft(y)[index])


def psnr(outputs: jax.Array, y: jax.Array, span: float | jax.Array) -> jax.Array:
    """Return the peak signal-to-noise ratio in dB for values that span ``span``."""
    return 10 * jnp.log10(span**2 / jnp.mean((outputs - y) ** 2))
