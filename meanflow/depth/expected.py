"""Infinite width: the expected Gram matrix of a batch, iterated through the layers.

A wide layer with Gaussian weights turns a Gram matrix K into a deterministic one. With
J(K)_ij = sqrt(K_ii K_jj) kappa(r_ij), kappa(r) = (sqrt(1 - r^2) + (pi - arccos r) r) / pi, H = I - 11'/n:

    ReLU                     K <- J(K)                            (fan_in times the variance = 2)
    recenter, ReLU           K <- J(H K H)
    rescale, ReLU            K_ij <- E[relu(z_i) relu(z_j) / s^2],  z ~ N(0, K),  s^2 = z'Az/n

The last one is a single integral, n int_0^oo det(I + 2tAKA)^(-1/2) 1/2 J((K^-1 + 2tA)^-1)_ij dt, with A = I
for the rms (or after recentring, K replaced by HKH) and A = H for the spread about the mean.
"BN decomposed" calls the second line, its equation (8), intractable; it is closed and can be iterated.
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from meanflow import _checks
from meanflow.depth.propagate import VARIANCE
from meanflow.kernels.infinite.dual import dual_activation

HOMOGENEOUS = ("relu", "linear", "leaky_relu")
"""Activations with phi(t z) = t phi(z) for t > 0, so that rescaling can be taken out of the expectation."""


def dual_map(gram: jax.Array, activation: str = "relu") -> jax.Array:
    """E[phi(z) phi(z)'] for z ~ N(0, K): the expected Gram matrix (n, n) of one neuron."""
    square = jnp.diagonal(gram)
    first, second = (jnp.broadcast_to(v, gram.shape) for v in (square[:, None], square[None, :]))
    return dual_activation(activation)(first, second, gram).value


def relu_map(gram: jax.Array) -> jax.Array:
    """J(K): expected Gram matrix after ReLU, weights with fan_in * variance = 2; the diagonal is kept."""
    return 2 * dual_map(gram)


def kappa(r: jax.Array) -> jax.Array:
    """Cosine after a wide ReLU layer: (sqrt(1 - r^2) + (pi - arccos r) r) / pi."""
    r = jnp.asarray(r)
    return 2 * dual_activation("relu")(jnp.ones_like(r), jnp.ones_like(r), r).value


def recentered(gram: jax.Array) -> jax.Array:
    """H K H: the Gram matrix of the batch minus its mean."""
    gram = gram - jnp.mean(gram, axis=0, keepdims=True)
    return gram - jnp.mean(gram, axis=1, keepdims=True)


LAYER = ("recenter", "rescale", "activation", "weights", "nodes")


@partial(jax.jit, static_argnames=LAYER)
def layer_map(
    gram: jax.Array,
    *,
    recenter: bool = True,
    rescale: str | None = None,
    activation: str = "relu",
    weights: str = "he",
    nodes: int = 100,
) -> jax.Array:
    """Expected Gram matrix after one layer of infinite width.

    Args:
        gram: (n, n).
        recenter: as in ``propagate``.
        rescale: None, ``"rms"`` or ``"std"``. ``"std"`` without recentring needs n >= 4: below, the
            expectation is infinite.
        activation: ``"relu"``, ``"leaky_relu"`` or ``"linear"``.
        weights: ``"he"`` or ``"gaussian"``; sets the variance, without effect when rescaling.
        nodes: Gauss-Legendre nodes of the rescaling integral; 100 give 1e-13 in double precision.

    Returns:
        (n, n). Without rescaling, the expected Gram matrix of a layer as wide as its input; with it, the
        expected product per neuron, E[x_i x_j]. Cost O(n^2), with rescaling O(nodes n^3) (matrix products).
    """
    _checks.one_of("rescale", rescale, (None, "std", "rms"))
    _checks.one_of("activation", activation, HOMOGENEOUS)
    _checks.one_of("weights", weights, VARIANCE)
    n = gram.shape[0]
    dual = partial(dual_map, activation=activation)
    sigma = recentered(gram) if recenter else gram
    if rescale is None:
        return VARIANCE[weights] * dual(sigma)
    about_mean = rescale == "std" and not recenter
    if about_mean and n < 4:
        raise ValueError(f"rescale='std' without recenter needs a batch of at least 4, got {n}")
    inner = recentered(sigma) if about_mean else sigma
    u, w = np.polynomial.legendre.leggauss(nodes)
    u, w = (u + 1) / 2, w / 2
    # t = (u / (1 - u))^2 / m turns the algebraic tail t^(-rank/2) into a polynomial in 1 - u
    m = jnp.trace(inner) / n
    times = jnp.asarray((u / (1 - u)) ** 2, gram.dtype) / m
    measure = jnp.asarray(w * 2 * u / (1 - u) ** 3, gram.dtype) / m
    # past this time rounding hides the 1 in 1 + 2t lambda; reached in single precision only, where the
    # tail cut off is t^(-rank/2), about 1e-8 for rank 3
    last = 1 / (8 * jnp.finfo(gram.dtype).eps * n * m)
    measure = jnp.where(times < last, measure, 0.0)
    times = jnp.minimum(times, last)

    inverse, tilted, root = _resolvent(inner, times)
    if about_mean:
        side = sigma - jnp.mean(sigma, axis=0, keepdims=True)  # H K
        tilted = sigma[None] - 2 * times[:, None, None] * (side.T[None] @ inverse @ side[None])
    tilted = (tilted + tilted.transpose(0, 2, 1)) / 2
    return jnp.einsum("t,tij->ij", n * measure * root, jax.vmap(dual)(tilted))


@jax.custom_jvp
def _resolvent(gram: jax.Array, times: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """(I + 2tK)^-1 (T, n, n), (K^-1 + 2t)^-1 (T, n, n) and det(I + 2tK)^(-1/2) (T,) at all times t (T,).

    From one eigendecomposition, which is not differentiated: the rule below knows no gaps between eigenvalues. A
    factorisation for each time would be a batched LAPACK call, and several of those at once deadlock on CPU (jax 0.10).
    """
    values, basis = jnp.linalg.eigh(gram)
    values = jnp.maximum(values, 0.0)[None, :]
    grown = 1 + 2 * times[:, None] * values
    inverse, tilted = (jnp.einsum("ik,tk,jk->tij", basis, u / grown, basis) for u in (1.0, values))
    return inverse, tilted, jnp.prod(grown**-0.5, axis=1)


@_resolvent.defjvp
def _(primals: tuple, tangents: tuple) -> tuple[tuple, tuple]:
    (_, times), (d_gram, d_times) = primals, tangents
    inverse, tilted, root = _resolvent(*primals)
    t, dt = times[:, None, None], d_times[:, None, None]
    turned = inverse @ d_gram[None] @ inverse
    d_inverse = -2 * (t * turned + dt * (inverse @ tilted))
    d_tilted = turned - 2 * dt * (tilted @ tilted)
    trace = lambda u: jnp.trace(u, axis1=1, axis2=2)
    d_root = -root * (times * trace(inverse @ d_gram[None]) + d_times * trace(tilted))
    return (inverse, tilted, root), (d_inverse, d_tilted, d_root)


def _unit(gram: jax.Array) -> jax.Array:
    """Scaled to mean squared length 1."""
    return gram * (gram.shape[0] / jnp.trace(gram))


@partial(jax.jit, static_argnames=("depth", "renormalize", *LAYER))
def _recursion(gram: jax.Array, depth: int, renormalize: bool, **layer: Any) -> jax.Array:
    def step(gram: jax.Array, _: None) -> tuple[jax.Array, jax.Array]:
        gram = layer_map(gram, **layer)
        gram = _unit(gram) if renormalize else gram
        return gram, gram

    first = _unit(gram) if renormalize else gram
    return jnp.concatenate([first[None], jax.lax.scan(step, first, None, length=depth)[1]])


def expected_gram(gram: jax.Array, depth: int, *, renormalize: bool = False, **layer: Any) -> jax.Array:
    """Expected Gram matrices of an infinitely wide network, layer by layer.

    Args:
        gram: (n, n) Gram matrix of the input batch.
        depth: number of layers.
        renormalize: scale every matrix to mean squared length 1.
        **layer: recenter, rescale, activation, weights and nodes of ``layer_map``.

    Returns:
        (depth + 1, n, n); row 0 is the input.

    >>> import jax.numpy as jnp, meanflow as mf
    >>> grams = mf.depth.expected_gram(jnp.eye(10), 1, rescale="std")
    >>> round(float(mf.depth.pair_angles(grams[1])[0]), 2)          # already at the fixed point
    74.65
    """
    gram = jnp.asarray(gram)
    _checks.shape("gram", gram, (gram.shape[0], gram.shape[0]) if gram.ndim else (None, None))
    _checks.finite("gram", gram)
    return _recursion(gram, _checks.whole("depth", depth, 1), bool(renormalize), **layer)


class FixedPoint(NamedTuple):
    """A Gram matrix that a layer reproduces up to scale.

    Attributes:
        gram: (n, n), mean squared length 1.
        growth: mean squared length after one layer.
        steps: layers used.
        residual: largest change of an entry in the last layer.
    """

    gram: jax.Array
    growth: jax.Array
    steps: jax.Array
    residual: jax.Array


@partial(jax.jit, static_argnames=("max_steps", *LAYER))
def fixed_point(
    gram: jax.Array, *, tolerance: float = 1e-12, max_steps: int = 100_000, **layer: Any
) -> FixedPoint:
    """Iterates one layer (``layer_map`` with the options ``layer``, up to scale) until it stands still.

    Stops when no entry of ``gram`` moves by more than ``tolerance``. Only attracting states are found;
    ``stability`` gives their eigenvalues.
    """

    def step(state: FixedPoint) -> FixedPoint:
        image = layer_map(state.gram, **layer)
        unit = _unit(image)
        change = jnp.max(jnp.abs(unit - state.gram))
        return FixedPoint(unit, jnp.trace(image) / gram.shape[0], state.steps + 1, change)

    start = FixedPoint(
        _unit(gram), jnp.ones((), gram.dtype), jnp.zeros((), int), jnp.full((), jnp.inf, gram.dtype)
    )
    going = lambda state: (state.residual > tolerance) & (state.steps < max_steps)
    return jax.lax.while_loop(going, step, start)


def stability(gram: jax.Array, **layer: Any) -> np.ndarray:
    """Eigenvalues (n(n+1)/2,) of one ``layer_map`` (up to scale) linearised at ``gram`` (n, n), largest modulus first.

    The derivative acts on symmetric matrices, n(n+1)/2 of them; the direction of ``gram`` itself has
    eigenvalue 0, because the scale is divided out. A fixed point attracts when all moduli are below 1. On
    the host, O(n^6).
    """
    n = gram.shape[0]
    i, j = np.triu_indices(n)

    def step(entries: jax.Array) -> jax.Array:
        upper = jnp.zeros((n, n), gram.dtype).at[i, j].set(entries)
        full = upper + upper.T - jnp.diag(jnp.diagonal(upper))
        return _unit(layer_map(full, **layer))[i, j]

    jacobian = np.asarray(jax.jit(jax.jacfwd(step))(_unit(gram)[i, j]))
    values = np.linalg.eigvals(jacobian)
    return values[np.argsort(-np.abs(values))]


def batchnorm_cosine(n: int | float) -> jax.Array:
    """Common cosine of the fixed point of batch norm + ReLU for a batch of n: kappa(-1/(n-1)).

    Recentred orthogonal-like samples have pairwise cosine -1/(n-1), and rescaling does not change
    the cosines of an exchangeable batch. n = inf gives 1/pi, 71.44 degrees. The same state is a
    fixed point of recenter + ReLU.
    """
    return kappa(-1.0 / (jnp.asarray(n, float) - 1.0))


def rescaled_cosine_limit(nodes: int = 200, steps: int = 200) -> jax.Array:
    """Common cosine of the fixed point of rms rescaling + ReLU for a batch of infinite size.

    Samples are z_i = sqrt(c) g + sqrt(1-c) e_i with one common g; the batch rms is then sqrt(c g^2 + 1 -
    c), and the cosine obeys c = 2 E_g[h(g)^2 / (c g^2 + 1 - c)], h = E relu(z_i | g). About 58.75 degrees.
    """
    t, w = np.polynomial.legendre.leggauss(nodes)
    g = jnp.asarray(10 * t)
    law = jnp.asarray(10 * w) * jax.scipy.stats.norm.pdf(g)

    def step(_: int, c: jax.Array) -> jax.Array:
        mean, spread = jnp.sqrt(c) * g, jnp.sqrt(1 - c)
        h = mean * jax.scipy.stats.norm.cdf(mean / spread) + spread * jax.scipy.stats.norm.pdf(mean / spread)
        return 2 * jnp.sum(law * h**2 / (c * g**2 + 1 - c))

    return jax.lax.fori_loop(0, steps, step, jnp.asarray(0.5))
