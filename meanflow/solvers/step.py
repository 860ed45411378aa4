"""Step rules: a fixed step, or one that follows the tangent kernel."""

from typing import Any, NamedTuple

import diffrax
import equinox as eqx
import jax
import jax.numpy as jnp

from meanflow import _checks
from meanflow.flows.flow import Flow, kernel_operator
from meanflow.measures.cloud import Cloud
from meanflow.measures.dataset import Dataset

DENSE = 256  # up to this many samples the kernel is formed and squared, beyond it power iteration is used
SQUARINGS = 24
POWER_ITERATIONS = 48


class Problem(NamedTuple):
    """What a vector field needs beside time and state; ``speed`` is d t_mean_field / d t of the clock."""

    flow: Flow
    cloud: Cloud
    data: Dataset
    speed: jax.Array


def cloud_at(solver: Any, problem: Problem, y: Any) -> Cloud:
    """The cloud at the integrated state ``y``; a solver may define ``decode(flow, cloud, y) -> particles``."""
    decode = getattr(solver, "decode", None)
    return problem.cloud.at(y if decode is None else decode(problem.flow, problem.cloud, y))


def dominant_vector(matrix: jax.Array) -> jax.Array:
    """Unit top eigenvector (n,) of a positive semi-definite matrix (n, n), by squaring it 24 times.

    M^(2^k), rescaled, tends to the projector on the top eigenspace. The Rayleigh quotient of the result is the top
    eigenvalue to a relative 1/(2^25 e) = 1e-8 for any spectrum. Unlike an eigendecomposition this is products only:
    fast under vmap and on accelerators, and without LAPACK, whose batched call deadlocks when several CPU devices
    share a process. A zero matrix gives a zero vector.

    >>> dominant_vector(jnp.diag(jnp.array([1.0, 3.0]))).tolist()
    [0.0, 1.0]
    """

    def scaled(m: jax.Array) -> jax.Array:
        size = jnp.trace(m)
        return m / jnp.where(size > 0, size, 1.0)

    def square(_: int, m: jax.Array) -> jax.Array:
        return scaled(jnp.matmul(m, m, precision=jax.lax.Precision.HIGHEST))

    power = jax.lax.fori_loop(0, SQUARINGS, square, scaled(matrix))
    column = power[:, jnp.argmax(jnp.diagonal(power))]
    length = jnp.linalg.norm(column)
    return column / jnp.where(length > 0, length, 1.0)


def top_eigenvalue(flow: Flow, cloud: Cloud, data: Dataset) -> jax.Array:
    """Largest eigenvalue of the linearised dynamics f' = -K q l'' f (mean-field time), for a bound flow.

    Gradient descent on these linearised dynamics is stable for steps below 2 / lambda. Differentiable in
    everything (the eigenvector is held fixed, which is exact to first order).
    """
    f = flow.feature.predict(cloud, data.x)
    root = jnp.sqrt(jnp.maximum(data.weights * flow.loss.curvature(f, data.y), 0.0))
    apply = kernel_operator(flow, cloud, data.x, data.x)

    def product(v: jax.Array) -> jax.Array:
        return root * apply(root * v)

    if data.size <= DENSE:
        matrix = jax.lax.stop_gradient(jax.vmap(product)(jnp.eye(data.size, dtype=data.y.dtype)))
        top = dominant_vector(0.5 * (matrix + matrix.T))
    else:

        def refine(_: int, v: jax.Array) -> jax.Array:
            w = product(v)
            return w / jnp.linalg.norm(w)

        start = 1.0 + 0.5 * jnp.cos(jnp.arange(data.size, dtype=data.y.dtype))  # no symmetry of the data
        top = jax.lax.stop_gradient(
            jax.lax.fori_loop(0, POWER_ITERATIONS, refine, start / jnp.linalg.norm(start))
        )
    return top @ product(top)


