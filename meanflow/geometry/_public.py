"""The public functions of the batch-norm manifold: each checks its arguments and then runs the inner function.

The inner functions of the same names are in ``meanflow.geometry._omega``. They check nothing, are
compiled, and are what flows and solvers call. Vectors are (..., d), the ``covariance`` S is (d, d);
the arrays of one call broadcast against each other along their leading axes.
"""

from __future__ import annotations

from typing import Annotated

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, ArrayLike, Float

from meanflow import _boundary
from meanflow._boundary import array, checked
from meanflow._matrices import matrix
from meanflow.geometry import _omega as omega
from meanflow.geometry._space import BatchNormManifold, norms
from meanflow.measures._cloud import BatchNormNeurons, Cloud, Neurons

Vectors = Float[ArrayLike, "*#batch d"]
Matrix = Float[ArrayLike, "d d"]

VECTORS = array(rank=1, squares=True)
Tangents = Annotated[Vectors, VECTORS]
Covariance = Annotated[Matrix, matrix(definite=True)]


def nonzero(name: str, value: object) -> jax.Array:
    """Accept vectors (..., d) that have a direction, that is, none of which is zero."""
    vectors = VECTORS(name, value)
    known = _boundary.concrete(vectors)
    if vectors.shape[-1] == 0 or (known is not None and not np.all(np.any(known != 0, axis=-1))):
        raise ValueError(
            f"{name} must hold nonzero vectors, got {_boundary.show(vectors)} with a zero vector"
        )
    return vectors


Nonzero = Annotated[Vectors, nonzero]


def _fit(covariance: ArrayLike | None = None, **vectors: ArrayLike) -> None:
    """Refuse arrays of one call whose dimensions do not fit together."""
    (first, given), *rest = ((name, jnp.shape(value)) for name, value in vectors.items())
    for name, other in rest:
        if other[-1] != given[-1]:
            raise ValueError(f"{name} must have as many columns as {first}, {given[-1]}, got shape {other}")
        try:
            jnp.broadcast_shapes(given, other)
        except ValueError:
            raise ValueError(f"{name} must have a shape that fits {first}, {given}, got {other}") from None
    if covariance is not None and jnp.shape(covariance)[-1] != given[-1]:
        d = given[-1]
        raise ValueError(f"covariance must have shape ({d}, {d}) to fit {first}, got {jnp.shape(covariance)}")


@checked
def normalize(b: Nonzero, covariance: Covariance | None = None) -> Float[Array, "*batch d"]:
    """Map raw weights to Omega: T(b) = b / |b|_S, (..., d), the same for b and any positive multiple of it.

    Without a covariance it is the direction b/|b|, the inverse of T and the isometry from Omega to the unit sphere.

    Args:
        b: nonzero raw weights or points of Omega (..., d).
        covariance: S (d, d), symmetric and positive definite, or None for the identity.

    >>> normalize([3.0, 0.0], [[4.0, 0.0], [0.0, 1.0]]).tolist(), normalize([0.5, 0.0]).tolist()
    ([0.5, 0.0], [1.0, 0.0])
    """
    _fit(covariance, b=b)
    return omega.direction(b) if covariance is None else omega.normalize(b, covariance)


@checked
def metric(bb: Nonzero, covariance: Covariance) -> Float[Array, "*batch d d"]:
    """Return the ambient matrix G (..., d, d) at points of Omega; its kernel is the normal u = S bb.

    For tangent vectors <v, w>_G = v' G w = |bb|^-2 (v.w - (v.bb)(w.bb)/|bb|^2).

    Args:
        bb: points of Omega (..., d).
        covariance: S (d, d), symmetric and positive definite.

    >>> metric([1.0, 0.0], [[1.0, 0.0], [0.0, 1.0]]).tolist()
    [[0.0, 0.0], [0.0, 1.0]]
    """
    _fit(covariance, bb=bb)
    return omega.metric(bb, covariance)


@checked
def distance(bb: Nonzero, other: Nonzero) -> Float[Array, "*batch"]:
    """Return the geodesic distance on (Omega, G), shape (...): the angle of two vectors (..., d) in radians.

    Args:
        bb, other: points of Omega (..., d).

    >>> round(float(distance([1.0, 0.0], [0.0, 3.0])), 4)
    1.5708
    """
    _fit(bb=bb, other=other)
    return omega.distance(bb, other)


