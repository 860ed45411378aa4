"""Sweeps: grids over width x delta x seed in few compiled programs, over devices and hosts, resumable."""

from meanflow.sweeps._exponents import coordinate_check as coordinate_check
from meanflow.sweeps._exponents import fit_exponents as fit_exponents
from meanflow.sweeps._exponents import phase_diagram as phase_diagram
from meanflow.sweeps._grid import load as load
from meanflow.sweeps._plan import Execution as Execution
from meanflow.sweeps._request import work as work
from meanflow.sweeps._sweep import sweep as sweep
from meanflow.sweeps._sweep import sweep_function as sweep_function
