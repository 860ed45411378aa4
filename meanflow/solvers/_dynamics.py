"""What moves beside the gradient: noise at a temperature, or weights that react.

Both are terms of the one equation (``flows._equation``) and of the one step (``Problem.noise``, ``Problem.move``).
They exclude each other: the free energy would need reaction with V + tau log rho, and a cloud has no density rho.
"""

from __future__ import annotations

import abc
from typing import Annotated, Any

import equinox as eqx
import jax
import jax.numpy as jnp

from meanflow import _boundary
from meanflow._boundary import PRNGKey, checked, instance, number
from meanflow._loops import KeyBits
from meanflow.flows._flow import Flow
from meanflow.measures._cloud import Cloud
from meanflow.solvers._step import Scalar, as_number

NOISE = 1_000_003  # folded into the key, so that noise does not repeat the numbers of minibatches with the same key


class Dynamics(eqx.Module):
    """A term of the equation beside transport; pass one as ``dynamics=`` to ``solve`` or ``descend``."""

    @abc.abstractmethod
    def terms(self, dtype: jnp.dtype) -> dict[str, Any]:
        """Return the fields of ``Problem`` that this term sets."""

    @abc.abstractmethod
    def names(self) -> dict[str, str]:
        """Return the texts that a resumed run must share, by name."""

    @abc.abstractmethod
    def numbers(self) -> dict[str, Scalar]:
        """Return the numbers that a resumed run must share, by name."""

    @abc.abstractmethod
    def check(self, flow: Flow, cloud: Cloud) -> None:
        """Refuse a model or cloud for which the term has no meaning."""


@checked
class Noise(Dynamics):
    """Noise at a temperature tau, which adds tau log rho to V: particles diffuse.

    dw = -C grad V dt + tau (div C - 1/2 C grad log det C) dt + sqrt(2 tau) C^(1/2) dW, in Euler-Maruyama steps.

    Attributes:
        temperature: tau >= 0.
        key: PRNG key; step k uses fold_in(key, k), so runs can be resumed. None only in a sweep, which gives every cell
            a key of its own.

    >>> import jax
    >>> Noise(0.01, jax.random.key(0)).temperature
    0.01
    """

    temperature: Annotated[float | Scalar, number(low=0)]
    key: PRNGKey | None = None

    def terms(self, dtype: jnp.dtype) -> dict[str, Any]:
        """Return temperature and key."""
        assert self.key is not None  # checked before
        bits = KeyBits(jax.random.fold_in(self.key, NOISE))
        return {"temperature": jnp.asarray(self.temperature, dtype), "key": bits}

    def names(self) -> dict[str, str]:
        """Return that there is a temperature."""
        return {"dynamics": "temperature"}

    def numbers(self) -> dict[str, Scalar]:
        """Return the temperature."""
        return {"temperature": as_number(self.temperature)}

    def check(self, flow: Flow, cloud: Cloud) -> None:
        """Refuse a missing key, and coordinates in which the noise has no meaning."""
        if self.key is None:
            raise ValueError("dynamics must be Noise with a PRNG key, got Noise(temperature, key=None)")
        chart = flow.chart(cloud)
        chart.flow.space.check_noise(chart.base)
        chart.model.space.check_noise(cloud)


@checked
class Reaction(Dynamics):
    """Weights that grow where V is low: p_i'/p_i = -beta (V(w_i) - <V>).

    Attributes:
        rate: beta >= 0.
        conserve: whether the total mass is conserved; False leaves out <V>, and ``Solution.final.total`` changes.

    >>> Reaction(0.5).conserve
    True
    """

    rate: Annotated[float | Scalar, number(low=0)]
    conserve: bool = eqx.field(static=True, default=True)

    def terms(self, dtype: jnp.dtype) -> dict[str, Any]:
        """Return rate and conservation."""
        return {"reaction": jnp.asarray(self.rate, dtype), "conserve": self.conserve}

    def names(self) -> dict[str, str]:
        """Return that there is a reaction, and of which kind."""
        return {"dynamics": "reaction", "conserve": str(self.conserve)}

    def numbers(self) -> dict[str, Scalar]:
        """Return the rate."""
        return {"reaction": as_number(self.rate)}

    def check(self, flow: Flow, cloud: Cloud) -> None:
        """Refuse nothing: every cloud has weights."""


_boundary.declare(Dynamics, instance(Dynamics, hint="for instance Noise(0.01, key) or Reaction(1.0)"))
