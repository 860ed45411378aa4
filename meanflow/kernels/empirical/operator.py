"""The tangent kernel as a linear operator, multiplied by without forming it.

K v = J (J' v): one vector-Jacobian and one Jacobian-vector product on the whole batch, right for coupled samples too. A
product costs about four forward passes and the memory of the batch's activations.
"""

from collections.abc import Callable

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, ArrayLike, Float, Shaped

from meanflow import _checks
from meanflow.kernels.empirical.coupling import STATS, kernel_maps
from meanflow.kernels.empirical.modules import Apply, Normalized, Params, batch


class KernelOperator(eqx.Module):
    """The kernel K(x, x) on vectors of length T C (outputs of sample 0 first, then sample 1, ...).

    ``operator @ v`` multiplies by a vector (T C,) or by the columns of a matrix (T C, k). ``operator.matvec()`` is the
    linear map itself, linearized once, for use in a compiled loop or in ``jax.scipy.sparse.linalg.cg``.

    Attributes:
        apply: the network, plain or ``Normalized``.
        params: its parameters.
        x: the batch (T, ...).
        stats: which statistics normalize, as in ``empirical_ntk``.
        uncoupled: whether ``apply`` was found to treat each sample on its own, so that it is not probed again.
    """

    apply: Apply | Normalized
    params: Params
    x: Shaped[Array, "T ..."]
    stats: str | None = eqx.field(static=True)
    uncoupled: bool = eqx.field(static=True)

    def _function(self) -> Callable[[Params], Float[Array, " n"]]:
        """Return params -> all outputs as one vector."""
        if self.uncoupled:
            return lambda p: self.apply(p, self.x).reshape(-1)
        left = kernel_maps(self.apply, self.params, self.x, None, self.stats).left
        return lambda p: left(p).reshape(-1)

    @property
    def shape(self) -> tuple[int, int]:
        """The shape (T C, T C) of the matrix."""
        size = jax.eval_shape(self._function(), self.params).shape[0]
        return size, size

    @property
    def dtype(self) -> np.dtype:
        """The dtype of the outputs."""
        return jax.eval_shape(self._function(), self.params).dtype

    def matvec(self) -> Callable[[Float[Array, " n"]], Float[Array, " n"]]:
        """Return the map v -> K v, with the forward pass done once."""
        moving, still = eqx.partition(self.params, eqx.is_inexact_array)
        function = self._function()
        _, push = jax.linearize(lambda p: function(eqx.combine(p, still)), moving)
        pull = jax.linear_transpose(push, moving)
        return lambda v: push(pull(v)[0])

    def __matmul__(self, v: Float[Array, "n *k"]) -> Float[Array, "n *k"]:
        return _multiply(self, v)


@eqx.filter_jit
def _multiply(operator: KernelOperator, v: Float[Array, "n *k"]) -> Float[Array, "n *k"]:
    product = operator.matvec()
    return product(v) if v.ndim == 1 else jax.vmap(product, in_axes=1, out_axes=1)(v)


@_checks.arguments(apply=_checks.function, x=batch, stats=_checks.optional(_checks.choice(*STATS)))
def ntk_operator(
    apply: Apply | Normalized,
    params: Params,
    x: Shaped[ArrayLike, "T ..."],
    *,
    stats: str | None = None,
) -> KernelOperator:
    """Return the kernel of ``apply`` at (params, x) as an operator, a ``KernelOperator``.

    Args:
        apply: (params, batch) -> outputs (T, ...); a plain function, or a ``Normalized`` one.
        params: pytree; integer leaves are constants.
        x: batch (T, ...).
        stats: which statistics normalize the samples, as in ``empirical_ntk``.

    >>> import jax.numpy as jnp
    >>> K = ntk_operator(lambda w, x: x @ w, jnp.ones(2), jnp.array([[1.0, 0.0], [1.0, 1.0]]))
    >>> (K @ jnp.array([1.0, 1.0])).tolist()
    [2.0, 3.0]
    """
    samples = jnp.asarray(x)
    maps = kernel_maps(apply, params, samples, None, stats)
    return KernelOperator(apply, params, samples, stats, maps.single is apply)
