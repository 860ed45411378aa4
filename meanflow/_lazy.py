"""Packages whose names load on first use, so that ``import meanflow`` does not import flax, ott or xarray."""

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
        value = module if _is_module(name, exports[name]) else getattr(module, name)
        # Python asks __getattr__ only for names that the package lacks: from now on it has this one
        setattr(sys.modules[package], name, value)
        return value

    def public_names() -> list[str]:
        present = vars(sys.modules[package]).items()
        found = {name for name, value in present if name[0] != "_" and not isinstance(value, ModuleType)}
        return sorted(found | set(exports))

    return load, public_names


def _is_module(name: str, module: str) -> bool:
    # no module of the library holds a function of its own name, so the two readings cannot collide
    return module.rpartition(".")[2] == name
