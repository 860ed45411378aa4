"""A batch through a random deep network, layer by layer, in one compiled scan.

One layer is z = x W, then any of: recenter (subtract the batch mean), rescale (divide by the batch spread),
nonlinearity. Batches are (n, features) as in flax, so W is (fan_in, fan_out); "BN decomposed" writes the
transpose. Moments are population moments over the batch.
"""

from collections.abc import Callable, Sequence
from functools import partial
from itertools import groupby
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp

from meanflow import _checks, activations
from meanflow.depth.observables import summary
from meanflow.layers import functional

Initializer = Callable[..., jax.Array]
"""(key, (fan_in, fan_out), dtype) -> weights: any jax or flax initializer."""

VARIANCE = {"gaussian": 1.0, "he": 2.0}
"""fan_in times the variance of the entries, for the laws with independent Gaussian entries."""

WEIGHTS: dict[str, Initializer] = {
    "gaussian": jax.nn.initializers.variance_scaling(VARIANCE["gaussian"], "fan_in", "normal"),
    "he": jax.nn.initializers.variance_scaling(VARIANCE["he"], "fan_in", "normal"),
    "orthogonal": jax.nn.initializers.orthogonal(),
    "uniform": jax.nn.initializers.variance_scaling(1.0 / 3.0, "fan_in", "uniform"),  # +-1/sqrt(fan_in)
}


def split_identity(key: Any, shape: tuple[int, int], dtype: Any = jnp.float32) -> jax.Array:
    """The weights (I, -I) of the tree model, equation (9), as an initializer; shape (fan_in, 2 fan_in)."""
    fan_in, fan_out = shape
    if fan_out != 2 * fan_in:
        raise ValueError(f"split_identity needs fan_out = 2 fan_in, got shape {shape}")
    return jnp.concatenate([jnp.eye(fan_in, dtype=dtype), -jnp.eye(fan_in, dtype=dtype)], axis=1)


class Stages(eqx.Module):
    """What follows the weights in every layer, each part on its own switch.

    Attributes:
        recenter: subtract the batch mean.
        rescale: None, ``"std"`` (spread about the mean, equation (2)) or ``"rms"`` (about zero). They agree
            after recentring; without it only ``"rms"`` gives the published 60 degrees.
        activation: a name in ``meanflow.activations`` or a function.
        epsilon: added to the second moment, for features that are constant over the batch.
    """

    recenter: bool = eqx.field(static=True, default=True)
    rescale: str | None = eqx.field(static=True, default=None)
    activation: str | Callable[[jax.Array], jax.Array] = eqx.field(static=True, default="relu")
    epsilon: float = eqx.field(static=True, default=0.0)

    def __check_init__(self) -> None:
        """Refuses unknown names before anything is compiled."""
        _checks.one_of("rescale", self.rescale, (None, "std", "rms"))
        activations.resolve(self.activation)
        _checks.at_least("epsilon", self.epsilon, 0.0)

    def __call__(self, z: jax.Array) -> jax.Array:
        """Pre-activations z (n, d) -> next batch (n, d)."""
        if self.recenter:
            z = functional.recenter(z)
        if self.rescale is not None:
            z = functional.rescale(z, 0, self.rescale, self.epsilon)
        return activations.resolve(self.activation)(z)


class Propagation(eqx.Module):
    """What ``propagate`` saw. With several seeds every array has a leading axis of that length.

    Attributes:
        layers: stacked observations, (depth + 1, ...) each; row 0 is the input. A ``LayerRecord`` unless
            ``observe`` was given.
        log_scale: (depth + 1,) logarithm of the factor divided out so far; all 0 unless ``renormalize``.
            The true batch is exp(log_scale) times the observed one.
        final: (n, widths[-1]) last batch.
    """

    layers: Any
    log_scale: jax.Array
    final: jax.Array


