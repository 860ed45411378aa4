"""Which solver and which steps, where the user has not said.

Smooth flows are solved by ``diffrax.Tsit5`` with adaptive steps. The velocity of a network with kinks jumps; a method
that adapts its steps to an error estimate then crawls from jump to jump, and its tolerance says nothing about the
error. Such flows take steps of a length that the tangent kernel allows, by the sliding solver where the model knows how
its neurons move through kinks, and by Heun's method where it does not; the error is measured instead of promised.
"""

from typing import NamedTuple

import diffrax
import equinox as eqx
import jax

from meanflow._reuse import kept_by_shape
from meanflow.flows._equation import Population
from meanflow.flows._flow import Flow
from meanflow.flows._motion import FrozenMotion
from meanflow.flows._problem import Problem
from meanflow.measures import _scaling as scaling
from meanflow.measures._cloud import Cloud
from meanflow.measures._dataset import Dataset
from meanflow.solvers._dynamics import Dynamics, Langevin
from meanflow.solvers._sliding import FlowSolver, Sliding
from meanflow.solvers._step import KernelStep, StepRule, as_rule

KAPPA = 0.25  # steps of the default rule, as a fraction of the stability scale of the kernel
SMOOTH, SLIDING, ROUGH, LANGEVIN = diffrax.Tsit5(), Sliding(), diffrax.Heun(), Langevin()


class Method(NamedTuple):
    """How a run is made.

    Attributes:
        solver: the diffrax solver.
        rule: its fixed steps, or None for adaptive ones.
        order: the order of the error in the step if it is to be measured by a second run, else None.
    """

    solver: diffrax.AbstractSolver
    rule: StepRule | None
    order: int | None


def choose(
    flow: Flow,
    cloud: Cloud,
    data: Dataset,
    solver: str | diffrax.AbstractSolver | None,
    step: StepRule | float | jax.Array | None,
    adaptive: bool,
    dynamics: Dynamics | None = None,
    clock: str = "mean_field",
) -> Method:
    """Return the method behind the arguments of ``solve``.

    Args:
        flow, cloud, data: the problem; the flow is bound.
        solver, step: as in ``solve``.
        adaptive: whether tolerances were given, which asks for adaptive steps.
        dynamics: noise and reaction, or None without them.
        clock: the clock of the run.
    """
    rule = None if step is None else as_rule(step, cloud.weights.dtype)
    plain = (dynamics is None or not dynamics.moves) and clock != "normalized"
    if not plain and (solver == "sliding" or isinstance(solver, FlowSolver)):
        raise ValueError(
            f"solver {solver if isinstance(solver, str) else type(solver).__name__} does not take temperature, "
            "reaction or clock='normalized'; leave out solver=, and give step= for temperature"
        )
    if dynamics is not None and dynamics.temperature is not None:
        if solver is not None:
            raise ValueError(f"solver must be None with a temperature, got {type(solver).__name__}")
        return Method(LANGEVIN, rule, None)
    if isinstance(solver, diffrax.AbstractSolver):
        return Method(solver, rule, None)
    if solver == "sliding":
        return Method(SLIDING, rule, None)
    # the expectation over a population has no kinks
    smooth = not type(flow.feature).has_kinks(flow.feature) or isinstance(data, Population)
    if smooth or (adaptive and rule is None):
        return Method(SMOOTH, rule, None)
    slides = plain and has_motion(flow, cloud, data)
    # beyond kinks the second order of Heun's method is lost
    method, order = (SLIDING, 2) if slides else (ROUGH, 1)
    return Method(method, rule, None) if rule is not None else Method(method, KernelStep(KAPPA), order)


def rougher(method: Method) -> Method:
    """Return the method to use where the sliding solver has run out of events."""
    return Method(ROUGH, method.rule, 1)


@kept_by_shape  # to ask means to trace, which takes milliseconds
def has_motion(flow: Flow, cloud: Cloud, data: Dataset) -> bool:
    """Say whether the model knows how neurons move through kinks, here and in these coordinates."""

    def ask(flow: Flow, cloud: Cloud, data: Dataset) -> FrozenMotion:
        problem = Problem(flow.chart(cloud), data, scaling.speed("mean_field", flow.scaling, cloud))
        return problem.chart.flow.feature.motion(problem)

    try:
        eqx.filter_eval_shape(ask, flow, cloud, data)
    except ValueError:  # how a model says that it does not
        return False
    return True
