"""Activations: those known by name, smooth and stretched ones. All act elementwise; relu'(0) = 0 by convention."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Annotated

import jax
import jax.numpy as jnp
import numpy as np

from meanflow import _boundary
from meanflow._boundary import checked, choice, either, number, unchecked
from meanflow._reuse import canonical, kept

Activation = Callable[[jax.Array], jax.Array]


@checked
def softplus(sharpness: Annotated[float, number(above=0, static=True)]) -> Activation:
    """Return z -> log(1 + exp(k z)) / k, a smooth relu; k = 1 is the usual softplus.

    >>> round(float(softplus(4.0)(jnp.array(0.0))), 4)
    0.1733
    """
    return lambda z: jax.nn.softplus(sharpness * z) / sharpness


@checked
@dataclasses.dataclass(frozen=True)
class Stretched:
    """The activation z -> s(frequency z); equal ones compile once, and dual activations know their closed forms.

    Attributes:
        name: a name in ``NAMED``.
        frequency: the factor.

    >>> round(float(Stretched("erf", 0.5**0.5)(jnp.array(1.0))), 4)
    0.6827
    """

    name: Annotated[str, unchecked("looked up below")]
    frequency: Annotated[float, number(static=True)]

    def __post_init__(self) -> None:
        """Refuse names that are not known."""
        _boundary.one_of("name", self.name, NAMED)

    def __call__(self, z: jax.Array) -> jax.Array:
        """Return s(frequency z), elementwise."""
        return NAMED[self.name](self.frequency * z)


NAMED: dict[str, Activation] = {
    "relu": jax.nn.relu,  # unlike maximum(z, 0), its derivative at 0 is 0
    "leaky_relu": jax.nn.leaky_relu,
    "tanh": jnp.tanh,
    "erf": jax.scipy.special.erf,
    "gelu": lambda z: jax.nn.gelu(z, approximate=False),
    "softplus": jax.nn.softplus,
    "sine": jnp.sin,
    "gaussian": lambda z: jnp.exp(-0.5 * z**2),
    "linear": lambda z: z,
}


_KINKED = ("relu", "leaky_relu")  # of those in ``NAMED``


@kept()
def has_kink(activation: Activation) -> bool:
    """Say whether the slope of an activation jumps at 0, by looking at it on either side; kinks elsewhere are not seen.

    >>> has_kink(NAMED["relu"]), has_kink(lambda z: jnp.abs(z)), has_kink(NAMED["softplus"])
    (True, True, False)
    """
    known = [name for name, function in NAMED.items() if function is activation]
    if known:  # the usual case compiles nothing
        return known[0] in _KINKED
    with jax.ensure_compile_time_eval():
        # slopes next to 0 on the scale of those farther away, so that steep smooth functions pass; one program for all
        slope = jax.jit(lambda u, v: jax.jvp(activation, (u,), (v,))[1])
        places = np.array([-1e-12, 1e-12, -1.0, 1.0], jnp.result_type(float))
        slopes = np.asarray(slope(places, np.ones_like(places)))
    return bool(abs(slopes[1] - slopes[0]) > 1e-3 * np.max(np.abs(slopes)))


def _elementwise(name: str, value: object) -> object:
    """Accept a function that maps real arrays to real arrays of the same shape."""
    _boundary.taking(1)(name, value)
    try:
        found = jax.eval_shape(value, jax.ShapeDtypeStruct((3,), jnp.result_type(float)))  # type: ignore[arg-type]
    except Exception as problem:
        raise ValueError(f"{name} must map arrays of numbers, but fails on them: {problem}") from problem
    if getattr(found, "shape", None) != (3,) or not _boundary.is_real(found.dtype):
        raise ValueError(
            f"{name} must map real arrays to real arrays of the same shape, got {found} for shape (3,)"
        )
    return value


AnyActivation = Annotated[str | Activation, either(choice(*NAMED), _elementwise)]


def resolve(activation: str | Activation) -> Activation:
    """Return the function behind a name; for a callable the first one of equal value, which spares compiling again.

    Raises:
        ValueError: for a name that is not in ``NAMED``.

    >>> resolve("relu") is NAMED["relu"]
    True
    """
    if callable(activation):
        return canonical(activation)
    _boundary.one_of("activation", activation, NAMED)
    return NAMED[activation]
