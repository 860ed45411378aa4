"""Flax NNX modules as functions of (params, batch).

An NNX module is taken as it is: layers in training mode use the statistics of the batch, layers in inference mode
(``model.eval()``) their running averages. Random numbers are refused, or held fixed by a key.
"""

from collections.abc import Callable
from typing import TypeAlias, cast

import equinox as eqx
import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Key, PyTree

from meanflow.kernels._empirical.adapters import ByValue, one_by_one, refuse_key
from meanflow.kernels._empirical.modules import Apply, Batch, Function, Normalized, Outputs, Params
from meanflow.layers._normalization import Normalization

Model: TypeAlias = Callable[[Batch], Outputs]
Norm: TypeAlias = nnx.BatchNorm | Normalization


class NnxFunction(Function):
    """An NNX module as a function of (params, batch), the same to jit for all modules of one structure.

    ``statistics`` replaces those of its normalization layers in training mode: a dict from the path of a layer to the
    mean and variance of each of its calls.
    """

    graph: ByValue = eqx.field(static=True)
    state: PyTree
    key: Key[Array, ""] | None

    def _merged(self, params: Params) -> nnx.Module:
        # a copy, made where it is used: the module may change its variables (running averages, counts of streams)
        return nnx.merge(self.graph.value, params, self.state, copy=True)

    def __call__(self, params: Params, x: Batch, statistics: PyTree = None) -> Outputs:
        """Return the outputs at a batch, with the given statistics in place of its own."""
        if self.key is not None:
            return one_by_one(lambda batch: self._with_fixed_streams(params)(batch), x)
        model = self._merged(params)
        if statistics is not None:
            _make_explicit(model, _Ledger(statistics))
        return _without_drawing(model, x)

    def batch_statistics(self, params: Params, x: Batch) -> PyTree:
        """Return mean and variance of the batch at each call of a normalization layer in training mode."""
        model, ledger = self._merged(params), _Ledger(None)
        _make_explicit(model, ledger)
        _without_drawing(model, x)
        return ledger.seen

    def _with_fixed_streams(self, params: Params) -> Model:
        model = self._merged(params)
        assert self.key is not None
        for number, (_, stream) in enumerate(nnx.iter_graph(model, graph=True)):
            if isinstance(stream, nnx.RngStream):
                stream.key[...] = jax.random.fold_in(self.key, number)
                stream.count[...] = jnp.zeros_like(stream.count[...])
        return cast(Model, model)


def _without_drawing(model: nnx.Module, x: Batch) -> Outputs:
    """Return model(x); raise if that drew random numbers, which is seen at the counts of the streams."""
    counts = [leaf for _, leaf in nnx.iter_graph(model, graph=True) if isinstance(leaf, nnx.RngCount)]
    before = [count.get_value() for count in counts]
    outputs = cast(Model, model)(x)
    if any(count.get_value() is not old for count, old in zip(counts, before, strict=True)):
        raise ValueError(
            "the module draws random numbers (dropout?), which are no part of a kernel: call model.eval() first, "
            "or pass key= to from_module to hold them fixed"
        )
    return outputs


def _training_norms(model: nnx.Module) -> dict[str, Norm]:
    """Return the normalization layers in training mode by their path."""
    return {
        "/".join(map(str, path)): module
        for path, module in nnx.iter_modules(model)
        if isinstance(module, Norm)
        and not module.use_running_average
        and not (module.mean is None and module.var is None)  # unitization keeps no moments
    }


class _Ledger:
    """Mean and variance of each call of each layer: given, or entered as they are computed."""

    def __init__(self, given: PyTree):
        self.given = given
        self.seen: dict[str, list[tuple[Array, Array]]] = {}
        self.used: dict[str, int] = {}

    def moments(self, path: str, x: Array, axis: int, about_zero: bool) -> tuple[Array, Array]:
        """Return mean and variance, laid along ``axis`` of x, for the next call of the layer at ``path``."""
        axes = tuple(i for i in range(x.ndim) if i != axis % x.ndim)
        if self.given is None:
            mean = jnp.mean(x, axes)
            square = jnp.mean(jnp.square(x), axes) if about_zero else jnp.var(x, axes)
            self.seen.setdefault(path, []).append((mean, square))
        else:
            call = self.used[path] = self.used.get(path, -1) + 1
            calls = self.given[path]
            # running averages are one for all calls of a layer
            mean, square = calls[min(call, len(calls) - 1)]
        laid = lambda a: jnp.expand_dims(a.astype(x.dtype), axes)
        return laid(mean), laid(square)


def _make_explicit(model: nnx.Module, ledger: _Ledger) -> None:
    """Make the layers in training mode take their moments from ``ledger``.

    The running averages that the layers keep cannot serve: gradients stop there.
    """
    for path, module in _training_norms(model).items():
        if module.axis_name is not None or not isinstance(module.axis, int):
            raise ValueError(f"the normalization layer {path} must have a single axis and no axis_name here")
        # The merged model is our own copy, so exchanging the class of its layers changes nothing elsewhere.
        module.__class__ = _explicit_class(type(module), path, ledger)


def _explicit_class(kind: type, path: str, ledger: _Ledger) -> type:
    """Return a subclass of a normalization layer that takes its moments from ``ledger``."""

    class ExplicitFlax(nnx.BatchNorm):
        def __call__(self, x: Array, use_running_average: bool | None = None, **options: object) -> Array:
            if use_running_average:
                return super().__call__(x, use_running_average)
            mean, variance = ledger.moments(path, x, self.axis, False)
            out = (x - mean) / jnp.sqrt(variance + self.epsilon)
            out = out if self.scale is None else out * self.scale[...].reshape(mean.shape)
            return out if self.bias is None else out + self.bias[...].reshape(mean.shape)

    class ExplicitOwn(Normalization):
        def given_moments(self, x: Array) -> tuple[Array, Array]:
            assert isinstance(self.axis, int)
            return ledger.moments(path, x, self.axis, self.moment == "rms")

    base = ExplicitOwn if issubclass(kind, Normalization) else ExplicitFlax
    return type(kind.__name__, (base, kind), {})


def split(model: Model, key: Key[Array, ""] | None) -> tuple[Apply | Normalized, Params]:
    """Return (apply, params) of an NNX module; ``from_module`` describes both."""
    graph, *states = nnx.split(model, nnx.Param, ...)
    params, state = states
    function = NnxFunction(graph=ByValue(graph), state=state, key=key)
    norms = _training_norms(cast(nnx.Module, model))
    if not norms:
        return function, params
    refuse_key(key)
    running = {path: [_running(module)] for path, module in norms.items()}
    return Normalized(function, function.batch_statistics, running), params


def _running(module: Norm) -> tuple[Array, Array]:
    """Return the running mean and variance of a normalization layer; what it does not keep has no effect."""
    size = (module.num_features,)
    return (
        jnp.zeros(size) if module.mean is None else module.mean[...],
        jnp.ones(size) if module.var is None else module.var[...],
    )
