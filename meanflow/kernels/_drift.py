"""How a tangent kernel changes while a network trains: drift from its start, and alignment with the target."""

from collections.abc import Callable

import jax.numpy as jnp
from jaxtyping import Array, ArrayLike, Float

from meanflow import _checks


def alignment(
    kernel: Float[ArrayLike, "T T"], y: Float[ArrayLike, " T"], *, centered: bool = False
) -> Float[Array, ""]:
    """Return <K, y y'> / (|K| |y y'|) in [0, 1]: how much of the kernel points along the target.

    Args:
        kernel: K (T, T).
        y: target (T,).
        centered: remove the means of K's rows and columns and of y first.

    >>> y = jnp.array([1.0, 2.0])
    >>> round(float(alignment(y[:, None] * y[None, :], y)), 6)
    1.0
    """
    kernel, y = jnp.asarray(kernel), jnp.asarray(y)
    if centered:
        y = y - jnp.mean(y)
        kernel = kernel - jnp.mean(kernel, axis=0, keepdims=True)
        kernel = kernel - jnp.mean(kernel, axis=1, keepdims=True)
    return y @ (kernel @ y) / (jnp.linalg.norm(kernel) * (y @ y))


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


def drift_observer(
    kernel: Callable[..., Float[Array, "T ..."]], reference: Float[Array, "T ..."]
) -> Callable[..., dict[str, Float[Array, ""]]]:
    """Return an ``observe`` callback that compares the kernel with ``reference`` along a run.

    Args:
        kernel: called with what the callback is called with. For ``solve`` and ``descend`` that is
            ``lambda flow, cloud, data: mf.tangent_kernel(flow, cloud, data.x)``; for a loop over parameters
            ``lambda params: empirical_ntk(apply, params, x, stats=...)``.
        reference: the kernel at the start.

    Returns:
        A callback that returns "drift" (as ``kernel_drift``), "trace" and "kernel cosine", which is
        <K, K_0> / (|K| |K_0|).

    >>> observe = drift_observer(lambda w: w * jnp.eye(2), jnp.eye(2))
    >>> float(observe(3.0)["drift"])
    2.0
    """
    norm = jnp.linalg.norm(reference.reshape(-1))

    def observe(*state: object) -> dict[str, Float[Array, ""]]:
        now = kernel(*state)
        size = jnp.linalg.norm(now.reshape(-1))
        return {
            "drift": kernel_drift(now[None], reference)[0],
            "trace": jnp.sum(jnp.diagonal(now)),
            "kernel cosine": jnp.sum(now * reference) / (norm * size),
        }

    return observe
