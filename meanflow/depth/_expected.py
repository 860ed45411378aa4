"""Infinite width: the expected Gram matrix of a batch, iterated through the layers.

A very wide layer with Gaussian weights turns the Gram matrix K of a batch into a deterministic one. Let H = I - 11'/n
be the projection that subtracts the mean, and

    J(K)_ij = sqrt(K_ii K_jj) kappa(r_ij),   kappa(r) = (sqrt(1 - r^2) + (pi - arccos r) r) / pi,

with r_ij the cosine of samples i and j. Then the layers act as

    ReLU                     K <- J(K)                            (fan_in times the variance = 2)
    recenter, ReLU           K <- J(H K H)
    rescale, ReLU            K_ij <- E[relu(z_i) relu(z_j) / s^2],  z ~ N(0, K),  s^2 = z'Az/n

The last line is a single integral, n int_0^oo det(I + 2tAKA)^(-1/2) 1/2 J((K^-1 + 2tA)^-1)_ij dt. Here A = I for the
root mean square (or after recentering, with K replaced by HKH) and A = H for the deviation from the mean.
"BN decomposed" calls the second line, its equation (8), intractable; it is closed and can be iterated.
"""

from functools import partial
from typing import NamedTuple, TypedDict, Unpack

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, ArrayLike, Complex, Float, Int

from meanflow import _checks
from meanflow._checks import choice, count, flag, optional, unchecked
from meanflow._matrices import matrix
from meanflow.depth._propagation import VARIANCE
from meanflow.kernels._infinite.dual import dual_activation

HOMOGENEOUS = ("relu", "linear", "leaky_relu")
"""Activations with phi(t z) = t phi(z) for t > 0, so that rescaling can be taken out of the expectation."""


class LayerOptions(TypedDict, total=False):
    """Keyword arguments of ``layer_map``, where they are described."""

    recenter: bool
    rescale: str | None
    activation: str
    weights: str
    nodes: int


def dual_map(gram: Float[Array, "n n"], activation: str = "relu") -> Float[Array, "n n"]:
    """Return E[phi(z) phi(z)'] for z ~ N(0, K), the expected Gram matrix that a single neuron contributes.

    >>> print(dual_map(2 * jnp.eye(1)))                               # half of the squared length is lost
    [[1.]]
    """
    square = jnp.diagonal(gram)
    first, second = (jnp.broadcast_to(v, gram.shape) for v in (square[:, None], square[None, :]))
    return dual_activation(activation)(first, second, gram).value


def relu_map(gram: Float[Array, "n n"]) -> Float[Array, "n n"]:
    """Return J(K), the expected Gram matrix after ReLU with He weights (fan_in times the variance = 2).

    The diagonal is kept: samples keep their expected squared lengths.
    """
    return 2 * dual_map(gram)


def kappa(r: Float[ArrayLike, "*shape"]) -> Float[Array, "*shape"]:
    """Return the cosine of two samples after a wide ReLU layer, given their cosine r before it (elementwise).

    kappa(r) = (sqrt(1 - r^2) + (pi - arccos r) r) / pi.

    >>> kappa(jnp.array([-1.0, 1.0])).round(6).tolist()
    [0.0, 1.0]
    """
    r = jnp.asarray(r)
    return 2 * dual_activation("relu")(jnp.ones_like(r), jnp.ones_like(r), r).value


def recentered(gram: Float[Array, "n n"]) -> Float[Array, "n n"]:
    """Return H K H, the Gram matrix of the batch minus its mean."""
    gram = gram - jnp.mean(gram, axis=0, keepdims=True)
    return gram - jnp.mean(gram, axis=1, keepdims=True)


LAYER = ("recenter", "rescale", "activation", "weights", "nodes")


