"""The output scale alpha(m) of a network f = (1/alpha) sum_i ..., and the three clocks it defines."""

from __future__ import annotations

from typing import Annotated

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

from meanflow import _boundary
from meanflow._boundary import choice, either, number
from meanflow._module import Module
from meanflow.measures._cloud import Cloud

NAMES = ("m", "sqrt", "one")
Alpha = Annotated[
    str | float | jax.Array, either(choice(*NAMES), number(above=0))
]  # "m", "sqrt", "one" or a positive number

CLOCKS = ("mean_field", "gradient", "lazy", "normalized")


class Scaling(Module):
    """alpha as a function of the width m: ``"m"``, ``"sqrt"``, ``"one"`` or a positive number."""

    kind: str = eqx.field(static=True)
    value: jax.Array | None

    def __init__(self, alpha: Alpha = "m") -> None:
        if isinstance(alpha, str):
            _boundary.one_of("alpha", alpha, NAMES)
            self.kind, self.value = alpha, None
        else:
            _boundary.bounds("alpha", alpha, above=0.0)
            self.kind, self.value = "number", jnp.asarray(alpha, jnp.result_type(float))

    def check(self, cloud: Cloud) -> None:
        """Raise ValueError at infinite width unless alpha = m, the only scale that has a limit there."""
        known = _boundary.concrete(cloud.width)
        if self.kind != "m" and known is not None and not np.all(np.isfinite(known)):
            raise ValueError(
                f"alpha={self.kind!r} needs a finite cloud.width, got infinity (a quadrature cloud); use alpha='m'"
            )

    def ratio(self, cloud: Cloud) -> jax.Array:
        """Return m / alpha, the factor between the network and the mean over its neurons; 1 for ``"m"``."""
        self.check(cloud)
        # the width counts real neurons: padding must not change the network
        m = cloud.width
        if self.kind == "m":
            return jnp.ones_like(m)
        if self.kind == "sqrt":
            return jnp.sqrt(m)
        return m if self.value is None else m / self.value.astype(m.dtype)


def check_clock(clock: str, cloud: Cloud) -> None:
    """Raise ValueError if ``clock`` has no meaning at the width of the cloud; skipped while the width is traced."""
    _boundary.one_of("clock", clock, CLOCKS)
    known = _boundary.concrete(cloud.width)
    if clock == "gradient" and known is not None and not np.all(np.isfinite(known)):
        raise ValueError("clock='gradient' needs a finite cloud.width, got an infinite one; use 'mean_field'")


def speed(clock: str, scaling: Scaling, cloud: Cloud) -> jax.Array:
    """Return d t_mf / d t for a clock t: the factor that multiplies the mean-field velocity.

    | clock | t in terms of mean-field time | use |
    |---|---|---|
    | ``mean_field`` | t_mf | w' = -C grad V |
    | ``gradient`` | m t_mf | learning rate x steps of plain gradient descent on the loss |
    | ``lazy`` | t_mf (m/alpha)^2 | f moves at speed O(1) for every alpha |
    | ``normalized`` | dt = dt_mf sum_j q_j abs(l'(f_j, y_j)) | losses that vanish while margins grow |

    The last one depends on the state; the run multiplies by what is missing here (``Problem.pace``).
    """
    check_clock(clock, cloud)
    if clock in ("mean_field", "normalized"):
        return jnp.ones_like(cloud.width)
    # the tangent kernel is (m/alpha)^2 times that of the mean over neurons
    if clock == "lazy":
        return scaling.ratio(cloud) ** -2
    # a neuron of m has the m-th part of the gradient of the mean
    return 1.0 / cloud.width
