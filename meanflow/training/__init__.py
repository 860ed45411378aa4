"""Networks beyond two layers, their data, and the trainer that records what happens inside them.

flax and scikit-learn are imported with the first name that needs them.
"""

import typing

from meanflow import _lazy

if typing.TYPE_CHECKING:
    from meanflow.training import data as data
    from meanflow.training.networks import CNN as CNN
    from meanflow.training.networks import MLP as MLP
    from meanflow.training.resnet import ResNet as ResNet
    from meanflow.training.trainer import Trainer as Trainer
    from meanflow.training.trainer import Watch as Watch

_LAZY = {
    "data": "data",
    "CNN": "networks",
    "MLP": "networks",
    "ResNet": "resnet",
    "Trainer": "trainer",
    "Watch": "trainer",
}

__getattr__, __dir__ = _lazy.attach(__name__, _LAZY)
