"""Sweeps: grids over width x delta x seed in few compiled programs, over devices and hosts, resumable."""

from meanflow.sweeps.function import sweep_function as sweep_function
from meanflow.sweeps.grid import Grid as Grid
from meanflow.sweeps.grid import group_widths as group_widths
from meanflow.sweeps.phase import collapse as collapse
from meanflow.sweeps.phase import fit_exponents as fit_exponents
from meanflow.sweeps.phase import phase_diagram as phase_diagram
from meanflow.sweeps.plan import load as load
from meanflow.sweeps.program import make_mesh as make_mesh
from meanflow.sweeps.store import StoreError as StoreError
from meanflow.sweeps.sweep import Sweep as Sweep
from meanflow.sweeps.sweep import prepare as prepare
from meanflow.sweeps.sweep import sweep as sweep
