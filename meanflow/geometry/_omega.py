"""The batch-norm manifold (Omega, G): the ellipsoid b' S b = 1 with the metric that batch norm induces.

Batch norm evaluates a neuron at bb = T(b) = b / |b|_S, a point of Omega = {bb : bb' S bb = 1}. Gradient descent
on a raw b of unit length moves bb by the gradient flow of the metric (with u = S bb, the normal of Omega)

    G     = |bb|^-2 (P - w w'/|bb|^2),  P = I - u u'/|u|^2,  w = P bb,
    G^-1  = |bb|^2 (I - bb u')(I - u bb').

(Omega, G) is isometric to the round unit sphere through bb -> bb/|bb|; so distance, exp and log are those of the
sphere and cost O(d) beside the product S bb. Nothing here needs a pseudo-inverse. Vectors are (..., d), the
covariance S is (d, d); metric inner products of *tangent* vectors do not depend on S at all.

A singular S has a smaller Omega: all formulas hold for bb in the range of S, with differentials g that lie there too.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from meanflow import _boundary
from meanflow._numerics import safe_norm
from meanflow.geometry import _sphere as sphere
from meanflow.geometry._sphere import dot

Vectors = Float[Array, "*#batch d"]  # points and tangent vectors; batches are broadcast
Matrix = Float[Array, "d d"]

ROUNDING = 4  # eigenvalues of correlations below this times d eps are zero: what sums of products leave


def null_projector(covariance: Matrix) -> Matrix | None:
    """Return the projector (d, d) on the null space of S; None if S is regular, or traced and taken to be so.

    Inputs of variance 0 are constant, and the rest is judged by its correlations, whatever its units: a pixel that is
    dark in all images but one, or a length in metres beside one in millimetres, has a variance far below that of the
    others, which is no rounding error. (``Dataset.moments`` gives constant columns variance 0 exactly.)

    >>> null_projector(jnp.diag(jnp.array([1.0, 0.0]))).tolist()
    [[0.0, 0.0], [0.0, 1.0]]
    >>> null_projector(jnp.eye(2)) is None
    True
    """
    known = _boundary.concrete(covariance)
    if known is None or known.ndim != 2 or not np.all(np.isfinite(known)):
        return None
    # in float64 whatever the input is: the eigenvalues must be better than the rounding they are judged by
    eps, matrix = float(np.finfo(known.dtype).eps), known.astype(np.float64)
    variance = np.diagonal(matrix)
    # what numpy.cov leaves of a constant column, in float64: its deviation is an eps of the others at most
    constant = variance <= np.finfo(np.float64).eps ** 2 * np.max(variance, initial=0.0)
    # the null space of S is that of the correlations in units of the standard deviations
    root = np.sqrt(np.where(constant, 1.0, variance))
    moving = ~constant
    correlation = (matrix / np.outer(root, root))[np.ix_(moving, moving)]
    values, vectors = np.linalg.eigh(correlation)
    null = np.zeros((len(root), len(values)))
    null[moving] = vectors / root[moving, None]
    null = np.concatenate(
        [null[:, values <= ROUNDING * len(root) * eps], np.eye(len(root))[:, constant]], axis=1
    )
    if not null.shape[1]:
        return None
    # in raw units the vectors are no longer orthogonal
    basis = np.linalg.qr(null)[0]
    return jnp.asarray(basis @ basis.T, known.dtype)


@jax.jit
def sigma_norm(b: Vectors, covariance: Matrix) -> Float[Array, "... 1"]:
    """Return |b|_S = sqrt(b' S b), the standard deviation of b . x. b (..., d), S (d, d) -> (..., 1)."""
    # whole-array product: some jax releases miscompile a vmapped w -> w' S w
    return jnp.sqrt(dot(b, b @ covariance))


@jax.jit
def normalize(b: Vectors, covariance: Matrix) -> Vectors:
    """Map raw weights to Omega: T(b) = b / |b|_S, (..., d), the same for b and any positive multiple of it."""
    return b / sigma_norm(b, covariance)


@jax.jit
def direction(bb: Vectors) -> Vectors:
    """Return the unit vector bb/|bb|, (..., d): inverse of T on the unit sphere, and the isometry Omega -> sphere."""
    return bb / safe_norm(bb, keepdims=True)


@jax.jit
def project(bb: Vectors, v: Vectors, covariance: Matrix) -> Vectors:
    """Return (I - bb u') v, the projection along bb onto the tangent space {v : u . v = 0} at bb."""
    return v - bb * dot(bb @ covariance, v)


@jax.jit
def cometric_apply(bb: Vectors, covector: Vectors, covariance: Matrix) -> Vectors:
    """Return the gradient of a differential g, G^-1 g = |bb|^2 (I - bb u')(I - u bb') g, (..., d). O(d) after S bb."""
    u = bb @ covariance
    # from right to left, so that no d x d matrix is made
    h = covector - u * dot(bb, covector)
    return dot(bb, bb) * (h - bb * dot(u, h))


@jax.jit
def inner(bb: Vectors, v: Vectors, w: Vectors) -> Float[Array, "..."]:
    """Return <v, w>_G = |bb|^-2 (v.w - (v.bb)(w.bb)/|bb|^2) for tangent v, w; shape (...)."""
    # for tangent vectors P drops out of the metric, and with it the covariance
    square = dot(bb, bb)
    return ((dot(v, w) - dot(v, bb) * dot(w, bb) / square) / square)[..., 0]


@jax.jit
def metric(bb: Vectors, covariance: Matrix) -> Float[Array, "... d d"]:
    """Return the ambient matrix G (..., d, d) at points bb (..., d); its kernel is the normal u = S bb."""
    outer = lambda v: v[..., :, None] * v[..., None, :]
    u, square = bb @ covariance, dot(bb, bb)[..., None]
    tangent = jnp.eye(bb.shape[-1], dtype=bb.dtype) - outer(u) / dot(u, u)[..., None]
    w = jnp.sum(tangent * bb[..., None, :], axis=-1)
    return (tangent - outer(w) / square) / square


@jax.jit
def distance(bb: Vectors, other: Vectors) -> Float[Array, "..."]:
    """Return the geodesic distance on (Omega, G), shape (...): the angle of two vectors (..., d) in radians."""
    return sphere.angle(direction(bb), direction(other))


def _on_sphere(bb: Vectors, v: Vectors) -> tuple[Vectors, Vectors]:
    """Return the image of bb on the unit sphere, and the tangent vector there that v is mapped to."""
    # the differential of bb -> bb/|bb|: the radial part of v does not turn the direction
    s = direction(bb)
    return s, (v - s * dot(s, v)) / safe_norm(bb, keepdims=True)


@jax.jit
def exp(bb: Vectors, v: Vectors, covariance: Matrix) -> Vectors:
    """Return the endpoint (..., d), at time 1, of the geodesic from bb with tangent velocity v (|v|_G in radians)."""
    return normalize(sphere.exp(*_on_sphere(bb, v)), covariance)


@jax.jit
def log(bb: Vectors, other: Vectors, covariance: Matrix) -> Vectors:
    """Return the tangent v (..., d) at bb with exp(bb, v) = other; NaN for opposite vectors."""
    # a vector of the sphere's tangent plane, moved along bb into the tangent plane of Omega
    turn = sphere.log(direction(bb), direction(other))
    return safe_norm(bb, keepdims=True) * project(bb, turn, covariance)


@jax.jit
def retract(bb: Vectors, v: Vectors, covariance: Matrix) -> Vectors:
    """Return the end of one raw gradient step, renormalised, (..., d). It is |v|_G^3 / 3 away from ``exp``."""
    s, turn = _on_sphere(bb, v)
    return normalize(s + turn, covariance)
