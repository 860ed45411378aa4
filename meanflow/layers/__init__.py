"""Normalisation layers for flax NNX, and the pure functions underneath (``layers.functional``)."""

import importlib
from typing import Any

from meanflow.layers import functional as functional

_LAZY = {
    "BatchNorm": "normalization",
    "Normalization": "normalization",
    "Recenter": "normalization",
    "Rescale": "normalization",
    "Fixed": "unitization",
    "Interpolation": "unitization",
    "Unitize": "unitization",
    "UnitizedBatchNorm": "unitization",
}


def __getattr__(name: str) -> Any:
    # kernels and depth import only the pure functions: flax loads with the first layer
    if name in _LAZY:
        return getattr(importlib.import_module(f"meanflow.layers.{_LAZY[name]}"), name)
    raise AttributeError(f"module 'meanflow.layers' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *_LAZY])