class KernelStep(eqx.Module):
    """Step = kappa / (largest eigenvalue of the tangent kernel), refreshed every few steps.

    Attributes:
        kappa: fraction of the stability scale; plain descent is stable below 2.
        every: steps between refreshes. Where the kernel grows by itself (regularised flows, growing weights) a step of
            the past may be too long and the energy rise; 1 is safe, and costs one kernel product a step.
    """

    kappa: jax.Array
    every: int = eqx.field(static=True)

    def __init__(self, kappa: Any, every: int = 20) -> None:
        _checks.at_least("kappa", kappa, 0.0, strict=True)
        self.kappa = jnp.asarray(kappa, jnp.result_type(float))
        self.every = _checks.whole("every", every, 1)

    def size_at(self, problem: Problem, cloud: Cloud) -> jax.Array:
        """The step at ``cloud``, on the clock of the problem."""
        top = problem.speed * top_eigenvalue(problem.flow, cloud, problem.data)
        # a network that is dead on every sample has no kernel and stands still: any finite step will do
        return self.kappa.astype(top.dtype) / jnp.where(top > 0, top, 1.0)


def next_size(rule: Any, count: jax.Array, size: jax.Array, problem: Problem, cloud: Cloud) -> jax.Array:
    """The step to take as number ``count``: ``size`` again, unless the rule asks for a refresh."""
    if not hasattr(rule, "size_at"):
        return size
    return jax.lax.cond(count % rule.every == 0, lambda: rule.size_at(problem, cloud), lambda: size)


class StepController(diffrax.AbstractStepSizeController):
    """Fixed steps, or ``KernelStep``, for diffrax; optionally clipped to land on given times.

    Attributes:
        rule: a number, or a rule with ``size_at(problem, cloud)`` and ``every`` such as ``KernelStep``.
        solver: the diffrax solver in use, which may integrate other coordinates than the particles.
        stops: sorted times to land on exactly, or None.
        start: (count, size) of a run that is resumed, or None.
    """

    rule: Any
    solver: diffrax.AbstractSolver
    stops: jax.Array | None
    start: tuple[jax.Array, jax.Array] | None

    def wrap(self, direction: Any) -> "StepController":
        """Part of diffrax's interface; integration always runs forward in time here."""
        return self

    def _clip(self, t: jax.Array, size: jax.Array) -> jax.Array:
        if self.stops is None:
            return t + size
        index = jnp.searchsorted(self.stops, t, side="right")
        stop = jnp.where(
            index < self.stops.shape[0], self.stops[jnp.minimum(index, self.stops.shape[0] - 1)], jnp.inf
        )
        return jnp.where(t + (1 + 1e-6) * size >= stop, stop, t + size)

    def init(
        self, terms: Any, t0: Any, t1: Any, y0: Any, dt0: Any, args: Problem, func: Any, error_order: Any
    ) -> Any:
        """First step end and the controller state (count, size)."""
        if self.start is not None:
            count, size = self.start
        else:
            count = jnp.asarray(0, jnp.int32)
            cloud = cloud_at(self.solver, args, y0)
            size = self.rule.size_at(args, cloud) if hasattr(self.rule, "size_at") else self.rule
            size = jnp.asarray(size, jnp.result_type(t0))
        return self._clip(t0, size), (count, size)

    def adapt_step_size(
        self,
        t0: Any,
        t1: Any,
        y0: Any,
        y1_candidate: Any,
        args: Problem,
        y_error: Any,
        error_order: Any,
        controller_state: Any,
    ) -> Any:
        """Accepts every step and refreshes the size when it is due."""
        count, size = controller_state
        count = count + 1
        cloud = cloud_at(self.solver, args, y1_candidate)
        size = next_size(self.rule, count, size, args, cloud).astype(size.dtype)
        finite = jnp.all(jnp.stack([jnp.all(jnp.isfinite(u)) for u in jax.tree.leaves(y1_candidate)]))
        # stop a run that blew up instead of stepping NaN to the end
        result = diffrax.RESULTS.where(finite, diffrax.RESULTS.successful, diffrax.RESULTS.dt_min_reached)
        return True, t1, self._clip(t1, size), False, (count, size), result
