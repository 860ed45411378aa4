"""What moves beside the gradient: noise at a temperature, and weights that react. Arguments shared by the solvers.

Temperature and reaction are terms of the one equation (``flows.equation``) and of the one step (``Problem.noise``,
``Problem.move``): ``descend`` adds them to its steps, ``solve`` to its field, or steps with ``Langevin``.
"""

from collections.abc import Callable
from typing import ClassVar

import diffrax
import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import PyTree

from meanflow import _checks
from meanflow._numerics import KeyBits
from meanflow.flows._equation import Population
from meanflow.flows._flow import Flow
from meanflow.flows._problem import Chart, Problem
from meanflow.measures._cloud import Cloud
from meanflow.measures._dataset import Dataset
from meanflow.solvers._sliding import FlowSolver
from meanflow.solvers._solution import RESULTS
from meanflow.solvers._step import RealScalarLike, Scalar, scalar

# numbers folded into the key, so that noise and samples are independent
NOISE, SAMPLES = (
    1_000_003,
    1_000_033,
)


class Dynamics(eqx.Module):
    """The terms of the equation beside transport, checked.

    Attributes:
        temperature: tau, or None without noise.
        reaction: beta, or None without reaction.
        key: PRNG key of the noise, or None.
        conserve: whether reaction conserves the total mass.
    """

    temperature: Scalar | None
    reaction: Scalar | None
    key: jax.Array | None
    conserve: bool = eqx.field(static=True)

    def __init__(
        self,
        flow: Flow,
        cloud: Cloud,
        temperature: float | jax.Array,
        reaction: float | jax.Array,
        conserve: bool,
        key: jax.Array | None,
    ) -> None:
        dtype = cloud.weights.dtype
        self.temperature = None if _is_zero(temperature) else scalar(temperature, dtype)
        self.reaction = None if _is_zero(reaction) else scalar(reaction, dtype)
        self.conserve = conserve
        self.key = None if key is None else jax.random.fold_in(key, NOISE)
        if self.temperature is not None and self.reaction is not None:
            raise ValueError(
                f"temperature and reaction must not both be positive, got {temperature} and {reaction}: the free "
                "energy would need reaction with V + tau log rho, and a cloud has no density rho"
            )
        if self.temperature is not None:
            if key is None:
                raise ValueError("key must be a PRNG key when temperature is given, got None")
            chart = flow.chart(cloud)
            chart.flow.space.check_noise(chart.base)
            chart.model.space.check_noise(cloud)

    @property
    def moves(self) -> bool:
        """Whether anything moves beside the gradient."""
        return self.temperature is not None or self.reaction is not None

    def names(self) -> dict[str, str]:
        """Return what a resumed run must share, by name."""
        if not self.moves:
            return {}
        if self.reaction is None:
            return {"dynamics": "temperature"}
        return {"dynamics": "reaction", "conserve": str(self.conserve)}

    def numbers(self) -> dict[str, jax.Array]:
        """Return the numbers that a resumed run must share."""
        known = {"temperature": self.temperature, "reaction": self.reaction}
        return {name: jnp.asarray(value) for name, value in known.items() if value is not None}

    def problem(self, chart: Chart, data: Dataset, speed: jax.Array, clock: str) -> Problem:
        """Return the problem of a run with these dynamics."""
        arranged, start = chart.flow.feature.arrange(chart.base, data), chart.flow.offset
        return Problem(
            chart,
            data,
            speed,
            temperature=None if self.temperature is None else jnp.asarray(self.temperature),
            reaction=None if self.reaction is None else jnp.asarray(self.reaction),
            key=None if self.key is None else KeyBits(self.key),
            conserve=self.conserve,
            normalized=clock == "normalized",
            arranged=None if arranged is data else arranged,
            offset=None if start is None or isinstance(data, Population) else start(arranged.x),
        )


def check_sampler(
    sampler: Callable[[jax.Array, int], tuple[jax.Array, jax.Array]], key: jax.Array, size: int, data: Dataset
) -> None:
    """Refuse a sampler of fresh data that does not return ``size`` inputs and targets like those of ``data``."""
    found = jax.eval_shape(lambda key: sampler(key, size), key)
    shapes = (
        [tuple(getattr(part, "shape", ())) for part in found] if isinstance(found, tuple | list) else found
    )
    wanted = [(size, *data.x.shape[1:]), (size, *data.y.shape[1:])]
    if shapes != wanted:
        raise ValueError(
            f"sampler must return inputs and targets of shapes {wanted[0]} and {wanted[1]}, got {shapes}"
        )


def _is_zero(value: float | jax.Array) -> bool:
    if isinstance(value, float | int):  # the usual case, without a way through numpy
        return value == 0
    known = _checks.concrete(value)
    return known is not None and bool(np.all(known == 0))


class Langevin(FlowSolver):
    """Euler-Maruyama steps: w <- retract(w, -h C grad V + noise). What ``solve`` uses at a positive temperature.

    The noise of step k is drawn from the key of the run and k, so a run can be resumed, and no Brownian path is stored.
    """

    lands_on_saves: ClassVar[bool] = True

    def order(self, terms: PyTree) -> int:
        """Return 1, the order of Euler steps (weakly, with noise)."""
        return 1

    def report(self, problem: Problem, solver_state: jax.Array) -> dict[str, jax.Array]:
        """Return nothing beside the counts of the loop."""
        return {}

    def result(self, problem: Problem, solver_state: jax.Array, result: RESULTS) -> RESULTS:
        """Return the result found so far."""
        return result

    def init(
        self, terms: PyTree, t0: RealScalarLike, t1: RealScalarLike, y0: PyTree[jax.Array], args: Problem
    ) -> jax.Array:
        """Return the number of steps taken, 0."""
        return jnp.asarray(0, jnp.int32)

    def step(
        self,
        terms: PyTree,
        t0: RealScalarLike,
        t1: RealScalarLike,
        y0: PyTree[jax.Array],
        args: Problem,
        solver_state: jax.Array,
        made_jump: object,
    ) -> tuple[PyTree, None, dict[str, PyTree], jax.Array, diffrax.RESULTS]:
        """Take one step from t0 to t1."""
        flow, here = args.chart.flow, args.here(y0)
        size = jnp.asarray(t1 - t0, args.chart.base.weights.dtype)
        drift = args.rates(here, args.samples, flow)
        shaken = args.noise(here, solver_state, size, flow)
        by = jax.tree.map(lambda u, v: size * u + v, drift, shaken)
        y1 = args.move(here, y0, by, flow)
        return y1, None, {"y0": y0, "y1": y1}, solver_state + 1, diffrax.RESULTS.successful  # type: ignore[return-value]
