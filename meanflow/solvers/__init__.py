"""Solvers: continuous time on diffrax, discrete time on optax, and step rules for both."""

from meanflow.solvers import eulerian as eulerian
from meanflow.solvers._continuous import solve as solve
from meanflow.solvers._discrete import descend as descend
from meanflow.solvers._sliding import FlowSolver as FlowSolver
from meanflow.solvers._sliding import Sliding as Sliding
from meanflow.solvers._solution import RESULTS as RESULTS
from meanflow.solvers._solution import FailedRun as FailedRun
from meanflow.solvers._solution import Solution as Solution
from meanflow.solvers._step import KernelStep as KernelStep
from meanflow.solvers._step import StepRule as StepRule
from meanflow.solvers._weak import weak_form as weak_form
