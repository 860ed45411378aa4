"""What weight decay does to a univariate ReLU network: it evens out the balance and acts as a penalty on abs(r)."""

import jax.numpy as jnp
from jaxtyping import Array, Float

from meanflow import _checks
from meanflow._checks import array, number

Scalar = float | Float[Array, ""]


@_checks.arguments(delta=array(infinite=True), decay=number(), t=array())
def decayed_balance(delta: Float[Array, "*m"], decay: Scalar, t: Scalar) -> Float[Array, "*m"]:
    """Return the balance delta = c^2 - a^2 - b^2 after time t under weight decay: delta' = -2 decay delta.

    Weight decay adds (decay/2) sum_i (a_i^2 + b_i^2 + c_i^2) to the loss of the full network. Without it delta
    is conserved (Lemma 3); with it every network tends to balance, at a rate that does not depend on the data.
    """
    return delta * jnp.exp(-2 * decay * t)


@_checks.arguments(r=array(), delta=array(infinite=True), decay=number())
def decay_velocity(
    r: Float[Array, "*m"], delta: Float[Array, "*m"], decay: Scalar
) -> tuple[Float[Array, "*m"], Float[Array, "*m"], Float[Array, "*m"]]:
    """Return what weight decay adds to (r', theta', delta') in lifted coordinates: (-2 decay r, 0, -2 decay delta)."""
    return -2 * decay * r, jnp.zeros_like(r), -2 * decay * delta


@_checks.arguments(delta=array(), step=number(), decay=number())
def descended_balance(
    delta: Float[Array, " m"],
    gradients: tuple[Float[Array, " m"], Float[Array, " m"], Float[Array, " m"]],
    step: Scalar,
    decay: Scalar = 0.0,
) -> Float[Array, " m"]:
    """Return the balance after one step of gradient descent, exactly.

    It is (1 - step decay)^2 delta + step^2 (g_c^2 - g_a^2 - g_b^2).

    Args:
        delta: balances before the step.
        gradients: (g_a, g_b, g_c) of the loss without the decay.
        step: learning rate.
        decay: weight decay.
    """
    g_a, g_b, g_c = gradients
    return (1 - step * decay) ** 2 * delta + step**2 * (g_c**2 - g_a**2 - g_b**2)


@_checks.arguments(decay=number(low=0), alpha=number(above=0))
def decay_to_charge(decay: float, alpha: float) -> float:
    """Return the penalty lam = decay * alpha on the charge that weight decay amounts to.

    A balanced neuron pays (decay/2)(a^2 + b^2 + c^2) = lam abs(r)/m, every other neuron more.
    """
    return decay * alpha
