"""Networks beyond two layers, their data, and the trainer that records what happens inside them."""

import importlib
from typing import Any

_NAMES = {
    "Data": "data",
    "cifar": "data",
    "crop_and_flip": "data",
    "digits": "data",
    "mnist": "data",
    "CNN": "networks",
    "MLP": "networks",
    "ResNet": "resnet",
    "count_parameters": "resnet",
    "Trainer": "trainer",
    "TrainState": "trainer",
    "Watch": "trainer",
    "load_state": "trainer",
    "save_state": "trainer",
    "staircase": "trainer",
}
_MODULES = ("data", "networks", "resnet", "trainer")


def __getattr__(name: str) -> Any:
    # flax and scikit-learn load with the first name that needs them
    if name in _MODULES:
        return importlib.import_module(f"meanflow.training.{name}")
    if name in _NAMES:
        return getattr(importlib.import_module(f"meanflow.training.{_NAMES[name]}"), name)
    raise AttributeError(f"module 'meanflow.training' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *_NAMES, *_MODULES])
