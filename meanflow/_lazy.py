"""Imports on first use: names of packages, so that ``import meanflow`` is quick, and packages that may be missing."""

import importlib
import sys
from collections.abc import Callable, Mapping
from types import ModuleType


def attach(
    package: str, exports: Mapping[str, str]
) -> tuple[Callable[[str], object], Callable[[], list[str]]]:
    """Return the functions ``__getattr__`` and ``__dir__`` of a package that imports names on first use.

    A package writes ``__getattr__, __dir__ = attach(__name__, {"BatchNorm": "normalization"})``. Reading
    ``package.BatchNorm`` for the first time then imports ``package.normalization``, and the package keeps its
    ``BatchNorm``, so that the next access imports nothing. A name that equals the last part of its module, such as
    ``{"functional": "functional"}``, stands for the module itself.

    Args:
        package: ``__name__`` of the package.
        exports: public name -> the module below the package that defines it.

    Returns:
        ``__getattr__``, and ``__dir__``, which lists the names in ``exports`` and every public name that the
        package has imported already, apart from modules.
    """

    def load(name: str) -> object:
        if name not in exports:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        module = importlib.import_module(f"{package}.{exports[name]}")
        # no module of the library holds a function of its own name, so the two readings cannot collide
        value = module if exports[name].rpartition(".")[2] == name else getattr(module, name)
        # Python asks __getattr__ only for names that the package lacks: from now on it has this one
        setattr(sys.modules[package], name, value)
        return value

    def public_names() -> list[str]:
        present = vars(sys.modules[package]).items()
        found = {name for name, value in present if name[0] != "_" and not isinstance(value, ModuleType)}
        return sorted(found | set(exports))

    return load, public_names


def optional(module: str, extra: str, user: str) -> ModuleType:
    """Import a module of a package that a plain installation lacks; what is missing is named with its extra.

    Args:
        module: such as ``"sklearn.datasets"``.
        extra: the optional dependencies of meanflow that the package belongs to.
        user: the function that needs it, by the name users call it.

    >>> optional("nowhere.some", "data", "training.data.digits")
    Traceback (most recent call last):
    ModuleNotFoundError: training.data.digits needs nowhere: pip install 'meanflow[data]'
    """
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as problem:
        package = module.partition(".")[0]
        if problem.name is None or problem.name.partition(".")[0] != package:
            raise  # the package is there and lacks something itself
        raise ModuleNotFoundError(
            f"{user} needs {package}: pip install 'meanflow[{extra}]'", name=problem.name
        ) from None
