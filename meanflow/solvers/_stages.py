"""One step of an explicit Runge-Kutta method with its stages written out.

diffrax goes through the stages of a step, and through the steps, in loops whose length the device finds out as it runs:
an accelerator asks the host before each turn. ``descend`` knows the number of its steps, and with the stages written
out nothing is left to ask.
"""

from collections.abc import Callable

import diffrax
import jax
import numpy as np
from jaxtyping import PyTree

Field = Callable[[PyTree[jax.Array]], PyTree[jax.Array]]


def runge_kutta(
    method: diffrax.AbstractERK, field: Field, y: PyTree[jax.Array], size: jax.Array
) -> PyTree[jax.Array]:
    """Return y + size sum_i b_i k_i with the stages k_i = field(y + size sum_(j < i) a_ij k_j).

    Args:
        method: its table of coefficients a, b is used. Stages behind the last b_i != 0 are left out: they serve error
            estimates and interpolation only.
        field: dy/dt, which does not depend on time.
        y: where the step starts.
        size: length of the step, a scalar.

    >>> import jax.numpy as jnp
    >>> float(runge_kutta(diffrax.Midpoint(), lambda y: y, jnp.array(8.0), jnp.array(0.5)))
    13.0
    """
    table = method.tableau
    if not isinstance(table, diffrax.ButcherTableau):
        raise ValueError(f"solver must have one table of coefficients, got {type(method).__name__}")
    used = int(np.flatnonzero(table.b_sol)[-1]) + 1
    stages: list[PyTree[jax.Array]] = []
    for row in (np.zeros(0), *table.a_lower)[:used]:
        stages.append(field(_moved(y, size, row, stages)))
    return _moved(y, size, table.b_sol[:used], stages)


def _moved(
    y: PyTree[jax.Array], size: jax.Array, shares: np.ndarray, stages: list[PyTree[jax.Array]]
) -> PyTree[jax.Array]:
    """Return y + size sum_i shares_i stages_i, leaving out shares that are 0."""
    terms = [(float(share), k) for share, k in zip(shares, stages, strict=True) if share != 0]
    if not terms:
        return y

    def sum_up(u: jax.Array, *slopes: jax.Array) -> jax.Array:
        total = sum(
            (share * k for (share, _), k in zip(terms[1:], slopes[1:], strict=True)), terms[0][0] * slopes[0]
        )
        return u + size * total

    return jax.tree.map(sum_up, y, *(k for _, k in terms))
