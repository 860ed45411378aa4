"""The checker of signatures that ``pytest --beartype`` applies to every function of the library."""

from collections.abc import Callable
from typing import Any, Self

import beartype
from beartype import BeartypeConf, FrozenDict

_CONF = BeartypeConf(
    is_pep484_tower=True,  # an int is a float, as for mypy
    # beartype knows what Self means only where it decorates whole classes; jaxtyping decorates method by method
    hint_overrides=FrozenDict({Self: Any}),
)


def check(function: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate a function so that each call is compared with the types in its signature."""
    return beartype.beartype(conf=_CONF)(function)
