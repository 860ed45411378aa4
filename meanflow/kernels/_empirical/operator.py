"""The tangent kernel as a linear operator, multiplied by without forming it.

K(x, z) v = J(x) (J(z)' v): one vector-Jacobian and one Jacobian-vector product on the whole batch, right for coupled
samples too. A product costs about four forward passes and the memory of the batch's activations.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, ArrayLike, Float, PyTree, Shaped

from meanflow import _boundary
from meanflow._boundary import Count, Positive, PRNGKey, Rate, checked
from meanflow._reuse import compiled
from meanflow.kernels._empirical.coupling import check_function, kernel_maps
from meanflow.kernels._empirical.modules import Apply, Normalized, Params, as_arrays, batches, floats
from meanflow.kernels._empirical.plan import AnyApply, Stats


class Solved(NamedTuple):
    """The solution of a linear system with a kernel.

    Attributes:
        values: a, of the shape of the right-hand side.
        residual: |y - (K + ridge) a| / |y|, computed anew from a.
    """

    values: Float[Array, "n *k"]
    residual: Float[Array, ""]


class KernelOperator(eqx.Module):
    """The kernel K(x, z) on vectors of length S C (outputs of sample 0 first, then sample 1, ...).

    ``operator @ v`` multiplies by a vector (S C,) or by the columns of a matrix (S C, k). ``operator.matvec()`` is the
    linear map itself, linearized once, for use in a compiled loop. ``operator.solve(y)`` is kernel regression.

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

    @checked
    def solve(
        self,
        y: Annotated[Float[ArrayLike, "n *k"], _boundary.array((None,), (None, None))],
        *,
        ridge: Rate = 0.0,
        tolerance: Positive = 1e-4,
        steps: Count = 1000,
        top: Count | None = None,
        key: PRNGKey | None = None,
    ) -> Solved:
        """Solve (K + ridge) a = y by conjugate gradients: kernel regression without forming K, of 10^5 samples too.

        The prediction at z is K(z, x) a, ``ntk_operator(apply, params, z, x) @ a``. Iteration stops as soon as the
        residual is at most ``tolerance`` |y|. It takes about sqrt((largest + ridge) / (smallest + ridge)) log(1 /
        tolerance) products, for the eigenvalues that are left when the ``top`` largest are taken out.

        Args:
            y: right-hand side (n,), or several as columns (n, k).
            ridge: added to the diagonal, at least 0.
            tolerance: relative residual at which the iteration stops.
            steps: the most products.
            top: so many leading eigenvalues are found by Lanczos first, for 2 top + 30 products and memory n times as
                many numbers, and brought down to the last of them. They are what slows the iteration.
            key: for the start of Lanczos; needed with ``top``.

        Returns:
            ``values`` a and its relative ``residual``.

        Raises:
            ValueError: if the residual is above twice the tolerance after the last step.

        >>> import jax.numpy as jnp
        >>> K = ntk_operator(lambda w, x: x @ w, jnp.ones(2), jnp.array([[1.0, 0.0], [1.0, 1.0]]))
        >>> K.solve(jnp.array([2.0, 3.0])).values.round(4).tolist()
        [1.0, 1.0]
        """
        if self.z is not None:
            raise ValueError("solve needs a symmetric kernel, got one between x and z")
        vectors = jnp.asarray(y)
        _boundary.shape("y", vectors, (self.shape[0], *vectors.shape[1:]))
        found = None
        if top is not None:
            from meanflow.kernels._empirical.spectra import top_eigenpairs  # which knows operators

            if key is None:
                raise ValueError("key must be given with top, got None")
            found = top_eigenpairs(self, top, key=key)[:2]
        solved = _solve(self, vectors, jnp.asarray(ridge, vectors.dtype), tolerance, steps, found)
        if (residual := _boundary.concrete(solved.residual)) is not None and not residual <= 2 * tolerance:
            raise ValueError(
                f"steps={steps} leave a residual of {residual:.2g}, above tolerance={tolerance:.2g}: allow more "
                "steps, or give a larger ridge or top"
            )
        return solved


@compiled
def _solve(
    operator: KernelOperator,
    y: Float[Array, "n *k"],
    ridge: Float[Array, ""],
    tolerance: float | Array,
    steps: int,
    pairs: tuple[Float[Array, " top"], Float[Array, "n top"]] | None,
) -> Solved:
    product = operator.matvec()
    columns = product if y.ndim == 1 else jax.vmap(product, in_axes=1, out_axes=1)
    system = lambda v: columns(v) + ridge * v

    def precondition(v: Array) -> Array:
        # (K + ridge)^-1 along the leading eigenvectors U, and the identity elsewhere, on one scale
        if pairs is None:
            return v
        values, vectors = pairs
        shrink = (values[-1] + ridge) / (values + ridge) - 1
        return v + vectors @ (shrink.reshape((-1,) + (1,) * (v.ndim - 1)) * (vectors.T @ v))

    # JAX's own iteration: that of lineax also counts its steps, but would be a dependency for this one place
    found, _ = jax.scipy.sparse.linalg.cg(system, y, tol=tolerance, maxiter=steps, M=precondition)
    return Solved(found, jnp.linalg.norm(y - system(found)) / jnp.linalg.norm(y))


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
