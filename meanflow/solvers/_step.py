"""How long a step is: a constant, a fraction of what the tangent kernel allows, a rule of yours, or adaptive."""

import abc
from typing import Annotated, TypeAlias

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, PyTree

from meanflow import _boundary
from meanflow._boundary import Count, checked, number
from meanflow._loops import any_of_batch
from meanflow._numerics import dominant_vector, safe_divide
from meanflow.flows import _equation as equation
from meanflow.flows._flow import Flow
from meanflow.flows._problem import Problem
from meanflow.measures._cloud import Cloud
from meanflow.measures._dataset import Dataset

DENSE = 256  # up to this many samples the kernel is formed and squared, beyond it power iteration is used
POWER_ITERATIONS = 48
MOST_STEPS = 100_000  # the limit where the number of steps cannot be known beforehand


def top_eigenvalue(flow: Flow, cloud: Cloud, data: Dataset) -> Float[Array, ""]:
    """Return the largest eigenvalue of the linearized dynamics f' = -K H f (mean-field time), for a bound flow.

    H = q l'' is a number, or for k outputs a k x k matrix, for each sample. Gradient descent on these linearized
    dynamics is stable for steps below 2 / lambda. K H is not symmetric, but has the eigenvalues of sqrt(H) K sqrt(H).
    With its eigenvector v and u = H v the eigenvalue is u'K u / u'v, which is exact to first order in v: the vector is
    held fixed, and the result differentiable in everything. The loss is convex; where H vanishes so does K H.
    """
    if isinstance(data, equation.Population):
        raise ValueError("KernelStep needs data with samples, got a population; give the step as a number")
    f = equation.predict(flow, cloud, data.x)
    outputs = f.size // data.size
    curvature = flow.loss.curvature(f, data.y).reshape(data.size, outputs, outputs)
    if outputs == 1:  # a loss of the user's own may be concave in places
        curvature = jnp.maximum(curvature, 0.0)
    curvature = data.weights[:, None, None] * curvature
    apply = equation.kernel_operator(flow, cloud, data.x, data.x)

    def bend(v: jax.Array) -> jax.Array:
        return jnp.einsum("jce,je->jc", curvature, v.reshape(data.size, outputs)).reshape(f.shape)

    if f.size <= DENSE:
        kernel = equation.tangent_kernel(flow, cloud, data.x, data.x)
        kernel = kernel.reshape(data.size, data.size, outputs, outputs)
        matrix = jnp.einsum("xzce,zeg->xczg", kernel, curvature).reshape(f.size, f.size)
        top = dominant_vector(jax.lax.stop_gradient(matrix)).reshape(f.shape)
    else:

        def refine(_: int | jax.Array, v: jax.Array) -> jax.Array:
            w = apply(bend(v))
            return safe_divide(w, jnp.linalg.norm(w))

        start = 1.0 + 0.5 * jnp.cos(jnp.arange(f.size, dtype=f.dtype)).reshape(
            f.shape
        )  # no symmetry of the data
        top = jax.lax.stop_gradient(jax.lax.fori_loop(0, POWER_ITERATIONS, refine, start))
    bent = bend(top)
    return safe_divide(jnp.sum(bent * apply(bent)), jnp.sum(bent * top))


Scalar: TypeAlias = jax.Array | np.ndarray  # one number, on the device or still on the host


def scalar(value: float | Scalar, dtype: jnp.dtype) -> Scalar:
    """Return a number as a scalar array of the given type.

    Numbers that are known stay on the host: moving each of them to the device by itself would take longer than a small
    compiled program, to which they are handed together.
    """
    if isinstance(value, jax.Array):
        return value.astype(dtype)
    return np.asarray(value, dtype)


def as_number(value: float | Scalar) -> Scalar:
    """Return a number as an array, on the host if it is known."""
    return value if isinstance(value, jax.Array) else np.asarray(value)


