"""Solvers: continuous time on diffrax, discrete time on optax, and step rules for both."""

from meanflow.solvers import eulerian as eulerian
from meanflow.solvers.continuous import solve as solve
from meanflow.solvers.discrete import descend as descend
from meanflow.solvers.sliding import FlowSolver as FlowSolver
from meanflow.solvers.sliding import Sliding as Sliding
from meanflow.solvers.solution import RESULTS as RESULTS
from meanflow.solvers.solution import FailedRun as FailedRun
from meanflow.solvers.solution import Solution as Solution
from meanflow.solvers.step import KernelStep as KernelStep
from meanflow.solvers.step import StepRule as StepRule
from meanflow.solvers.weak import weak_form as weak_form