@checked
def exp(bb: Nonzero, v: Tangents, covariance: Covariance) -> Float[Array, "*batch d"]:
    """Return the endpoint (..., d), at time 1, of the geodesic from bb with tangent velocity v (|v|_G in radians).

    Args:
        bb: points of Omega (..., d).
        v: tangent vectors at bb (..., d).
        covariance: S (d, d), symmetric and positive definite.

    >>> exp([1.0, 0.0], [0.0, jnp.pi / 2], [[1.0, 0.0], [0.0, 1.0]]).round(6).tolist()
    [0.0, 1.0]
    """
    _fit(covariance, bb=bb, v=v)
    return omega.exp(bb, v, covariance)


@checked
def log(bb: Nonzero, other: Nonzero, covariance: Covariance) -> Float[Array, "*batch d"]:
    """Return the tangent v (..., d) at bb with exp(bb, v) = other.

    Args:
        bb, other: points of Omega (..., d), not opposite to each other: opposite points are joined by many geodesics of
            length pi. While they are traced they cannot be looked at, and the result for opposite points is NaN.
        covariance: S (d, d), symmetric and positive definite.

    >>> print(log([1.0, 0.0], [0.0, 1.0], [[1.0, 0.0], [0.0, 1.0]])[1].round(4))
    1.5708
    """
    _fit(covariance, bb=bb, other=other)
    # opposite points are known by the NaN that the inner function leaves
    tangent = omega.log(bb, other, covariance)
    known = _boundary.concrete(tangent)
    if known is not None and np.isnan(known).any():
        raise ValueError("other must not be opposite to bb: opposite points have no unique geodesic")
    return tangent


def _neurons(cloud: Cloud) -> Neurons | BatchNormNeurons:
    """Return the particles of a cloud, which must be neurons with a and b."""
    if not isinstance(cloud.particles, Neurons | BatchNormNeurons):
        raise TypeError(f"cloud must hold Neurons(a, b), got {type(cloud.particles).__name__}")
    return cloud.particles


@checked
def project(cloud: Cloud, covariance: Annotated[Matrix, matrix()]) -> Cloud:
    """Map raw neurons (a, b) to the batch-norm manifold: (a, T(b)) with label c = |b|, which the flow conserves.

    If S is singular, b is first projected on its range: (a, T(P b)) with label c = |P b|. While S is traced it cannot
    be looked at and is taken to be regular.

    Args:
        cloud: neurons with b (m, d), none of which is zero or in the null space of S.
        covariance: S (d, d), symmetric and positive semi-definite.

    >>> raw = Cloud(Neurons(jnp.ones(1), jnp.array([[3.0, 4.0]])))
    >>> project(raw, jnp.eye(2)).labels.tolist()
    [5.0]
    """
    b = nonzero("cloud.particles.b", _neurons(cloud).b)
    _fit(covariance, b=b)
    manifold = BatchNormManifold(jnp.asarray(covariance))
    known = None if manifold.null is None else _boundary.concrete(b - b @ manifold.null)
    # what rounding leaves of a neuron in the null space must not be blown up to length 1
    if known is not None and np.any(np.linalg.norm(known, axis=1) <= 1e-10 * np.linalg.norm(b, axis=1)):
        raise ValueError(
            "cloud.particles.b must have a part in the range of the covariance, got one in its null space"
        )
    return manifold.from_raw(Cloud(cloud.particles, cloud.weights, width=cloud.width))


@checked
def lift(cloud: Cloud) -> Cloud:
    """Invert ``project``: map (a, bb) with labels c (m,) to (a, b), b = c bb/|bb| (m, d); c = 1 without labels.

    Args:
        cloud: neurons on the batch-norm manifold.

    >>> reduced = Cloud(Neurons(jnp.ones(1), jnp.array([[0.6, 0.8]])), labels=5.0)
    >>> print(lift(reduced).particles.b.round(6))
    [[3. 4.]]
    """
    bb = nonzero("cloud.particles.b", _neurons(cloud).b)
    _boundary.bounds("labels (the norms c = |b|)", norms(cloud), above=0.0)
    raw = cloud.particles._replace(b=norms(cloud)[:, None] * omega.direction(bb))
    return Cloud(raw, cloud.weights, width=cloud.width)
