"""meanflow: how two-layer networks learn, as one flow equation.

A network is a cloud of particles w_i with weights p_i; it predicts f(x) = sum_i p_i phi(w_i; x) and learns by
w_i' = -C(w_i) grad V(w_i), where V is the first variation of the loss and C an inverse metric. Batch norm and
the balance of a ReLU neuron only change C.
"""

import importlib
from typing import Any

_ROOMS = (
    "measures",
    "geometry",
    "kernels",
    "flows",
    "solvers",
    "transport",
    "layers",
    "depth",
    "training",
    "sweeps",
    "experiments",
    "plots",
)


def __getattr__(name: str) -> Any:
    # rooms load on first use: flax, ott, xarray and matplotlib are slow to import
    if name in _ROOMS:
        return importlib.import_module(f"meanflow.{name}")
    if name == "univariate":
        return importlib.import_module("meanflow.flows.univariate")
    raise AttributeError(f"module 'meanflow' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *_ROOMS, "univariate"])
