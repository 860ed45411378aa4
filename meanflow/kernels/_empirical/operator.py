"""The tangent kernel as a linear operator, multiplied by without forming it.

K(x, z) v = J(x) (J(z)' v): one vector-Jacobian and one Jacobian-vector product on the whole batch, right for coupled
samples too. A product costs about four forward passes and the memory of the batch's activations.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated

import equinox as eqx
import jax
import numpy as np
from jaxtyping import Array, ArrayLike, Float, PyTree, Shaped

from meanflow import _boundary
from meanflow._boundary import checked
from meanflow._reuse import compiled
from meanflow.kernels._empirical.coupling import check_function, kernel_maps
from meanflow.kernels._empirical.modules import Apply, Normalized, Params, as_arrays, batches, floats
from meanflow.kernels._empirical.plan import AnyApply, Stats


class KernelOperator(eqx.Module):
    """The kernel K(x, z) on vectors of length S C (outputs of sample 0 first, then sample 1, ...).

    ``operator @ v`` multiplies by a vector (S C,) or by the columns of a matrix (S C, k). ``operator.matvec()`` is the
    linear map itself, linearized once, for use in a compiled loop or in ``jax.scipy.sparse.linalg.cg``.

    Attributes:
        apply: the network, plain or ``Normalized``.
        params: its parameters.
        x: the batch (T, ...).
        stats: which statistics normalize, as in ``empirical_ntk``.
        z: second batch (S, ...), or None for x.
    """

    apply: Apply | Normalized
    params: Params
    x: Shaped[Array, "T ..."]
    stats: str | None = eqx.field(static=True)
    z: Shaped[Array, "S ..."] | None = None

    def _functions(self) -> tuple[Callable[[Params], Array], Callable[[Params], Array]]:
        """Return params -> all outputs as one vector, at x and at z."""
        maps = kernel_maps(self.apply, self.params, self.x, self.z, self.stats)
        return (lambda p: maps.left(p).reshape(-1)), (lambda p: maps.right(p).reshape(-1))

    @property
    def shape(self) -> tuple[int, int]:
        """The shape (T C, S C) of the matrix."""
        rows, columns = (jax.eval_shape(f, self.params).shape[0] for f in self._functions())
        return rows, columns

    @property
    def dtype(self) -> np.dtype:
        """The dtype of the outputs."""
        return jax.eval_shape(self._functions()[0], self.params).dtype

    def matvec(self) -> Callable[[Float[Array, " n"]], Float[Array, " m"]]:
        """Return the map v -> K v, with the forward passes done once."""
        moving, still = eqx.partition(self.params, eqx.is_inexact_array)
        at = lambda function: jax.linearize(lambda p: function(eqx.combine(p, still)), moving)[1]
        left, right = self._functions()
        push = at(left)
        # J(z)' is the transpose of the linearized map, which stores no second set of activations where z is x
        pull = jax.linear_transpose(push if self.z is None else at(right), moving)
        return lambda v: push(pull(v)[0])

    def __matmul__(self, v: Float[Array, "n *k"]) -> Float[Array, "m *k"]:
        vectors = _boundary.array((None,), (None, None))("v", v)
        if vectors.shape[0] != self.shape[1]:
            raise ValueError(f"v must have {self.shape[1]} rows, got shape {vectors.shape}")
        return _multiply(self, vectors)


@compiled
def _multiply(operator: KernelOperator, v: Float[Array, "n *k"]) -> Float[Array, "m *k"]:
    product = operator.matvec()
    return product(v) if v.ndim == 1 else jax.vmap(product, in_axes=1, out_axes=1)(v)


@checked
def ntk_operator(
    apply: AnyApply,
    params: Annotated[Params, floats],
    x: Annotated[PyTree[Shaped[ArrayLike, "T ..."]], batches],
    z: Annotated[PyTree[Shaped[ArrayLike, "S ..."]], batches] | None = None,
    *,
    stats: Stats | None = None,
) -> KernelOperator:
    """Return the kernel K(x, z) of ``apply`` as an operator, a ``KernelOperator``.

    Args:
        apply: (params, batch) -> outputs (T, ...); a plain function, or a ``Normalized`` one.
        params: pytree; integer leaves are constants.
        x: batch (T, ...), or a pytree of such arrays.
        z: second batch (S, ...), or None for x.
        stats: which statistics normalize the samples, as in ``empirical_ntk``.

    >>> import jax.numpy as jnp
    >>> K = ntk_operator(lambda w, x: x @ w, jnp.ones(2), jnp.array([[1.0, 0.0], [1.0, 1.0]]))
    >>> (K @ jnp.array([1.0, 1.0])).tolist()
    [2.0, 3.0]
    """
    function, left, right = as_arrays(apply, x, z)
    check_function(function, params, left, right, stats)
    return KernelOperator(function, params, left, stats, right)