class StepRule(eqx.Module):
    """How long a step is. Subclasses define ``size_at`` and ``every``.

    A rule may look at the cloud but remembers nothing: between refreshes the solver keeps the size. Pass an instance
    as ``step=`` to ``solve`` or ``descend``.

    Attributes:
        every: number of steps between two refreshes; None asks for the size once, at the start.
    """

    every: eqx.AbstractVar[int | None]

    def numbers(self) -> dict[str, Scalar]:
        """Return what a resumed run must share, by name: the numbers among the attributes of the rule."""
        names = set(type(self).__dataclass_fields__) - {"max_steps"}
        values = {f"step.{name}": getattr(self, name) for name in sorted(names)}
        return {name: as_number(u) for name, u in values.items() if u is not None and eqx.is_array_like(u)}

    def limit(self, start: Scalar, end: Scalar, stops: int) -> int:
        """Return a limit for the number of steps from ``start`` to ``end`` with ``stops`` times to land on."""
        return MOST_STEPS

    @abc.abstractmethod
    def size_at(self, problem: Problem, y: PyTree[jax.Array]) -> Float[Array, ""]:
        """Return the step at the state ``y``, on the clock of the problem; ``problem.cloud(y)`` is the cloud there."""

    def next_size(
        self,
        taken: jax.Array,
        size: jax.Array,
        problem: PyTree,
        y: PyTree[jax.Array],
        running: bool | jax.Array = True,
    ) -> jax.Array:
        """Return the size of the step after ``taken`` steps: ``size`` again, unless a refresh is due.

        Args:
            taken: number of steps taken.
            size: size of the step before.
            problem, y: what ``size_at`` takes.
            running: whether the run goes on. Of many runs in one program those that have ended are stepped idly until
                the last one has, and need no size.
        """
        if self.every is None:
            return size
        due = (taken % self.every == 0) & running
        # Runs of a batch that end after different numbers of steps count their steps apart. A branch on each run's own
        # count would compute the size of all of them in every step, and select.
        new = jax.lax.cond(
            any_of_batch(due), lambda: self.size_at(problem, y).astype(size.dtype), lambda: size
        )
        return jnp.where(due, new, size)


class ConstantStep(StepRule):
    """The same step always: what a number stands for as ``step=``.

    Attributes:
        size: the step, > 0, a scalar.
        max_steps: the most steps of a run up to a time. A run whose numbers are all known takes as many as it needs;
            inside of jit, vmap and grad they may not be.

    >>> ConstantStep(0.1, max_steps=10**6).max_steps
    1000000
    """

    size: Scalar
    max_steps: int = eqx.field(static=True)
    every: None = eqx.field(static=True)

    def __init__(self, size: float | Scalar, max_steps: int = MOST_STEPS) -> None:
        self.every, self.max_steps = None, max_steps
        if not isinstance(size, np.ndarray):  # what ``as_rule`` made is checked already
            _boundary.number(above=0)("size", size)
            self.max_steps = _boundary.whole("max_steps", max_steps, 1)
        self.size = size if isinstance(size, np.ndarray) else jnp.asarray(size, jnp.result_type(float))

    def size_at(self, problem: Problem, y: PyTree[jax.Array]) -> Float[Array, ""]:
        """Return the size."""
        return jnp.asarray(self.size)

    def numbers(self) -> dict[str, Scalar]:
        """Return nothing: a resumed run may have another constant step."""
        return {}

    def limit(self, start: Scalar, end: Scalar, stops: int) -> int:
        """Return at least what the steps need, where all numbers are known."""
        step, first, last = (_boundary.concrete(u) for u in (self.size, start, end))
        if step is None or first is None or last is None:
            return self.max_steps
        # a step that is cut short to land on a time is a step more
        with np.errstate(divide="ignore"):
            needed = float(np.max((last - first) / step)) + 2 + stops
        if needed > _boundary.MOST:
            least = float(np.max(last - first)) / _boundary.MOST
            raise ValueError(
                f"step must be at least {least:.3g} for a run this long, got {float(np.min(step)):.3g}"
            )
        # one of few limits, since another one compiles again: 4096, 65536, ...
        return min(16 ** int(np.ceil(np.log(max(needed, 4096)) / np.log(16) - 1e-9)), _boundary.MOST)


