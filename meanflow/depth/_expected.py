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

from __future__ import annotations

from functools import partial
from typing import Annotated

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, ArrayLike, Float

from meanflow import _boundary
from meanflow._boundary import Count, checked
from meanflow._loops import iterate
from meanflow._matrices import matrix
from meanflow.depth._propagation import RECENTERED, VARIANCE, Layer, need_variation
from meanflow.kernels._infinite.dual import dual_activation

HOMOGENEOUS = ("relu", "linear", "leaky_relu")
"""Activations with phi(t z) = t phi(z) for t > 0, so that rescaling can be taken out of the expectation."""


def dual_map(gram: Float[Array, "n n"], activation: str = "relu") -> Float[Array, "n n"]:
    """Return E[phi(z) phi(z)'] for z ~ N(0, K), the expected Gram matrix that a single neuron contributes.

    >>> print(dual_map(2 * jnp.eye(1)))                               # half of the squared length is lost
    [[1.]]
    """
    square = jnp.diagonal(gram)
    first, second = (jnp.broadcast_to(v, gram.shape) for v in (square[:, None], square[None, :]))
    return dual_activation(activation)(first, second, gram).value


def recentered(gram: Float[Array, "n n"]) -> Float[Array, "n n"]:
    """Return H K H, the Gram matrix of the batch minus its mean."""
    gram = gram - jnp.mean(gram, axis=0, keepdims=True)
    return gram - jnp.mean(gram, axis=1, keepdims=True)


@partial(jax.jit, static_argnames=("layer", "nodes"))
def layer_map(
    gram: Float[Array, "n n"], layer: Layer = RECENTERED, *, nodes: int = 100
) -> Float[Array, "n n"]:
    """Return the expected Gram matrix after one layer of infinite width.

    Without rescaling, this is the Gram matrix of a layer as wide as its input, at a cost of O(n^2). With rescaling, it
    is the expected product for one neuron, E[x_i x_j], at a cost of O(nodes n^3) (matrix products).

    >>> layer_map(jnp.eye(2), Layer(recenter=False)).round(4).tolist()          # the off-diagonal is 1/pi
    [[1.0, 0.3183], [0.3183, 1.0]]
    """
    assert isinstance(layer.activation, str) and isinstance(layer.weights, str)
    sigma = recentered(gram) if layer.recenter else gram
    if layer.rescale is None:
        return VARIANCE[layer.weights] * dual_map(sigma, layer.activation)
    # after recentering, the deviations from the mean and from zero are the same number
    about_mean = layer.rescale == "std" and not layer.recenter
    return _rescaled_map(sigma, about_mean, layer.activation, nodes)


def _rescaled_map(sigma: jax.Array, about_mean: bool, activation: str, nodes: int) -> jax.Array:
    """Return E[phi(z_i) phi(z_j) / s^2] for z ~ N(0, sigma), by quadrature over t in [0, oo)."""
    n = sigma.shape[0]
    inner = recentered(sigma) if about_mean else sigma  # AKA of the text above
    # 1/s^2 = n int_0^oo exp(-t z'Az) dt moves the scale into the density of z, which becomes Gaussian again with
    # covariance (K^-1 + 2tA)^-1 and mass det(I + 2tAKA)^(-1/2); what is left is one integral over t
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
        # the resolvent is that of HKH; by Woodbury the covariance of z is K - 2t KH (I + 2t HKH)^-1 HK
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
    # with M = (I + 2tK)^-1 and T = (K^-1 + 2t)^-1 = M K:  dM = -2t M dK M - 2 dt M T,  dT = M dK M - 2 dt T^2,
    # and log det(I + 2tK)^(-1/2) has the differential -t tr(M dK) - dt tr(T)
    (_, times), (d_gram, d_times) = primals, tangents
    inverse, tilted, root = _resolvent(*primals)
    t, dt = times[:, None, None], d_times[:, None, None]
    turned = inverse @ d_gram[None] @ inverse
    d_inverse = -2 * (t * turned + dt * (inverse @ tilted))
    d_tilted = turned - 2 * dt * (tilted @ tilted)
    trace = lambda u: jnp.trace(u, axis1=1, axis2=2)
    d_root = -root * (times * trace(inverse @ d_gram[None]) + d_times * trace(tilted))
    return (inverse, tilted, root), (d_inverse, d_tilted, d_root)


@partial(jax.jit, static_argnames=("depth", "layer", "renormalize", "nodes"))
def _recursion(gram: jax.Array, depth: int, layer: Layer, renormalize: bool, nodes: int) -> jax.Array:
    """Iterate ``layer_map`` in one compiled scan."""
    # mean squared length 1, or the length as it is
    scaled = lambda u: u * (u.shape[0] / jnp.trace(u)) if renormalize else u
    step = lambda gram, _: scaled(layer_map(gram, layer, nodes=nodes))
    return iterate(step, scaled(gram), None, depth, 1, lambda gram: gram, first=True)[1]


@checked
def expected_gram(
    gram: Annotated[Float[ArrayLike, "n n"], matrix()],
    depth: Count,
    layer: Layer = RECENTERED,
    *,
    renormalize: bool = False,
    nodes: Count = 100,
) -> Float[Array, "{depth}+1 n n"]:
    """Return the expected Gram matrices of an infinitely wide network, layer by layer.

    Args:
        gram: Gram matrix of the input batch.
        depth: number of layers.
        layer: what every layer does, as in ``propagate``; with the activation ``"relu"``, ``"leaky_relu"`` or
            ``"linear"`` and the weights ``"he"`` or ``"gaussian"``. Rescaling by ``"std"`` without recentering needs
            n >= 4; for smaller batches the expectation is infinite.
        renormalize: scale every matrix to mean squared length 1.
        nodes: Gauss-Legendre nodes of the rescaling integral; 100 nodes give 1e-13 in double precision.

    Returns:
        One matrix for the input and for each layer. Without rescaling, layers are as wide as their input; with
        rescaling, the entries are E[x_i x_j] of one neuron. A layer costs O(n^2), with rescaling O(nodes n^3).

    >>> import jax.numpy as jnp, meanflow as mf
    >>> grams = mf.depth.expected_gram(jnp.eye(10), 1, mf.depth.Layer(rescale="std"))
    >>> round(float(mf.depth.Gram(grams[1]).pair_angles[0]), 2)          # already at the fixed point
    74.65
    """
    _boundary.one_of("layer.activation", layer.activation, HOMOGENEOUS)
    _boundary.one_of("layer.weights", layer.weights, VARIANCE)
    gram = jnp.asarray(gram)
    if layer.rescale == "std" and not layer.recenter and gram.shape[0] < 4:
        raise ValueError(f"rescale='std' without recenter needs a batch of at least 4, got {gram.shape[0]}")
    if (known := _boundary.concrete(gram)) is not None:
        square = np.diagonal(known)
        deviation = np.diagonal(known - known.mean(0) - known.mean(1)[:, None] + known.mean())
        rounding = 8 * len(known) * np.finfo(known.dtype).eps * square.max()
        need_variation("gram", layer, deviation > rounding, square)
    found = _recursion(gram, depth, layer, renormalize, nodes)
    if (traces := _boundary.concrete(jnp.trace(found, axis1=1, axis2=2))) is not None:
        limits = np.finfo(traces.dtype)
        lost = np.flatnonzero(~(np.isfinite(traces) & (traces > limits.tiny / limits.eps)))
        if len(lost):
            raise ValueError(
                f"depth must be < {lost[0]} unless renormalize=True: lengths leave the range of {found.dtype}"
            )
    return found
