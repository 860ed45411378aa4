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
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from meanflow import _checks
from meanflow.depth.propagate import VARIANCE


def _sqrt(v: jax.Array) -> jax.Array:
    """sqrt(max(v, 0)) whose derivative is 0, not infinite, at 0."""
    positive = v > 0
    return jnp.where(positive, jnp.sqrt(jnp.where(positive, v, 1.0)), 0.0)


@jax.custom_jvp
def relu_dual(a: jax.Array, c: jax.Array, b: jax.Array) -> jax.Array:
    """2 E[relu(u) relu(v)] for centred Gaussians with variances a, b and covariance c, elementwise.

    Equals (s + (pi - theta) c) / pi with s = sqrt(ab - c^2) and theta = atan2(s, c). Written with atan2 the
    rounding error of s cancels to third order, and parallel or zero vectors are no special case. The
    derivative is given in closed form, hence finite everywhere: d/dc = 1 - theta/pi, d/da = s / (2 pi a).
    """
    s = _sqrt(a * b - c * c)
    return (s + (jnp.pi - jnp.arctan2(s, c)) * c) / jnp.pi


@relu_dual.defjvp
def _relu_dual_jvp(primals: tuple, tangents: tuple) -> tuple[jax.Array, jax.Array]:
    (a, c, b), (da, dc, db) = primals, tangents
    s = _sqrt(a * b - c * c)
    # at a zero vector atan2(0, 0) has no derivative; any angle will do there, because s = c = 0
    theta = jnp.arctan2(s, jnp.where((s == 0) & (c == 0), 1.0, c))
    share = lambda da, a: jnp.where(a > 0, da / jnp.where(a > 0, a, 1.0), 0.0)
    slope = (1 - theta / jnp.pi) * dc + s / (2 * jnp.pi) * (share(da, a) + share(db, b))
    return relu_dual(a, c, b), slope


def kappa(r: jax.Array) -> jax.Array:
    """Cosine after a wide ReLU layer: (sqrt(1 - r^2) + (pi - arccos r) r) / pi."""
    r = jnp.asarray(r)
    return relu_dual(jnp.ones_like(r), r, jnp.ones_like(r))


def relu_map(gram: jax.Array) -> jax.Array:
    """J(K): expected Gram matrix after ReLU, weights with fan_in * variance = 2; the diagonal is kept."""
    square = jnp.diagonal(gram)
    return relu_dual(
        jnp.broadcast_to(square[:, None], gram.shape), gram, jnp.broadcast_to(square[None, :], gram.shape)
    )


DUALS = {"relu": lambda gram: 0.5 * relu_map(gram), "linear": lambda gram: gram}
"""K -> E[phi(z) phi(z)'] for z ~ N(0, K)."""