def draw_preactivations(key: jax.Array, x: jax.Array, width: int, variance: float) -> jax.Array:
    """z = x W for W with independent N(0, variance / fan_in) entries, without drawing W.

    With x' = Q R, z = R' (Q' W), and Q' W again has independent N(0, variance / fan_in) entries. So z has
    exactly the law of x W, given x, for min(n, fan_in) rows of normals instead of fan_in rows:
    O(n^2 (fan_in + width)) operations instead of O(n fan_in width), and no rank is lost, because no Gram
    matrix is formed.
    """
    fan_in = x.shape[1]
    factor = jnp.linalg.qr(x.T, mode="r") if fan_in > x.shape[0] else x.T
    normal = jax.random.normal(key, (factor.shape[0], width), x.dtype)
    return (factor.T @ normal) * jnp.sqrt(variance / fan_in).astype(x.dtype)


def _one(
    key: jax.Array,
    x: jax.Array,
    widths: tuple[int, ...],
    stages: Stages,
    weights: str | Initializer,
    draw: str,
    renormalize: bool,
    observe: Callable[[jax.Array], Any],
) -> Propagation:
    def pre(key: jax.Array, x: jax.Array, width: int) -> jax.Array:
        if draw == "law":
            assert isinstance(weights, str)
            return draw_preactivations(key, x, width, VARIANCE[weights])
        law = WEIGHTS[weights] if isinstance(weights, str) else weights
        return x @ law(key, (x.shape[1], width), x.dtype)

    def scaled(x: jax.Array, log_scale: jax.Array) -> tuple[jax.Array, jax.Array]:
        if not renormalize:
            return x, log_scale
        size = jnp.sqrt(jnp.mean(jnp.sum(jnp.square(x), axis=1)))  # rms length of the samples
        size = jnp.where(size > 0, size, 1.0)
        return x / size, log_scale + jnp.log(size)

    def layer(width: int, carry: tuple, key: jax.Array) -> tuple[tuple, tuple]:
        x, log_scale = carry
        x, log_scale = scaled(stages(pre(key, x, width)), log_scale)
        return (x, log_scale), (observe(x), log_scale)

    keys = jax.random.split(key, len(widths))
    carry = scaled(x, jnp.zeros((), x.dtype))
    records = [jax.tree.map(lambda v: v[None], (observe(carry[0]), carry[1]))]
    start = 0
    for width, run in groupby(widths):  # one scan for each run of equal widths; its first layer changes shape
        stop = start + len(list(run))
        carry, record = layer(width, carry, keys[start])
        records.append(jax.tree.map(lambda v: v[None], record))
        if stop > start + 1:
            carry, block = jax.lax.scan(partial(layer, width), carry, keys[start + 1 : stop])
            records.append(block)
        start = stop
    shapes = {str(jax.tree.map(lambda v: v.shape[1:], record)) for record in records}
    if len(shapes) > 1:
        raise ValueError(f"observe must return shapes that do not depend on the width, got {sorted(shapes)}")
    layers, log_scale = jax.tree.map(lambda *parts: jnp.concatenate(parts), *records)
    return Propagation(layers, log_scale, carry[0])


@partial(jax.jit, static_argnames=("widths", "stages", "weights", "draw", "renormalize", "observe", "chunk"))
def _many(keys: jax.Array, x: jax.Array, chunk: int | None, **static: Any) -> Propagation:
    one: Callable[..., Propagation] = partial(_one, **static)
    if keys.ndim == 0:
        return one(keys, x)
    run = (lambda key: one(key, x)) if x.ndim == 2 else (lambda pair: one(*pair))
    return jax.lax.map(run, keys if x.ndim == 2 else (keys, x), batch_size=chunk)