@partial(jax.jit, static_argnames=LAYER)
def layer_map(
    gram: Float[ArrayLike, "n n"],
    *,
    recenter: bool = True,
    rescale: str | None = None,
    activation: str = "relu",
    weights: str = "he",
    nodes: int = 100,
) -> Float[Array, "n n"]:
    """Return the expected Gram matrix after one layer of infinite width.

    Args:
        gram: Gram matrix of the batch before the layer.
        recenter: whether the layer subtracts the mean over the batch.
        rescale: None, ``"rms"`` or ``"std"``, as in ``propagate``. ``"std"`` without recentering needs n >= 4; for
            smaller batches the expectation is infinite.
        activation: ``"relu"``, ``"leaky_relu"`` or ``"linear"``.
        weights: ``"he"`` or ``"gaussian"``. They differ in the variance, which has no effect when rescaling.
        nodes: Gauss-Legendre nodes of the rescaling integral; 100 nodes give 1e-13 in double precision.

    Returns:
        Without rescaling, the expected Gram matrix of a layer as wide as its input. With rescaling, the expected
        product for one neuron, E[x_i x_j]. The cost is O(n^2), with rescaling O(nodes n^3) (matrix products).

    >>> layer_map(jnp.eye(2), recenter=False).round(4).tolist()          # the off-diagonal is 1/pi
    [[1.0, 0.3183], [0.3183, 1.0]]
    """
    _checks.one_of("rescale", rescale, (None, "std", "rms"))
    _checks.one_of("activation", activation, HOMOGENEOUS)
    _checks.one_of("weights", weights, VARIANCE)
    gram = jnp.asarray(gram)
    sigma = recentered(gram) if recenter else gram
    if rescale is None:
        return VARIANCE[weights] * dual_map(sigma, activation)
    about_mean = rescale == "std" and not recenter
    if about_mean and gram.shape[0] < 4:
        raise ValueError(f"rescale='std' without recenter needs a batch of at least 4, got {gram.shape[0]}")
    return _rescaled_map(sigma, about_mean, activation, nodes)


def _rescaled_map(sigma: jax.Array, about_mean: bool, activation: str, nodes: int) -> jax.Array:
    """Return E[phi(z_i) phi(z_j) / s^2] for z ~ N(0, sigma), by quadrature over t in [0, oo)."""
    n = sigma.shape[0]
    inner = recentered(sigma) if about_mean else sigma
    u, w = np.polynomial.legendre.leggauss(nodes)
    u, w = (u + 1) / 2, w / 2
    # t = (u / (1 - u))^2 / m turns the algebraic tail t^(-rank/2) into a polynomial in 1 - u
    m = jnp.trace(inner) / n
    times = jnp.asarray((u / (1 - u)) ** 2, sigma.dtype) / m
    measure = jnp.asarray(w * 2 * u / (1 - u) ** 3, sigma.dtype) / m
    # past this time rounding hides the 1 in 1 + 2t lambda; reached in single precision only, where the
    # tail cut off is t^(-rank/2), about 1e-8 for rank 3
    last = 1 / (8 * jnp.finfo(sigma.dtype).eps * n * m)
    measure = jnp.where(times < last, measure, 0.0)
    times = jnp.minimum(times, last)

    inverse, tilted, root = _resolvent(inner, times)
    if about_mean:
        side = sigma - jnp.mean(sigma, axis=0, keepdims=True)  # H K
        tilted = sigma[None] - 2 * times[:, None, None] * (side.T[None] @ inverse @ side[None])
    tilted = (tilted + tilted.transpose(0, 2, 1)) / 2
    dual = partial(dual_map, activation=activation)
    return jnp.einsum("t,tij->ij", n * measure * root, jax.vmap(dual)(tilted))


