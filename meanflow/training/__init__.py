"""Networks beyond two layers, their data, and the trainer that records what happens inside them.

flax and scikit-learn are imported with the first name that needs them.
"""

import typing

from meanflow import _lazy

if typing.TYPE_CHECKING:
    from meanflow.training import data as data
    from meanflow.training._networks import Stack as Stack
    from meanflow.training._resnet import ResNet as ResNet
    from meanflow.training._shift import LayerShift as LayerShift
    from meanflow.training._trainer import Trainer as Trainer

_LAZY = {
    "LayerShift": "_shift",
    "data": "data",
    "ResNet": "_resnet",
    "Stack": "_networks",
    "Trainer": "_trainer",
}

__getattr__, __dir__ = _lazy.attach(__name__, _LAZY)
