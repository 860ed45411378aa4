"""Solvers: continuous time on diffrax, discrete time on optax, and step rules for both."""

from meanflow.solvers.continuous import FromStart as FromStart
from meanflow.solvers.continuous import solve as solve
from meanflow.solvers.discrete import descend as descend
from meanflow.solvers.sliding import Sliding as Sliding
from meanflow.solvers.solution import RESULTS as RESULTS
from meanflow.solvers.solution import Solution as Solution
from meanflow.solvers.solution import State as State
from meanflow.solvers.step import KernelStep as KernelStep
from meanflow.solvers.step import top_eigenvalue as top_eigenvalue