def recentered(gram: jax.Array) -> jax.Array:
    """H K H: the Gram matrix of the batch minus its mean."""
    gram = gram - jnp.mean(gram, axis=0, keepdims=True)
    return gram - jnp.mean(gram, axis=1, keepdims=True)


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
        recenter: as in ``propagate``; so are rescale, activation (``"relu"`` or ``"linear"``) and weights
            (``"he"`` or ``"gaussian"``).
        rescale: None, ``"rms"`` or ``"std"``. ``"std"`` without recentring needs n >= 4: below, the
            expectation is infinite.
        activation: ``"relu"`` or ``"linear"``.
        weights: sets the variance; without effect on the result when rescaling.
        nodes: Gauss-Legendre nodes of the rescaling integral; 100 give 1e-13 in double precision.

    Returns:
        (n, n). Without rescaling, the expected Gram matrix of a layer as wide as its input; with it, the
        expected product per neuron, E[x_i x_j]. Cost O(n^2), with rescaling O(nodes n^3).
    """
    _checks.one_of("rescale", rescale, (None, "std", "rms"))
    _checks.one_of("activation", activation, DUALS)
    _checks.one_of("weights", weights, VARIANCE)
    n = gram.shape[0]
    dual = DUALS[activation]
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

    def integrand(t: jax.Array, weight: jax.Array) -> jax.Array:
        factor = jax.scipy.linalg.cholesky(jnp.eye(n, dtype=gram.dtype) + 2 * t * inner, lower=True)
        solve = partial(jax.scipy.linalg.cho_solve, (factor, True))
        if about_mean:
            side = sigma - jnp.mean(sigma, axis=0, keepdims=True)  # H K
            tilted = sigma - 2 * t * side.T @ solve(side)
        else:
            tilted = solve(sigma)
        scale = n * weight / jnp.prod(jnp.diagonal(factor))
        return scale * dual((tilted + tilted.T) / 2)

    return jnp.sum(jax.vmap(integrand)(times, measure), axis=0)


def _unit(gram: jax.Array) -> jax.Array:
    """Scaled to mean squared length 1."""
    return gram * (gram.shape[0] / jnp.trace(gram))


@partial(
    jax.jit,
    static_argnames=("depth", "recenter", "rescale", "activation", "weights", "renormalize", "nodes"),
)
def _recursion(gram: jax.Array, depth: int, renormalize: bool, **layer: object) -> jax.Array:
    def step(gram: jax.Array, _: None) -> tuple[jax.Array, jax.Array]:
        gram = layer_map(gram, **layer)  # type: ignore[arg-type]
        gram = _unit(gram) if renormalize else gram
        return gram, gram

    first = _unit(gram) if renormalize else gram
    return jnp.concatenate([first[None], jax.lax.scan(step, first, None, length=depth)[1]])


def expected_gram(
    gram: jax.Array,
    depth: int,
    *,
    recenter: bool = True,
    rescale: str | None = None,
    activation: str = "relu",
    weights: str = "he",
    renormalize: bool = False,
    nodes: int = 100,
) -> jax.Array:
    """Expected Gram matrices of an infinitely wide network, layer by layer.

    Args:
        gram: (n, n) Gram matrix of the input batch.
        depth: number of layers.
        recenter: see ``layer_map``; so are rescale, activation, weights and nodes.
        rescale: None, ``"rms"`` or ``"std"``.
        activation: ``"relu"`` or ``"linear"``.
        weights: ``"he"`` or ``"gaussian"``.
        renormalize: scale every matrix to mean squared length 1.
        nodes: quadrature nodes.

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
    return _recursion(
        gram,
        _checks.whole("depth", depth, 1),
        bool(renormalize),
        recenter=bool(recenter),
        rescale=rescale,
        activation=activation,
        weights=weights,
        nodes=nodes,
    )


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


@partial(jax.jit, static_argnames=("max_steps", "recenter", "rescale", "activation", "weights", "nodes"))
def fixed_point(
    gram: jax.Array,
    *,
    recenter: bool = True,
    rescale: str | None = None,
    activation: str = "relu",
    weights: str = "he",
    nodes: int = 100,
    tolerance: float = 1e-12,
    max_steps: int = 100_000,
) -> FixedPoint:
    """Iterates one layer (``layer_map``, up to scale) from ``gram`` until no entry moves by ``tolerance``.

    Only attracting states are found; ``stability`` gives their eigenvalues.
    """
    layer = partial(
        layer_map, recenter=recenter, rescale=rescale, activation=activation, weights=weights, nodes=nodes
    )

    def step(state: FixedPoint) -> FixedPoint:
        image = layer(state.gram)
        unit = _unit(image)
        change = jnp.max(jnp.abs(unit - state.gram))
        return FixedPoint(unit, jnp.trace(image) / gram.shape[0], state.steps + 1, change)

    start = FixedPoint(
        _unit(gram), jnp.ones((), gram.dtype), jnp.zeros((), int), jnp.full((), jnp.inf, gram.dtype)
    )
    going = lambda state: (state.residual > tolerance) & (state.steps < max_steps)
    return jax.lax.while_loop(going, step, start)


def stability(
    gram: jax.Array,
    *,
    recenter: bool = True,
    rescale: str | None = None,
    activation: str = "relu",
    nodes: int = 100,
) -> np.ndarray:
    """Eigenvalues of one layer (up to scale) linearised at ``gram``, largest modulus first.

    The derivative acts on symmetric matrices, n(n+1)/2 of them; the direction of ``gram`` itself has
    eigenvalue 0, because the scale is divided out. A fixed point attracts when all moduli are below 1. On
    the host, O(n^6).
    """
    n = gram.shape[0]
    i, j = np.triu_indices(n)

    def step(entries: jax.Array) -> jax.Array:
        upper = jnp.zeros((n, n), gram.dtype).at[i, j].set(entries)
        full = upper + upper.T - jnp.diag(jnp.diagonal(upper))
        image = layer_map(full, recenter=recenter, rescale=rescale, activation=activation, nodes=nodes)
        return _unit(image)[i, j]

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
