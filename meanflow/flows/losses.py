"""Losses l(f, y), elementwise in prediction f and target y, with derivatives in f."""

from collections.abc import Callable

import equinox as eqx
import jax
import jax.numpy as jnp

from meanflow import _checks

LossFunction = Callable[[jax.Array, jax.Array], jax.Array]


def squared(f: jax.Array, y: jax.Array) -> jax.Array:
    """(f - y)^2 / 2."""
    return 0.5 * (f - y) ** 2


def logistic(f: jax.Array, y: jax.Array) -> jax.Array:
    """log(1 + exp(-y f)) for labels y = -1 or 1."""
    return jax.nn.softplus(-y * f)


def huber(f: jax.Array, y: jax.Array) -> jax.Array:
    """|f - y|^2 / 2 up to |f - y| = 1, then linear."""
    gap = jnp.abs(f - y)
    return jnp.where(gap <= 1, 0.5 * gap**2, gap - 0.5)


NAMED: dict[str, LossFunction] = {"squared": squared, "logistic": logistic, "huber": huber}


class Loss(eqx.Module):
    """A loss by name (``"squared"``, ``"logistic"``, ``"huber"``) or any elementwise callable (f, y) -> loss."""

    function: LossFunction = eqx.field(static=True)

    def __init__(self, loss: "str | LossFunction | Loss") -> None:
        if isinstance(loss, Loss):
            loss = loss.function
        if not callable(loss):
            _checks.one_of("loss", loss, NAMED)
            loss = NAMED[loss]
        self.function = loss

    def __call__(self, f: jax.Array, y: jax.Array) -> jax.Array:
        """l(f, y), same shape as f."""
        return self.function(f, y)

    def slope(self, f: jax.Array, y: jax.Array) -> jax.Array:
        """l'(f, y), the derivative in f."""
        return jax.jvp(lambda g: self.function(g, y), (f,), (jnp.ones_like(f),))[1]

    def curvature(self, f: jax.Array, y: jax.Array) -> jax.Array:
        """l''(f, y), the second derivative in f."""
        return jax.jvp(lambda g: self.slope(g, y), (f,), (jnp.ones_like(f),))[1]


LOSS = _checks.either(_checks.choice(*NAMED), _checks.function)  # a Loss can be called too
