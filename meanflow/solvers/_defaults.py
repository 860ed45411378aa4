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
import optax

from meanflow._reuse import kept_by_shape
from meanflow.flows._equation import Population
from meanflow.flows._flow import Flow
from meanflow.flows._motion import FrozenMotion
from meanflow.flows._problem import Problem
from meanflow.measures import _scaling as scaling
from meanflow.measures._cloud import Cloud
from meanflow.measures._dataset import Dataset
from meanflow.solvers._dynamics import Dynamics, Noise
from meanflow.solvers._run import PLAIN
from meanflow.solvers._sliding import Sliding
from meanflow.solvers._step import Adaptive, KernelStep, StepRule, as_rule
from meanflow.solvers._stepper import DiffraxStep, RungeKutta, Stepper, has_table

KAPPA = 0.25  # steps of the default rule, as a fraction of the stability scale of the kernel
SMOOTH, SLIDING, ROUGH = diffrax.Tsit5(), Sliding(), RungeKutta(diffrax.Heun())


class Method(NamedTuple):
    """How a run is made.

    Attributes:
        stepper: what takes the steps: a solver of diffrax for adaptive steps, else a stepper or an optimizer.
        rule: how long the steps are.
        order: the order of the error in the step if it is to be measured by a second run, else None.
    """

    stepper: Stepper | diffrax.AbstractSolver | optax.GradientTransformation
    rule: StepRule | Adaptive
    order: int | None = None

    @property
    def names(self) -> dict[str, str]:
        """The texts that a resumed run must share, by name."""
        inner = self.stepper
        if isinstance(inner, RungeKutta):
            inner = inner.method
        elif isinstance(inner, DiffraxStep):
            inner = inner.solver
        solver = "EulerMaruyama" if inner is PLAIN else type(inner).__name__
        return {
            "solver": solver,
            "step": "adaptive" if isinstance(self.rule, Adaptive) else type(self.rule).__name__,
        }


def choose(
    flow: Flow,
    cloud: Cloud,
    data: Dataset,
    solver: str | Stepper | diffrax.AbstractSolver | None,
    step: StepRule | Adaptive | float | jax.Array | None,
    dynamics: Dynamics | None = None,
    clock: str = "mean_field",
) -> Method:
    """Return the method behind the arguments of ``solve``.

    Args:
        flow, cloud, data: the problem; the flow is bound.
        solver, step: as in ``solve``.
        dynamics: noise or reaction, or None.
        clock: the clock of the run.
    """
    rule = step if step is None or isinstance(step, Adaptive) else as_rule(step, cloud.weights.dtype)
    plain = dynamics is None and clock != "normalized"
    if isinstance(solver, str):
        solver = SLIDING  # the only name
    if not plain and isinstance(solver, Stepper):
        raise ValueError(
            f"solver {type(solver).__name__} does not take dynamics or clock='normalized'; leave out solver=, and give "
            "step= for noise"
        )
    if isinstance(dynamics, Noise):
        if solver is not None:
            raise ValueError(f"solver must be None with noise, got {type(solver).__name__}")
        if not isinstance(rule, StepRule):
            raise ValueError(f"step must be a number or a StepRule with noise, got {step}")
        return Method(PLAIN, rule)
    if solver is not None:
        return _given(solver, rule)
    # the expectation over a population has no kinks
    smooth = not flow.feature.has_kinks() or isinstance(data, Population)
    if smooth or isinstance(rule, Adaptive):
        return _given(SMOOTH, rule)
    slides = plain and has_motion(flow, cloud, data)
    # beyond kinks the second order of Heun's method is lost
    stepper, order = (SLIDING, 2) if slides else (ROUGH, 1)
    return Method(stepper, KernelStep(KAPPA), order) if rule is None else Method(stepper, rule)


def _given(solver: Stepper | diffrax.AbstractSolver, rule: StepRule | Adaptive | None) -> Method:
    """Return the method of a solver that was chosen by the user, or for a smooth model."""
    if isinstance(solver, Stepper):
        if not isinstance(rule, StepRule):
            raise ValueError(
                f"step must be a number or a StepRule with solver {type(solver).__name__}, which has no error "
                f"estimate, got {rule}"
            )
        return Method(solver, rule)
    if isinstance(rule, StepRule):
        if isinstance(solver, diffrax.AbstractImplicitSolver) and not eqx.is_array_like(
            solver.root_finder.rtol
        ):
            raise ValueError(
                "solver must have a root finder with tolerances of its own where steps are fixed, for instance "
                f"root_finder=diffrax.VeryChord(rtol=1e-6, atol=1e-6), got {type(solver).__name__} without"
            )
        return Method(RungeKutta(solver) if has_table(solver) else DiffraxStep(solver), rule)
    if not isinstance(solver, diffrax.AbstractAdaptiveSolver):
        raise ValueError(
            f"step must be a number or a StepRule with solver {type(solver).__name__}, which has no error estimate, "
            f"got {rule}"
        )
    return Method(solver, Adaptive() if rule is None else rule)


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
