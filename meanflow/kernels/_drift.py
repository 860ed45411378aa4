"""How far a tangent kernel has moved while a network trained."""

import jax.numpy as jnp
from jaxtyping import Array, ArrayLike, Float

from meanflow import _checks


@_checks.arguments(
    kernels=_checks.array(rank=2, squares=True), reference=_checks.optional(_checks.array(squares=True))
)
def kernel_drift(
    kernels: Float[ArrayLike, "k T ..."], reference: Float[ArrayLike, "T ..."] | None = None
) -> Float[Array, " k"]:
    """Return |K_i - K_0| / |K_0| in the Frobenius norm for every kernel of a stack.

    Args:
        kernels: (k, T, T), or (k, T, T, C, C).
        reference: K_0, by default the first of the stack.

    >>> kernel_drift(jnp.stack([jnp.eye(2), 3 * jnp.eye(2)])).tolist()
    [0.0, 2.0]
    """
    stack = jnp.asarray(kernels)
    base = stack[0] if reference is None else jnp.asarray(reference)
    _checks.shape("reference", base, stack.shape[1:])
    change = jnp.sqrt(jnp.sum((stack - base[None]) ** 2, axis=tuple(range(1, stack.ndim))))
    return change / jnp.linalg.norm(base.reshape(-1))