@jax.custom_jvp
def _resolvent(gram: jax.Array, times: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return (I + 2tK)^-1 and (K^-1 + 2t)^-1, both (T, n, n), and det(I + 2tK)^(-1/2), (T,), at all times t (T,).

    All three come from one eigendecomposition, which is not differentiated: the rule below does not divide by gaps
    between eigenvalues. A factorization for each time would be a batched LAPACK call, and several of those at once
    deadlock on CPU (jax 0.10).
    """
    values, basis = jnp.linalg.eigh(gram)
    values = jnp.maximum(values, 0.0)[None, :]
    grown = 1 + 2 * times[:, None] * values
    inverse, tilted = (jnp.einsum("ik,tk,jk->tij", basis, u / grown, basis) for u in (1.0, values))
    return inverse, tilted, jnp.prod(grown**-0.5, axis=1)


@_resolvent.defjvp
def _resolvent_jvp(primals: tuple, tangents: tuple) -> tuple[tuple, tuple]:
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
    """Scale a Gram matrix to mean squared length 1."""
    return gram * (gram.shape[0] / jnp.trace(gram))


@partial(jax.jit, static_argnames=("depth", "renormalize", *LAYER))
def _recursion(gram: jax.Array, depth: int, renormalize: bool, **layer: Unpack[LayerOptions]) -> jax.Array:
    def step(gram: jax.Array, _: None) -> tuple[jax.Array, jax.Array]:
        gram = layer_map(gram, **layer)
        gram = _unit(gram) if renormalize else gram
        return gram, gram

    first = _unit(gram) if renormalize else gram
    return jnp.concatenate([first[None], jax.lax.scan(step, first, None, length=depth)[1]])


OPTIONS = {
    "recenter": flag,
    "rescale": optional(choice("std", "rms")),
    "activation": choice(*HOMOGENEOUS),
    "weights": choice(*VARIANCE),
    "nodes": count(1),
}


@_checks.arguments(
    gram=matrix(),
    depth=count(1),
    renormalize=flag,
    **OPTIONS,
    layer=unchecked("its names are those of layer_map, and each has a kind"),
)
def expected_gram(
    gram: Float[ArrayLike, "n n"], depth: int, *, renormalize: bool = False, **layer: Unpack[LayerOptions]
) -> Float[Array, "{depth}+1 n n"]:
    """Return the expected Gram matrices of an infinitely wide network, layer by layer.

    Args:
        gram: Gram matrix of the input batch.
        depth: number of layers.
        renormalize: scale every matrix to mean squared length 1.
        **layer: the arguments of ``expected.layer_map``: recenter (True; whether to subtract the mean over the
            batch), rescale (None; or ``"rms"``, ``"std"``), activation (``"relu"``; or ``"leaky_relu"``,
            ``"linear"``), weights (``"he"``; or ``"gaussian"``) and nodes (100, of the rescaling integral).

    Returns:
        One matrix for the input and for each layer.

    >>> import jax.numpy as jnp, meanflow as mf
    >>> grams = mf.depth.expected_gram(jnp.eye(10), 1, rescale="std")
    >>> round(float(mf.depth.pair_angles(grams[1])[0]), 2)          # already at the fixed point
    74.65
    """
    stray = sorted(set(layer) - set(LAYER))
    if stray:
        raise TypeError(f"layer must be among {list(LAYER)}, got {stray}")
    return _recursion(jnp.asarray(gram), depth, renormalize, **layer)


class FixedPoint(NamedTuple):
    """A Gram matrix that a layer reproduces up to scale.

    Attributes:
        gram: the matrix, scaled to mean squared length 1.
        growth: mean squared length after one more layer.
        steps: number of layers that were used.
        residual: largest change of an entry in the last layer.
    """

    gram: Float[Array, "n n"]
    growth: Float[Array, ""]
    steps: Int[Array, ""]
    residual: Float[Array, ""]


@partial(jax.jit, static_argnames=("max_steps", *LAYER))
def fixed_point(
    gram: Float[ArrayLike, "n n"],
    *,
    tolerance: float | Float[Array, ""] = 1e-12,
    max_steps: int = 100_000,
    **layer: Unpack[LayerOptions],
) -> FixedPoint:
    """Apply one layer, up to scale, until the Gram matrix no longer changes.

    Only states that attract are found this way; ``stability`` gives the eigenvalues of a state.

    Args:
        gram: Gram matrix to start from.
        tolerance: stop when no entry moves by more than this.
        max_steps: stop after so many layers in any case.
        **layer: the arguments of ``layer_map``.

    >>> point = fixed_point(jnp.eye(4) + 1.0, recenter=False)      # plain ReLU: all directions merge, slowly
    >>> bool(point.gram.min() > 0.99)
    True
    """
    start_gram = jnp.asarray(gram)

    def step(state: FixedPoint) -> FixedPoint:
        image = layer_map(state.gram, **layer)
        unit = _unit(image)
        change = jnp.max(jnp.abs(unit - state.gram))
        return FixedPoint(unit, jnp.trace(image) / start_gram.shape[0], state.steps + 1, change)

    dtype = start_gram.dtype
    start = FixedPoint(
        _unit(start_gram), jnp.ones((), dtype), jnp.zeros((), int), jnp.full((), jnp.inf, dtype)
    )
    going = lambda state: (state.residual > tolerance) & (state.steps < max_steps)
    return jax.lax.while_loop(going, step, start)


def stability(
    gram: Float[ArrayLike, "n n"], **layer: Unpack[LayerOptions]
) -> Float[np.ndarray, "modes"] | Complex[np.ndarray, "modes"]:
    """Return the eigenvalues of one layer, up to scale, linearized at a Gram matrix; largest modulus first.

    The derivative acts on symmetric matrices, so there are n(n+1)/2 eigenvalues. The direction of ``gram`` itself has
    eigenvalue 0, because the scale is divided out. A fixed point attracts when all moduli are below 1. The function
    runs on the host and costs O(n^6).

    Args:
        gram: the matrix at which the layer is linearized, usually a ``fixed_point``.
        **layer: the arguments of ``layer_map``.

    >>> point = fixed_point(jnp.eye(4), rescale="rms")
    >>> bool(abs(stability(point.gram, rescale="rms")[0]) < 1)
    True
    """
    gram = jnp.asarray(gram)
    n, dtype = gram.shape[0], gram.dtype
    i, j = np.triu_indices(n)

    def step(entries: jax.Array) -> jax.Array:
        upper = jnp.zeros((n, n), dtype).at[i, j].set(entries)
        full = upper + upper.T - jnp.diag(jnp.diagonal(upper))
        return _unit(layer_map(full, **layer))[i, j]

    jacobian = np.asarray(jax.jit(jax.jacfwd(step))(_unit(gram)[i, j]))
    values = np.linalg.eigvals(jacobian)
    return values[np.argsort(-np.abs(values))]


def batchnorm_cosine(n: float) -> Float[Array, ""]:
    """Return the cosine between any two samples at the fixed point of batch norm + ReLU, for a batch of n.

    It is kappa(-1/(n-1)): recentered orthogonal samples have pairwise cosine -1/(n-1), and rescaling does not change
    the cosines of an exchangeable batch. n = inf gives 1/pi, that is 71.44 degrees. The same state is a fixed point of
    recenter + ReLU.

    >>> round(float(batchnorm_cosine(jnp.inf)), 4)
    0.3183
    """
    return kappa(-1.0 / (jnp.asarray(n, float) - 1.0))


def rescaled_cosine_limit(nodes: int = 200, steps: int = 200) -> Float[Array, ""]:
    """Return the cosine between any two samples at the fixed point of rms rescaling + ReLU, for infinite batches.

    Samples are z_i = sqrt(c) g + sqrt(1-c) e_i with one common normal g, so the root mean square of the batch is
    sqrt(c g^2 + 1 - c). The cosine obeys c = 2 E_g[h(g)^2 / (c g^2 + 1 - c)] with h(g) = E[relu(z_i) | g]. It is
    the cosine of 58.75 degrees.

    Args:
        nodes: Gauss-Legendre nodes of the expectation over g.
        steps: fixed-point iterations.

    >>> round(float(jnp.degrees(jnp.arccos(rescaled_cosine_limit()))), 2)
    58.75
    """
    t, w = np.polynomial.legendre.leggauss(nodes)
    g = jnp.asarray(10 * t)
    law = jnp.asarray(10 * w) * jax.scipy.stats.norm.pdf(g)

    def step(_: object, c: jax.Array) -> jax.Array:
        mean, deviation = jnp.sqrt(c) * g, jnp.sqrt(1 - c)
        ratio = mean / deviation
        h = mean * jax.scipy.stats.norm.cdf(ratio) + deviation * jax.scipy.stats.norm.pdf(ratio)
        return 2 * jnp.sum(law * h**2 / (c * g**2 + 1 - c))

    return jax.lax.fori_loop(0, steps, step, jnp.asarray(0.5))
