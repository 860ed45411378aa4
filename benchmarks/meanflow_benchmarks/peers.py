"""The peers that need interpreters of their own: PyTorch, and neural-tangents with a jax that is old enough for it.

``scripts/peers`` installs each in an environment in the repository, where the benchmarks find it.
"""

import pathlib
from collections.abc import Sequence

NAMES = ("tangents", "torch")
FOLDER = pathlib.Path(__file__).parents[2]


def interpreters(asked: Sequence[str], known: Sequence[str] = NAMES) -> dict[str, str]:
    """Return the interpreters of the peers that are asked for and installed, by name.

    Args:
        asked: names of peers.
        known: those that the benchmark can run; it does without the others.

    Example:
        >>> interpreters(())
        {}
    """
    stray = [name for name in asked if name not in NAMES]
    if stray:
        raise ValueError(f"peers must be names among {NAMES}, got {stray[0]!r}")
    paths = {name: FOLDER / f".venv-{name}" / "bin" / "python" for name in known if name in asked}
    return {name: str(path) for name, path in paths.items() if path.exists()}


def left_out(asked: Sequence[str], known: Sequence[str] = NAMES) -> dict[str, str]:
    """Return an entry for the results that names the peers that are asked for but not installed; empty without any.

    Example:
        >>> left_out(())
        {}
    """
    missing = [name for name in known if name in asked and name not in interpreters(asked)]
    return {"left out": f"{', '.join(missing)} (not installed; scripts/peers does it)"} if missing else {}
