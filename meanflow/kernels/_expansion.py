"""Taylor expansions of a network in its parameters.

The expansion of degree 1 is the linearized network, which trains with a constant tangent kernel: the kernel regime as a
function that can be trained, compared with the network, and passed to ``empirical_ntk``.
"""

from __future__ import annotations

import math
from typing import Annotated

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from meanflow._boundary import checked, count, taking
from meanflow.kernels._empirical.modules import Apply, Batch, Function, Normalized, Outputs, Params, floats


class TaylorExpansion(Function):
    """A network expanded in its parameters, called as ``expansion(params, batch)``; ``taylor_expand`` makes one.

    Attributes:
        apply: the network.
        center: the parameters at which it is expanded.
        degree: of the polynomial.
    """

    apply: Apply | Normalized
    center: Params
    degree: int = eqx.field(static=True)

    def __call__(self, params: Params, batch: Batch) -> Outputs:
        """Return the polynomial at ``params``; integer leaves stay those of the center."""
        start, still = eqx.partition(self.center, eqx.is_inexact_array)
        shift = jax.tree.map(lambda a, b: b - a, start, eqx.filter(params, eqx.is_inexact_array))

        # the network along the straight line from the center to the parameters: a function of one number
        def line(step: Float[Array, ""]) -> Outputs:
            moved = jax.tree.map(lambda a, d: a + step.astype(a.dtype) * d, start, shift)
            return self.apply(eqx.combine(moved, still), batch)

        # its Taylor polynomial around 0 at 1, by forward mode nested as often as the degree
        zero, one, term = jnp.zeros(()), jnp.ones(()), line
        total = line(zero)
        for order in range(1, self.degree + 1):
            term = lambda step, lower=term: jax.jvp(lower, (step,), (one,))[1]  # type: ignore[misc]
            total = total + term(zero) / math.factorial(order)
        return total


@checked
def taylor_expand(
    apply: Annotated[Apply | Normalized, taking(2)],
    params: Annotated[Params, floats],
    degree: Annotated[int, count(0, 8)] = 1,
) -> TaylorExpansion:
    """Return the Taylor polynomial of a network in its parameters around ``params``.

    sum_{j <= degree} (1/j!) d^j/de^j apply(params + e (p - params), x) at e = 0, as a function of (p, x).

    Args:
        apply: (params, batch) -> outputs.
        params: the center of the expansion.
        degree: 1 linearizes. The cost grows like 2^degree forward passes.

    Returns:
        A ``TaylorExpansion``, a function (params, batch) -> outputs like ``apply``.

    >>> import jax.numpy as jnp
    >>> square = lambda w, x: x * w**2
    >>> float(taylor_expand(square, jnp.array(1.0))(jnp.array(3.0), jnp.array([1.0]))[0])  # 1 + 2 (3 - 1)
    5.0
    >>> float(taylor_expand(square, jnp.array(1.0), 2)(jnp.array(3.0), jnp.array([1.0]))[0])
    9.0
    """
    return TaylorExpansion(apply, params, degree)