def propagate(
    key: jax.Array,
    x: jax.Array,
    widths: Sequence[int],
    *,
    recenter: bool = True,
    rescale: str | None = None,
    activation: str | Callable[[jax.Array], jax.Array] = "relu",
    epsilon: float = 0.0,
    weights: str | Initializer = "he",
    draw: str = "auto",
    renormalize: bool = False,
    observe: Callable[[jax.Array], Any] = summary,
    chunk: int | None = None,
) -> Propagation:
    """Sends a batch through a random network and records what it looks like at every layer.

    Args:
        key: one PRNG key, or an array of keys (s,): one network each.
        x: batch (n, k), or (s, n, k) with one batch a network.
        widths: width of every layer; its length is the depth. Equal neighbours share one scan, so the
            compile time grows with the number of *changes* of width only.
        recenter: see ``Stages``; so are rescale, activation and epsilon.
        rescale: None, ``"std"`` or ``"rms"``.
        activation: a name or a function.
        epsilon: added to the second moment.
        weights: ``"he"`` N(0, 2/fan_in), ``"gaussian"`` N(0, 1/fan_in), ``"orthogonal"``, ``"uniform"``
            (+-1/sqrt(fan_in)), or any initializer (key, (fan_in, fan_out), dtype) -> array.
        draw: ``"weights"`` draws every weight; ``"law"`` draws the pre-activations from their exact law given
            the batch (``draw_preactivations``; Gaussian laws only, and not differentiable in x where the
            batch loses rank); ``"auto"`` takes the law where it is cheaper.
        renormalize: divide the batch by its rms length after each layer and keep the logarithm. Without
            rescaling, lengths decay geometrically; the geometry of positively homogeneous nets is unaffected.
        observe: batch (n, d) -> pytree of shapes that do not depend on d, called on the input and after each
            layer. Pass the same function object again to reuse the compiled program.
        chunk: networks run side by side (vmap); the rest follow one chunk after the other, so memory is
            O(chunk (n width + width^2)), without width^2 under ``"law"``. None: one at a time.

    Returns:
        A ``Propagation``. One compiled program for each set of static arguments and shapes.

    >>> import jax, meanflow as mf
    >>> x = jax.random.normal(jax.random.key(0), (10, 50))
    >>> run = mf.depth.propagate(jax.random.key(1), x, [512] * 30, rescale="std")
    >>> bool(abs(run.layers.pair_angles[-1].mean() - 74.65) < 2)      # degrees, not 90
    True
    """
    stages = Stages(bool(recenter), rescale, activation, float(epsilon))
    widths = tuple(_checks.whole("widths", w, 1) for w in widths)
    if not widths:
        raise ValueError("widths must list at least one layer, got none")
    keys = jnp.asarray(key)
    if not jnp.issubdtype(keys.dtype, jax.dtypes.prng_key):
        raise ValueError(f"key must be made by jax.random.key, got dtype {keys.dtype}")
    x = jnp.asarray(x)
    x = x if jnp.issubdtype(x.dtype, jnp.floating) else x.astype(jnp.result_type(float))
    seeds = keys.shape[0] if keys.ndim == 1 else None
    if keys.ndim > 1 or x.ndim != (2 if seeds is None else 3) and x.ndim != 2:
        raise ValueError(f"x must be (n, k), or (s, n, k) with s keys; got {x.shape} and keys {keys.shape}")
    if x.ndim == 3:
        _checks.shape("x", x, (seeds, None, None))
    _checks.finite("x", x)
    if isinstance(weights, str):
        _checks.one_of("weights", weights, WEIGHTS)
    _checks.one_of("draw", draw, ("auto", "weights", "law"))
    gaussian = isinstance(weights, str) and weights in VARIANCE
    if draw == "law" and not gaussian:
        raise ValueError(f"draw='law' needs weights in {list(VARIANCE)}, got {weights!r}")
    if draw == "auto":
        draw = "law" if gaussian and x.shape[-2] < max(widths) else "weights"
    if chunk is not None:
        chunk = _checks.whole("chunk", chunk, 1)
    return _many(
        keys,
        x,
        chunk=chunk,
        widths=widths,
        stages=stages,
        weights=weights,
        draw=draw,
        renormalize=bool(renormalize),
        observe=observe,
    )
