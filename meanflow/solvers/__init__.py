"""Solvers: continuous time and discrete time, with the objects that say how: steps, batches, noise and reaction."""

from meanflow.solvers import eulerian as eulerian
from meanflow.solvers._batches import Batches as Batches
from meanflow.solvers._continuous import solve as solve
from meanflow.solvers._discrete import descend as descend
from meanflow.solvers._dynamics import Noise as Noise
from meanflow.solvers._dynamics import Reaction as Reaction
from meanflow.solvers._fluctuations import fluctuations as fluctuations
from meanflow.solvers._sliding import Sliding as Sliding
from meanflow.solvers._solution import RESULTS as RESULTS
from meanflow.solvers._solution import FailedRun as FailedRun
from meanflow.solvers._solution import Solution as Solution
from meanflow.solvers._step import Adaptive as Adaptive
from meanflow.solvers._step import ConstantStep as ConstantStep
from meanflow.solvers._step import KernelStep as KernelStep
from meanflow.solvers._step import StepRule as StepRule
from meanflow.solvers._stepper import Stepper as Stepper
