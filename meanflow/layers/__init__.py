"""Normalization layers for flax NNX, and the pure functions underneath (``layers.functional``).

Kernels, transport and depth use the pure functions alone: flax is imported with the first layer that is named.
"""

import typing

from meanflow import _lazy

if typing.TYPE_CHECKING:
    from meanflow.layers import functional as functional
    from meanflow.layers._normalization import BatchNorm as BatchNorm
    from meanflow.layers._normalization import Recenter as Recenter
    from meanflow.layers._normalization import Rescale as Rescale
    from meanflow.layers._unitization import Unitize as Unitize
    from meanflow.layers._unitization import UnitizedBatchNorm as UnitizedBatchNorm

_LAZY = {
    "functional": "functional",
    "BatchNorm": "_normalization",
    "Recenter": "_normalization",
    "Rescale": "_normalization",
    "Unitize": "_unitization",
    "UnitizedBatchNorm": "_unitization",
}

__getattr__, __dir__ = _lazy.attach(__name__, _LAZY)
