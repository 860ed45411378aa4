"""Modules of flax (linen and NNX), equinox and haiku as functions of (params, batch)."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Mapping
from typing import Annotated, Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Key, PyTree

from meanflow import _boundary
from meanflow._boundary import PRNGKey, checked, mapping, unchecked
from meanflow.kernels._empirical.modules import Apply, Batch, Function, Normalized, Params, floats


@checked
def from_module(
    module: Callable[..., PyTree],
    variables: Annotated[PyTree, unchecked("checked by what the module's library wants")] = None,
    *,
    state: Annotated[PyTree, unchecked("any pytree that the module takes")] = None,
    train: Annotated[dict[str, object], mapping(unchecked("the module's own arguments"))] | None = None,
    evaluate: Annotated[dict[str, object], mapping(unchecked("the module's own arguments"))] | None = None,
    per_sample: bool | None = None,
    key: PRNGKey | None = None,
) -> tuple[Apply | Normalized, Params]:
    """Turn a module of flax NNX, flax linen, equinox or haiku into (apply, params).

    | library | call | parameters |
    |---|---|---|
    | NNX | ``from_module(model)`` | its ``nnx.Param`` variables |
    | linen | ``from_module(module, variables, train=, evaluate=)`` | the collection "params" |
    | equinox | ``from_module(model, state=, per_sample=)`` | its arrays of floats |
    | haiku | ``from_module(transformed.apply, params, state=)`` | ``params`` |

    With batch norm in training mode the function is ``Normalized``: its statistics are those of the batch, whatever
    the momentum of the layer, and the running averages are kept beside. Modules are taken in the mode they are in;
    after ``model.eval()`` of NNX or ``eqx.nn.inference_mode`` the function is a plain one, which normalizes with the
    running averages. Everything but the parameters is held fixed.

    Args:
        module: maps a batch to outputs. A haiku function is ``apply(params, rng, batch)``, or with ``state``
            ``apply(params, state, rng, batch) -> (outputs, state)``; take batch norm there in inference.
        variables: what ``module.init`` of linen returned, or training made of it; of haiku, the parameters.
        state: of an equinox module with stateful layers, which is called as ``model(sample, state)``; of haiku, the
            state of ``transform_with_state``.
        train: keyword arguments with which a linen module computes batch statistics, such as ``{"train": True}``.
            Without it, a module with batch norm is taken in inference.
        evaluate: keyword arguments with which a linen module uses stored statistics, such as ``{"train": False}``.
        per_sample: whether an equinox module maps one sample, as is the habit there (the default), and has to be
            vmapped over the batch. False: it maps a whole batch.
        key: holds the random numbers that the module draws (dropout) fixed, the same for every sample: the kernel is
            that of one thinned network. Without it, a module of flax that draws random numbers is refused.

    Returns:
        (params, batch) -> outputs, plain or ``Normalized``; and the params.

    >>> from flax import linen, nnx
    >>> apply, params = from_module(nnx.Linear(3, 1, rngs=nnx.Rngs(0)))
    >>> apply(params, jnp.ones((5, 3))).shape
    (5, 1)
    >>> dense, x = linen.Dense(1), jnp.ones((5, 3))
    >>> apply, params = from_module(dense, dense.init(jax.random.key(0), x))
    >>> apply(params, x).shape
    (5, 1)
    """
    library = _library(module, variables)
    makers: dict[str, Callable[..., tuple[Apply | Normalized, Params]]]
    makers = {"NNX": _nnx, "linen": _linen, "equinox": _equinox, "haiku": _haiku}
    make = makers[library]
    takes = list(inspect.signature(make).parameters)[1:]  # the first one is the module
    given = {"variables": variables, "state": state, "train": train, "evaluate": evaluate}
    given |= {"per_sample": per_sample, "key": key}
    for name, value in given.items():
        if value is not None and name not in takes:
            listed = " and ".join(takes)
            raise ValueError(
                f"{name} must be left out for a module of {library}, which takes {listed} beside it"
            )
    return make(module, **{name: given[name] for name in takes})


def _library(module: Callable[..., PyTree], variables: PyTree) -> str:
    """Say which library a module is of, without importing one: where a library is not loaded, no module is of it."""
    for name, package in (("NNX", "flax.nnx"), ("linen", "flax.linen")):
        loaded = sys.modules.get(package)
        if loaded is not None and isinstance(module, loaded.Module):
            return name
    if not isinstance(module, eqx.Module) and variables is not None:
        return "haiku"
    if isinstance(module, eqx.Module) or any(map(eqx.is_inexact_array, jax.tree.leaves(module))):
        return "equinox"
    raise TypeError(
        "module must be a module of flax NNX, flax linen or equinox, or a haiku function together with its parameters "
        f"as variables, got {_boundary.show(module)}"
    )


def one_by_one(function: Callable[[Batch], Array], x: Batch) -> Array:
    """Evaluate each sample as a batch of its own, so that random numbers held fixed are the same for every sample."""
    return jax.vmap(lambda sample: function(sample[None])[0])(x)


def refuse_key(key: Key[Array, ""] | None) -> None:
    """Refuse random numbers held fixed together with batch norm in training mode."""
    if key is not None:
        raise ValueError(
            "key cannot be given for a module with batch norm in training mode: random numbers that are the same for "
            "every sample need samples that are evaluated one by one"
        )


class ByValue:
    """A constant that jit compares by its value where it can be hashed, else by its identity."""

    def __init__(self, value: Any):
        self.value = value
        try:
            self.mark = hash(value)
        except TypeError:
            self.mark = id(value)

    def __hash__(self) -> int:
        return self.mark

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, ByValue) or self.mark != other.mark:
            return False
        return self.value is other.value or bool(self.value == other.value)


def _nnx(model: Callable[..., PyTree], key: Key[Array, ""] | None) -> tuple[Apply | Normalized, Params]:
    from meanflow.kernels._empirical import nnx_modules  # which loads flax

    return nnx_modules.split(model, key)


class LinenFunction(Function):
    """A linen module as a function of (params, batch); ``statistics`` replaces its collection of batch statistics."""

    module: ByValue = eqx.field(static=True)
    state: dict[str, PyTree]
    train: dict[str, object]
    evaluate: dict[str, object]
    key: Key[Array, ""] | None

    def __call__(self, params: Params, x: Batch, statistics: PyTree = None) -> Array:
        """Return the outputs at a batch, with the given statistics in place of its own."""
        variables = {"params": params, **self.state}
        if statistics is not None:
            variables["batch_stats"] = statistics
        if self.key is None:
            return self._apply(variables, x, **self.evaluate)
        # a stream that has no key of its own takes that of "params"
        fixed = lambda batch: self._apply(variables, batch, rngs={"params": self.key}, **self.evaluate)
        return one_by_one(fixed, x)

    def _apply(self, variables: dict[str, PyTree], x: Batch, **options: object) -> PyTree:
        from flax.errors import InvalidRngError

        try:
            return self.module.value.apply(variables, x, **options)
        except InvalidRngError as error:
            raise ValueError(
                "the module draws random numbers, which are no part of a kernel: give evaluate= the arguments that "
                'switch them off, such as {"deterministic": True}, or key= to hold them fixed'
            ) from error

    def batch_statistics(self, params: Params, x: Batch) -> PyTree:
        """Return what training mode computes on the batch, without the running averages mixed in."""

        def run(old: PyTree) -> PyTree:
            variables = {"params": params, **self.state, "batch_stats": old}
            return self._apply(variables, x, mutable=["batch_stats"], **self.train)[1]["batch_stats"]

        def unmixed(stored: Array, momentum: Array) -> Array:
            share = 1.0 - momentum
            # Momenta are decimals such as 0.999. In single precision that is off by 1e-8, a hundred thousandth of the
            # share; the nearest decimal is taken if it is as near as rounding.
            decimal = jnp.round(share, 6)
            share = jnp.where(jnp.abs(share - decimal) <= jnp.finfo(share.dtype).eps / 4, decimal, share)
            return stored / share

        floats = [a for a in jax.tree.leaves((params, x)) if jnp.issubdtype(jnp.result_type(a), jnp.inexact)]
        dtype, old = jnp.result_type(jnp.float32, *floats), self.state["batch_stats"]
        constant = lambda value: jax.tree.map(lambda a: jnp.full(a.shape, value, dtype), old)
        # Stored is momentum * old + (1 - momentum) * batch. From old = 0 it holds the batch alone, and its derivative
        # in old is the momentum, which the difference of two runs would lose beside a large batch.
        return jax.tree.map(unmixed, *jax.jvp(run, (constant(0.0),), (constant(1.0),)))


def _linen(
    module: Callable[..., PyTree],
    variables: PyTree,
    train: dict[str, object] | None,
    evaluate: dict[str, object] | None,
    key: Key[Array, ""] | None,
) -> tuple[Apply | Normalized, Params]:
    if not isinstance(variables, Mapping) or "params" not in variables:
        raise ValueError(
            f"variables must be what module.init returns, with a collection 'params', got {_boundary.show(variables)}"
        )
    others = {k: v for k, v in variables.items() if k != "params"}
    function = LinenFunction(ByValue(module), others, train or {}, evaluate or {}, key)
    if "batch_stats" not in others or train is None:
        return function, variables["params"]
    refuse_key(key)
    return Normalized(function, function.batch_statistics, others["batch_stats"]), variables["params"]


class EquinoxFunction(Function):
    """An equinox module as a function of (params, batch); ``statistics`` replaces those of its batch norms."""

    static: PyTree
    state: PyTree
    key: Key[Array, ""] | None
    per_sample: bool = eqx.field(static=True)

    def __call__(self, params: Params, x: Batch, statistics: PyTree = None) -> Array:
        """Return the outputs at a batch, with the given statistics in place of its own."""
        model = eqx.combine(params, self.static)
        options = {} if self.key is None else {"key": self.key}
        if self.state is None:
            return jax.vmap(lambda u: model(u, **options))(x) if self.per_sample else model(x, **options)
        if statistics is None:
            return self._run(model, self.state, x)[0]
        state = _fresh(self.state)
        for layer, moments in zip(_batch_norms(model), statistics, strict=True):
            state = state.set(_place(layer), moments)
            if layer.mode != "ema":  # a count of 0 switches equinox's correction of young averages off
                state = state.set(layer.batch_counter, jnp.zeros_like(state.get(layer.batch_counter)))
        return self._run(_in_mode(model, inference=True), state, x)[0]

    def _run(self, model: Callable[..., PyTree], state: PyTree, x: Batch) -> PyTree:
        options = {} if self.key is None else {"key": self.key}
        names = {layer.axis_name for layer in _batch_norms(model)}
        if len(names) > 1 or any(not isinstance(name, str) for name in names):
            raise ValueError(
                f"all batch norms must have one and the same axis_name, got {sorted(map(str, names))}"
            )
        one = lambda u, s: model(u, s, **options)
        run = jax.vmap(one, axis_name=next(iter(names), "batch"), in_axes=(0, None), out_axes=(0, None))
        return run(x, _fresh(state))

    def batch_statistics(self, params: Params, x: Batch) -> PyTree:
        """Return mean and variance of the batch at each batch norm, from one run in training mode on a fresh state."""
        model = eqx.combine(params, self.static)
        state = _fresh(self.state)
        for layer in _batch_norms(model):
            if layer.mode == "ema":
                first = layer.ema_first_time_index
                state = state.set(first, jnp.ones_like(state.get(first)))
            else:
                zero = jax.tree.map(jnp.zeros_like, state.get(layer.batch_state_index))
                state = state.set(layer.batch_state_index, zero)
        _, state = self._run(_in_mode(model, inference=False), state, x)
        # from zero, an average of the mode "batch" holds (1 - momentum) x batch
        return _averages(model, state, lambda layer: 1 - layer.momentum)

    def running(self, params: Params) -> PyTree:
        """Return the running averages as inference uses them."""

        def grown(layer: eqx.nn.BatchNorm) -> Array:
            count = self.state.get(layer.batch_counter)
            return jnp.where(count == 0, 1, 1 - layer.momentum**count)

        return _averages(eqx.combine(params, self.static), self.state, grown)


def _averages(model: PyTree, state: PyTree, share: Callable[[eqx.nn.BatchNorm], Array | float]) -> PyTree:
    """Return mean and variance that each batch norm keeps, divided in the mode "batch" by their ``share``."""
    kept = lambda layer: 1.0 if layer.mode == "ema" else share(layer)
    return tuple(tuple(u / kept(n) for u in state.get(_place(n))) for n in _batch_norms(model))


def _place(layer: eqx.nn.BatchNorm) -> Any:
    """Return where a batch norm keeps mean and variance."""
    return layer.ema_state_index if layer.mode == "ema" else layer.batch_state_index


def _batch_norms(model: PyTree) -> list[eqx.nn.BatchNorm]:
    is_norm = lambda part: isinstance(part, eqx.nn.BatchNorm)
    return [part for part in jax.tree.leaves(model, is_leaf=is_norm) if is_norm(part)]


def _in_mode(model: PyTree, *, inference: bool) -> PyTree:
    """Return the model with its batch norms, and nothing else, in inference or in training."""
    flags = lambda tree: [layer.inference for layer in _batch_norms(tree)]
    return eqx.tree_at(flags, model, [inference] * len(_batch_norms(model)))


def _fresh(state: PyTree) -> PyTree:
    """Return a copy: equinox refuses to change a state that has been changed before."""
    return jax.tree.map(lambda leaf: leaf, state)


def _equinox(
    model: Callable[..., PyTree], state: PyTree, per_sample: bool | None, key: Key[Array, ""] | None
) -> tuple[Apply | Normalized, Params]:
    params, static = eqx.partition(model, eqx.is_inexact_array)
    function = EquinoxFunction(static, state, key, per_sample is not False)
    if state is None:
        return function, params
    _boundary.instance(eqx.nn.State)("state", state)
    if not function.per_sample:
        raise ValueError(
            "per_sample must be True for a module with a state, which equinox vmaps over the batch"
        )
    modes = {bool(layer.inference) for layer in _batch_norms(model)}
    if modes == {True, False}:
        raise ValueError("the batch norms of module must be all in training or all in inference, got both")
    if modes != {False}:
        return function, params
    return Normalized(function, function.batch_statistics, function.running(params)), params


class HaikuFunction(Function):
    """A function in the style of haiku as a function of (params, batch)."""

    function: Callable[..., PyTree]
    state: PyTree
    key: Key[Array, ""] | None

    def __call__(self, params: Params, x: Batch) -> Array:
        """Return the outputs at a batch."""
        if self.state is not None:
            return self.function(params, self.state, None, x)[0]
        if self.key is None:
            return self.function(params, None, x)
        return one_by_one(lambda batch: self.function(params, self.key, batch), x)


def _haiku(
    apply: Callable[..., PyTree], variables: PyTree, state: PyTree, key: Key[Array, ""] | None
) -> tuple[Apply, Params]:
    if state is not None and key is not None:
        raise ValueError(
            "key cannot be given together with state: a state is held fixed in inference, without rng"
        )
    return HaikuFunction(apply, state, key), floats("variables", variables)