class KernelStep(StepRule):
    """Step = kappa / (largest eigenvalue of the tangent kernel), refreshed every few steps.

    Attributes:
        kappa: fraction of the stability scale; plain descent is stable below 2.
        every: steps between refreshes. Where the kernel grows by itself (regularized flows, growing weights) a step of
            the past may be too long and the energy rise; 1 is safe, and costs one kernel product a step.
        max_steps: the most steps of a run up to a time; in reverse mode its square root counts in memory.

    >>> KernelStep(0.5).every
    20
    """

    kappa: jax.Array
    every: int = eqx.field(static=True)
    max_steps: int = eqx.field(static=True)

    def __init__(self, kappa: float | jax.Array, every: int = 20, *, max_steps: int = MOST_STEPS) -> None:
        _boundary.number(above=0)("kappa", kappa)
        self.kappa = jnp.asarray(kappa, jnp.result_type(float))
        self.every = _boundary.whole("every", every, 1)
        self.max_steps = _boundary.whole("max_steps", max_steps, 1)

    def limit(self, start: Scalar, end: Scalar, stops: int) -> int:
        """Return ``max_steps``."""
        return self.max_steps

    def size_at(self, problem: Problem, y: PyTree[jax.Array]) -> Float[Array, ""]:
        """Return kappa over the top eigenvalue at ``y``, computed in the chart: the kernel is the same, and cheaper."""
        here = problem.here(y)
        top = problem.pace(here) * top_eigenvalue(problem.chart.flow, here, problem.data)
        # a network that is dead on every sample has no kernel and stands still: any finite step will do
        return self.kappa.astype(top.dtype) / jnp.where(top > 0, top, 1.0)


@checked
class Adaptive(eqx.Module):
    """Steps whose length follows an estimate of the local error, by diffrax. The default of smooth models in ``solve``.

    Attributes:
        rtol, atol: tolerances of the local error in rms over the measure. They are not the error of the result.
        max_steps: the most steps; in reverse mode its square root counts in memory.

    >>> Adaptive().rtol
    1e-07
    """

    rtol: Annotated[float | Scalar, number(low=0)] = 1e-7
    atol: Annotated[float | Scalar, number(low=0)] = 1e-9
    max_steps: Count = eqx.field(static=True, default=MOST_STEPS)

    def limit(self, start: Scalar, end: Scalar, stops: int) -> int:
        """Return ``max_steps``."""
        return self.max_steps

    def numbers(self) -> dict[str, Scalar]:
        """Return nothing: a resumed run may have other tolerances."""
        return {}


STEP = _boundary.either(
    _boundary.number(above=0), _boundary.instance(StepRule, hint="for instance KernelStep(0.5)")
)
ANY_STEP = _boundary.either(
    _boundary.number(above=0),
    _boundary.instance(StepRule, Adaptive, hint="for instance KernelStep(0.5) or Adaptive(rtol=1e-9)"),
)


def as_rule(step: StepRule | float | jax.Array, dtype: jnp.dtype) -> StepRule:
    """Return the rule behind the argument ``step`` of a solver; a number means a constant step."""
    if isinstance(step, ConstantStep):  # an array, so that another size compiles nothing
        return ConstantStep(scalar(step.size, dtype), step.max_steps)
    return step if isinstance(step, StepRule) else ConstantStep(scalar(step, dtype))


def all_finite(tree: PyTree[jax.Array]) -> jax.Array:
    """Return whether every entry of every array is finite, a boolean scalar."""
    finite: dict[tuple[int, ...], jax.Array] = {}
    # arrays of one shape are reduced together: one loop instead of one for each
    for u in jax.tree.leaves(tree):
        finite[u.shape] = jnp.isfinite(u) & finite.get(u.shape, True)
    return jnp.all(jnp.stack([jnp.all(u) for u in finite.values()]))
