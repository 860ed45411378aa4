"""Pytrees as plain arrays by name and a JSON layout, in which they are kept in files."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from meanflow._identity import qualified_name
from meanflow._properties import show
from meanflow.files import Arrays


class Refusal(ValueError):
    """A whole file that cannot be read here, as opposed to a damaged one."""


class Tree:
    """A pytree as a JSON layout and plain arrays by name, and back.

    Dictionaries, lists, tuples and NamedTuples are known, the last by the name of their type among ``records``: a file
    never decides which code is called. A subclass may know further types.
    """

    def __init__(self, records: Sequence[type] = (), arrays: Arrays | None = None) -> None:
        self.records: dict[str, Any] = {qualified_name(record): record for record in records}
        self.arrays: dict[str, Any] = dict(arrays or {})

    def describe(self, node: Any, name: str) -> Any:
        """Return the layout of ``node``; its arrays are put into ``arrays`` under dotted names."""
        if node is None:
            return None
        if isinstance(node, tuple) and hasattr(node, "_fields"):
            values = self.describe_all(dict(zip(node._fields, node, strict=True)), name)
            return {"record": qualified_name(type(node)), "fields": list(node._fields), "values": values}
        if type(node) is dict and all(type(key) in (str, int) for key in node):
            return {"dict": [[key, self.describe(value, f"{name}.{key}")] for key, value in node.items()]}
        if isinstance(node, tuple | list):  # no others are nodes of a pytree
            return {type(node).__name__: self.describe_all(dict(enumerate(node)), name)}
        # of a jax array without a copy to the host
        dtype = node.dtype if isinstance(node, jax.Array) else np.asarray(node).dtype
        if getattr(dtype, "kind", "O") not in "biufc":  # numpy would pickle it, or lose its type
            raise ValueError(
                f"{name} must be an array of numbers, or tuples, lists and dicts of them with keys that are texts or "
                f"integers, got {show(node)}, which cannot be saved"
            )
        name = re.sub(r"[^\w.]", "_", name)  # an archive changes some characters of its names
        while name in self.arrays:  # {"a.b": u, "a": {"b": v}}
            name += "_"
        self.arrays[name] = node
        return name

    def describe_all(self, parts: Mapping[Any, Any], name: str) -> list[Any]:
        """Return the layouts of parts that have names of their own."""
        return [self.describe(value, f"{name}.{key}") for key, value in parts.items()]

    def restore(self, layout: Any) -> Any:
        """Return what was described by ``layout``; any exception but ``Refusal`` means that it is damaged."""
        match layout:
            case None:
                return None
            case str():
                return _in_its_precision(layout, self.arrays[layout])
            case {"record": str(name), "fields": list(fields), "values": list(values)}:
                return self._record(name, fields)._make(map(self.restore, values))
            case {"dict": list(pairs)}:
                return {key: self.restore(value) for key, value in pairs}
            case {"list": list(items)}:
                return [self.restore(item) for item in items]
            case {"tuple": list(items)}:
                return tuple(map(self.restore, items))
        raise TypeError(f"{show(layout)} describes no part of a pytree")

    def _record(self, name: str, fields: list[object]) -> Any:
        found = self.records.get(name)
        if found is None or list(found._fields) != fields:
            raise Refusal(
                f"holds a record {name} with fields {fields}, which is not known here; pass records=[...] with this "
                "NamedTuple to Solution.load"
            )
        return found


def _in_its_precision(name: str, array: np.ndarray) -> jax.Array:
    """Return the array in the precision in which it was stored, or refuse: half of its digits must not vanish."""
    if array.dtype == np.float64 and jnp.result_type(float) != np.float64:
        raise Refusal(
            f"holds {name}, which was stored in float64, which is switched off; "
            "call jax.config.update('jax_enable_x64', True) before loading"
        )
    return jnp.asarray(array)
