"""The papers' figures and tables, one module a paper; every function returns an ``Outcome``."""

from meanflow.experiments.outcome import Criterion as Criterion
from meanflow.experiments.outcome import Outcome as Outcome
