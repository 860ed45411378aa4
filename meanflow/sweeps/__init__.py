"""Sweeps: grids over width x delta x seed in few compiled programs, over devices and hosts, resumable."""

from meanflow.sweeps.coordinate import coordinate_check as coordinate_check
from meanflow.sweeps.function import sweep_function as sweep_function
from meanflow.sweeps.networks import prepare as prepare
from meanflow.sweeps.networks import sweep as sweep
from meanflow.sweeps.phase import fit_exponents as fit_exponents
from meanflow.sweeps.phase import phase_diagram as phase_diagram
from meanflow.sweeps.plan import load as load
from meanflow.sweeps.program import make_mesh as make_mesh
from meanflow.sweeps.store import StoreError as StoreError
