"""Kernels of univariate ReLU features relu(a x - b) in closed form, for several laws of the weights (a, b).

A wide network whose inner weights (a, b) are drawn from a law (``meanflow.univariate._weight_laws``), with an
independent outer weight c, has the kernels ("univariate ReLU", equations 23 and 27)

    random_feature(x, z) = E relu(a x - b) relu(a z - b)
    indicator(x, z)      = E 1(a x > b) 1(a z > b)
    univariate_ntk(x, z) = random_feature + E(c^2) (x z + 1) indicator
"""

from __future__ import annotations

from typing import Annotated

import jax
import jax.numpy as jnp
from jaxtyping import Array, ArrayLike, Float

from meanflow._boundary import Positive, Rate, array, checked
from meanflow.univariate._weight_laws import AnyLaw, pairs, weight_law

# Compiled once for each class of laws and each shape: the parameters of the law are arguments of the program.
_feature_gram = jax.jit(lambda law, x, z: law.random_feature(*pairs(x, z)))
_indicator_gram = jax.jit(lambda law, x, z: law.indicator(*pairs(x, z)))


@checked
def random_feature(
    x: Annotated[Float[ArrayLike, "*x"], array(squares=True)],
    z: Annotated[Float[ArrayLike, "*z"], array(squares=True)] | None = None,
    *,
    law: Annotated[AnyLaw, weight_law] = "signs",
) -> Float[Array, "*shape"]:
    """Return the random-feature kernel E relu(a x - b) relu(a z - b), equation (23).

    Args:
        x: inputs of any shape, for example (n,) or a scalar.
        z: second inputs of any shape; x itself if None.
        law: "signs" (a = +-1, b ~ U(-1, 1)), "uniform" (both U(-1, 1)), "radial" (both standard normal); or the laws of
            a and b, such as ``{"a": laws.signs(), "b": laws.uniform(-2, 2)}``, with which ``full().init`` draws.

    Returns:
        Array of shape x.shape + z.shape.

    >>> float(random_feature(0.5, 0.5, law="radial"))
    0.625
    """
    return _feature_gram(weight_law("law", law), jnp.asarray(x), None if z is None else jnp.asarray(z))


@checked
def indicator(
    x: Float[ArrayLike, "*x"],
    z: Float[ArrayLike, "*z"] | None = None,
    *,
    law: Annotated[AnyLaw, weight_law] = "signs",
) -> Float[Array, "*shape"]:
    """Return the probability that a neuron is active at both points, E 1(a x > b) 1(a z > b).

    Args:
        x: inputs of any shape.
        z: second inputs of any shape; x itself if None.
        law: law of (a, b), as for ``random_feature``.

    Returns:
        Array of shape x.shape + z.shape.

    >>> float(indicator(0.25, -0.25, law="signs"))
    0.375
    """
    return _indicator_gram(weight_law("law", law), jnp.asarray(x), None if z is None else jnp.asarray(z))


@checked
def univariate_ntk(
    x: Annotated[Float[ArrayLike, "*x"], array(squares=True)],
    z: Annotated[Float[ArrayLike, "*z"], array(squares=True)] | None = None,
    *,
    law: Annotated[AnyLaw, weight_law] = "signs",
    c2: Rate = 1.0,
    scale: Positive = 1.0,
) -> Float[Array, "*shape"]:
    """Return the tangent kernel scale [K_RF + E(c^2)(xz + 1) K_1] of training (a, b, c) at infinite width, (27).

    K_RF is ``random_feature`` and K_1 is ``indicator``.

    Args:
        x: inputs of any shape.
        z: second inputs of any shape; x itself if None.
        law: law of (a, b), as for ``random_feature``; c must be independent of it.
        c2: E(c^2). The kernel of finitely many neurons is ``tangent_kernel(full(alpha), cloud, x) / m``.
        scale: m / alpha^2 for the output scale alpha; 1 for alpha = sqrt(m).

    Returns:
        Array of shape x.shape + z.shape.

    >>> round(float(univariate_ntk(0.5, 0.5, law="radial")), 6)  # 0.625 + (0.25 + 1)/2
    1.25
    """
    left, right = pairs(x, z)
    return scale * (random_feature(x, z, law=law) + c2 * (left * right + 1) * indicator(x, z, law=law))
