"""What is recorded along a run: one contract for flows, kernels, networks in training, and layers."""

import abc
from collections.abc import Mapping
from typing import Any, TypeAlias

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import PyTree

from meanflow import _boundary
from meanflow._module import Module

Values: TypeAlias = PyTree[jax.Array]


class Observable(Module):
    """Something that is recorded along a run. This is the one contract of all that is observed.

    A run has a part that stays the same, ``run``, and a state that changes:

        recorded by                  run                                   state
        solve, descend, sweep        a problem: flow, data, start, clock   the cloud
        a recorder of kernels        the samples and their targets         the network, (apply, params)
        a trainer of networks        the training data                     the network
        propagation through layers   None                                  the batch (n, d)

    ``begin`` is called once, at the start, and returns what is to be remembered: arrays to compare with, or None.
    ``measure`` is called at each save time with the state of that time and what ``begin`` returned; it returns an array
    or a dict of arrays, always of the same shapes. Where the run is one compiled program (all but the recorder and the
    trainer, which look at states between programs), both are part of it, so they must be pure functions of arrays.

    Wherever an observable is asked for, a plain function is one too, without a ``begin``: of (flow, cloud, data) or
    (flow, cloud, data, start) for flows, of the batch for layers. For flows a data set stands for the loss on it, so
    that ``observe={"test": test}`` records the error on a test set. Subclasses name the axes of what they return.

    Attributes:
        dims: names of the axes of the result; names at the end that it has no axes for are left out (``"output"``, for
            models with one). ``"particle"`` may differ in length between widths (filled with NaN).
        coords: values along some of those axes, by name.
        units: unit of the numbers, ``"1"`` for pure numbers.
        about: one line for the reader of the data set.
        usual: whether a sweep records it without being asked; what takes long to compile waits to be named.
    """

    dims: tuple[str, ...] = eqx.field(static=True, default=(), kw_only=True)
    coords: dict[str, jax.Array] = eqx.field(default_factory=dict, kw_only=True)
    units: str = eqx.field(static=True, default="1", kw_only=True)
    about: str = eqx.field(static=True, default="", kw_only=True)
    usual: bool = eqx.field(static=True, default=True, kw_only=True)

    def begin(self, run: Any, state: Any) -> Values:
        """Compute once, from the state at the start, what ``measure`` wants to compare with; default nothing."""
        return None

    @abc.abstractmethod
    def measure(self, run: Any, state: Any, memory: Values) -> Values:
        """Return what is recorded at ``state``, an array or a dict of arrays; ``memory`` is what ``begin`` returned."""


# one observable, or several by name; what is recorded has the same form
Observables: TypeAlias = Observable | Mapping[str, Observable]


def begin(observe: Observables | None, run: Any, state: Any) -> Values:
    """Return what the observables remember of the start of a run, for ``measure``."""
    if isinstance(observe, Mapping):
        return {name: one.begin(run, state) for name, one in observe.items()}
    return None if observe is None else observe.begin(run, state)


def measure(observe: Observables, run: Any, state: Any, memory: Values) -> Values:
    """Return what the observables see at ``state``; ``memory`` must come from ``begin``."""
    if isinstance(observe, Mapping):
        return {name: one.measure(run, state, memory[name]) for name, one in observe.items()}
    return observe.measure(run, state, memory)


def recorded(found: object) -> Values:
    """Return what a user's function measured as arrays; refuse what is none.

    Raises:
        TypeError: if there is nothing in it.
        ValueError: if it holds something other than real numbers.
    """
    if not jax.tree.leaves(found):
        raise TypeError(
            f"observe must hold functions that return an array or a dict of arrays, got {_boundary.show(found)}"
        )
    for leaf in jax.tree.leaves(found):
        _boundary.numeric("what observe returns", leaf)
    # plain numbers become floats, which have an infinity for times that are not reached
    return jax.tree.map(
        lambda u: _boundary.floating(u) if isinstance(u, int | float) else jnp.asarray(u), found
    )
