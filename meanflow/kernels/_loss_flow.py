"""Gradient flow of any loss under a fixed kernel, by an ODE solver.

f' = -K Q dloss/df has no closed form unless the loss is squared. The dual coefficients beta, of which f(z) =
f_0(z) + K(z, x) beta at every point z, obey beta' = -Q dloss/df(x): one ODE of the size of the targets.
"""

from __future__ import annotations

import abc
from collections.abc import Callable
from typing import Annotated, TypeAlias

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, ArrayLike, Float, Real

from meanflow import _boundary
from meanflow._boundary import array, checked
from meanflow._reuse import compiled, inlined
from meanflow.kernels._gaussian import as_matrix


def from_dual(
    dual: Float[Array, "*times_n_k"], cross: Float[Array, "..."], start: Float[Array, "S *k"]
) -> Float[Array, "*times_S_k"]:
    """Return f(z) = f_0(z) + K(z, x) beta, shape times.shape + start.shape."""
    matrix, first = as_matrix(jnp.asarray(cross)), jnp.asarray(start)
    times = dual.shape[: dual.ndim - first.ndim]
    columns = dual.reshape((*times, matrix.shape[1], -1))
    moved = jnp.einsum("sj,...jc->...sc", matrix, columns).reshape(times + first.shape)
    return first.reshape((1,) * len(times) + first.shape) + moved


OUTPUTS = _boundary.array((None,), (None, None))
Outputs = Annotated[Float[ArrayLike, "n *k"], OUTPUTS]
Cross = Annotated[Float[Array, "S n ..."], array((None, None), (None,) * 4)]  # K(z, x)
Times = Annotated[Real[ArrayLike, "..."], array(low=0, infinite=True, least=0)]  # or numbers of steps

Loss: TypeAlias = Callable[[Array, Array], Array]


def cross_entropy(outputs: Float[Array, " k"], target: Float[Array, " k"]) -> Float[Array, ""]:
    """Return the cross-entropy of softmax(outputs) with the probabilities ``target``, of one sample."""
    return -jnp.sum(target * jax.nn.log_softmax(outputs))


class DualFlow(eqx.Module):
    """Training under a fixed kernel, known by its dual coefficients.

    Attributes:
        target: y, (n,) or (n, k).
    """

    target: Float[Array, "n *k"]

    def check_cross(self, name: str, kernel: Array, rows: int | None = None) -> None:
        """Refuse a kernel between ``rows`` points and the samples that does not fit to the targets."""
        n, *k = self.target.shape
        _boundary.shape(name, kernel, (rows, n), *([(rows, n, *k, *k)] if k else []))

    @abc.abstractmethod
    def dual(self, times: Real[ArrayLike, "..."]) -> Float[Array, "*times_n_k"]:
        """Return the dual coefficients beta, shape times.shape + y.shape: f(z) = f_0(z) + K(z, x) beta."""

    @checked
    def at(
        self, cross: Cross, start: Annotated[Float[Array, "S *k"], OUTPUTS], times: Times
    ) -> Float[Array, "*times_S_k"]:
        """Return f at other points z, shape times.shape + start.shape.

        Args:
            cross: K(z, x), (S, n), or (S, n, k, k).
            start: f_0(z), (S,) or (S, k).
            times: times or numbers of steps.
        """
        self.check_cross("cross", cross)
        _boundary.shape("start", start, (cross.shape[0], *self.target.shape[1:]))
        return from_dual(self.dual(times), cross, start)


class LossFlow(DualFlow):
    """Gradient flow of any loss under a fixed kernel, by an ODE solver; ``kernel_flow`` makes one.

    beta' = -q dloss/df, f = f(0) + K beta. The methods are those of ``KernelFlow``.

    Attributes:
        kernel: K as a matrix, (N, N).
        start: f(0), (n,) or (n, k).
        weights: q, (n,).
        sample_loss: (outputs, target) of one sample -> number.
    """

    kernel: Float[Array, "N N"]
    start: Float[Array, "n *k"]
    weights: Float[Array, " n"]
    sample_loss: Loss

    @checked
    def dual(self, times: Times) -> Float[Array, "*times_n_k"]:
        """Return the dual coefficients beta, shape times.shape + y.shape: f(z) = f_0(z) + K(z, x) beta."""
        _boundary.finite("times of a loss that is not squared", times)
        found = _dual_of_loss(self, jnp.asarray(times, self.start.dtype))
        if (known := _boundary.concrete(found)) is not None and not np.isfinite(known).all():
            raise ValueError(
                "times must be in reach of 100 000 steps of the solver, got later ones or a loss that is not smooth"
            )
        return found

    @checked
    def __call__(self, times: Times) -> Float[Array, "*times_n_k"]:
        """Return f at the training points, shape times.shape + y.shape."""
        return from_dual(self.dual(times), self.kernel, self.start)

    @checked
    def loss(self, times: Times) -> Float[Array, "*times"]:
        """Return the loss, shape times.shape."""
        outputs = self(times).reshape((-1, *self.start.shape))
        each = jax.vmap(jax.vmap(self.sample_loss), in_axes=(0, None))(outputs, self.target)
        return (each @ self.weights).reshape(jnp.shape(times))


@compiled
def _dual_of_loss(flow: LossFlow, times: Float[Array, "..."]) -> Float[Array, "*times_n_k"]:
    """Solve for the dual coefficients at all times, to a relative accuracy near the root of the rounding error."""
    import diffrax

    # dloss/df of each sample, (n,) or (n, k)
    slope = jax.vmap(jax.grad(flow.sample_loss))
    weights = flow.weights.reshape((-1,) + (1,) * (flow.start.ndim - 1))
    shape = (flow.kernel.shape[0], -1)

    def field(t: ArrayLike, dual: Array, args: None) -> Array:
        outputs = flow.start + (flow.kernel @ dual.reshape(shape)).reshape(flow.start.shape)
        return -weights * slope(outputs, flow.target)

    flat = times.reshape(-1)
    order = jnp.argsort(flat)
    tolerance = float(jnp.finfo(flow.start.dtype).eps) ** 0.6
    # the last time is moved off 0, where there would be nothing to solve
    end = jnp.where(flat[order[-1]] > 0, flat[order[-1]], 1.0)
    found = inlined(diffrax.diffeqsolve)(
        diffrax.ODETerm(field),
        diffrax.Dopri8(),
        jnp.zeros((), times.dtype),
        end,
        None,
        jnp.zeros_like(flow.start),
        saveat=diffrax.SaveAt(ts=flat[order]),
        stepsize_controller=diffrax.PIDController(rtol=tolerance, atol=tolerance),
        max_steps=100_000,
        throw=False,  # what is not reached is infinite
    ).ys
    # back into the order of the times: written to their places, since to invert an order needs no second sort
    return jnp.zeros_like(found).at[order].set(found).reshape(times.shape + flow.start.shape)
