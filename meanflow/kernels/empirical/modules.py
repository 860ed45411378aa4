"""Networks as functions of (params, batch), with normalization statistics that can be taken out of them.

The kernel engine takes any JAX function ``apply(params, batch) -> outputs``. Batch normalization makes the output of
one sample depend on the other samples through a few statistics. A ``Normalized`` function exposes these statistics, so
that the engine can compute them from another batch, or hold them fixed.
"""

from collections.abc import Callable, Mapping
from typing import Protocol, TypeAlias, cast, runtime_checkable

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, PyTree, Shaped

from meanflow import _checks

Params: TypeAlias = PyTree
Statistics: TypeAlias = PyTree
# axes without a name, since functions take batches of different sizes
Batch: TypeAlias = Shaped[Array, "_ ..."]
Outputs: TypeAlias = Shaped[Array, "_ ..."]
Apply: TypeAlias = Callable[[Params, Batch], Outputs]


def batch(name: str, value: object) -> object:
    """Accept a batch of samples, an array of at least one axis; integers (such as tokens) stay integers."""
    _checks.numeric(name, value)
    samples = jnp.asarray(value)
    if samples.ndim < 1:
        raise ValueError(f"{name} must be a batch of samples (T, ...), got a single number")
    _checks.finite(name, value)
    return samples


class Normalized(eqx.Module):
    """A network whose normalization statistics are an argument instead of a side effect.

    Called as ``network(params, batch)`` it normalizes with the statistics of that very batch.

    Attributes:
        apply: (params, batch, statistics) -> outputs (T, ...). Once the statistics are given, the output at a sample
            must depend on that sample alone.
        statistics: (params, batch) -> the statistics of the batch, any pytree of arrays.

    >>> import jax.numpy as jnp
    >>> moments = lambda w, x: (jnp.mean(x @ w), jnp.std(x @ w))
    >>> net = Normalized(lambda w, x, s: (x @ w - s[0]) / s[1], moments)
    >>> net(jnp.ones(1), jnp.array([[0.0], [2.0]])).tolist()
    [-1.0, 1.0]
    """

    apply: Callable[[Params, Batch, Statistics], Outputs]
    statistics: Callable[[Params, Batch], Statistics]

    def __check_init__(self) -> None:
        _checks.function("apply", self.apply)
        _checks.function("statistics", self.statistics)

    def __call__(self, params: Params, batch: Batch) -> Outputs:
        """Return the outputs at ``batch``, normalized with its own statistics."""
        return self.apply(params, batch, self.statistics(params, batch))


@runtime_checkable
class LinenModule(Protocol):
    """What ``from_linen`` needs of a flax linen module."""

    def apply(self, variables: PyTree, *args: PyTree, **kwargs: object) -> PyTree:
        """Return the outputs, and with ``mutable`` also the changed collections."""


# flax is imported inside the functions that need it: importing the kernels must not cost the time of loading it


@_checks.arguments(model=_checks.function)
def from_nnx(model: Callable[[Batch], Outputs]) -> tuple[Apply | Normalized, Params]:
    """Turn a flax NNX module that maps a batch to outputs into (apply, params).

    The parameters are the module's ``nnx.Param`` variables. A module with ``nnx.BatchNorm`` layers becomes a
    ``Normalized`` function whose statistics are those that training mode would compute on the batch (the momentum of
    the layer plays no part); any other module becomes a plain function.

    >>> from flax import nnx
    >>> apply, params = from_nnx(nnx.Linear(3, 1, rngs=nnx.Rngs(0)))
    >>> apply(params, jnp.ones((5, 3))).shape
    (5, 1)
    """
    from flax import nnx

    graph, *states = nnx.split(model, nnx.Param, ...)
    params, rest = states
    if not any(isinstance(m, nnx.BatchNorm) for _, m in nnx.iter_modules(cast(nnx.Module, model))):
        return lambda p, x: nnx.merge(graph, p, rest)(x), params

    def collect(p: Params, x: Batch) -> Statistics:
        network, statistics = _with_explicit_statistics(nnx.merge(graph, p, rest, copy=True), None)
        network(x)
        return statistics

    def evaluate(p: Params, x: Batch, statistics: Statistics) -> Outputs:
        return _with_explicit_statistics(nnx.merge(graph, p, rest, copy=True), statistics)[0](x)

    return Normalized(evaluate, collect), params


def _with_explicit_statistics(
    model: Callable[[Batch], Outputs], given: dict[str, tuple[Array, Array]] | None
) -> tuple[Callable[[Batch], Outputs], dict[str, tuple[Array, Array]]]:
    """Make the batch norms of an NNX model use ``given`` statistics, or record those of the batch they see.

    The running averages that flax keeps cannot serve: gradients stop there, and they are float32 whatever the dtype
    of the batch.
    """
    from flax import nnx

    recorded: dict[str, tuple[Array, Array]] = {} if given is None else given
    paths: dict[int, str] = {}

    class Explicit(nnx.BatchNorm):
        def __call__(self, x: Array, *args: object, **kwargs: object) -> Array:
            path, axes = paths[id(self)], tuple(range(x.ndim - 1))
            if given is None:
                recorded[path] = (jnp.mean(x, axes, keepdims=True), jnp.var(x, axes, keepdims=True))
            mean, variance = recorded[path]
            out = (x - mean) / jnp.sqrt(variance + self.epsilon)
            like = lambda a: a[...].reshape((1,) * len(axes) + (-1,))
            out = out if self.scale is None else out * like(self.scale)
            return out if self.bias is None else out + like(self.bias)

    for path, module in nnx.iter_modules(cast(nnx.Module, model)):
        if isinstance(module, nnx.BatchNorm):
            if module.axis != -1 or module.axis_name is not None:
                raise ValueError("nnx.BatchNorm must have axis=-1 and no axis_name here")
            # The merged model is our own copy, so exchanging the class of its layers changes nothing elsewhere.
            module.__class__ = Explicit
            paths[id(module)] = "/".join(map(str, path))
    return model, recorded


@_checks.arguments(module=_checks.instance(LinenModule))
def from_linen(
    module: LinenModule,
    variables: Mapping[str, PyTree],
    train: dict[str, object],
    evaluate: dict[str, object],
) -> tuple[Apply | Normalized, Params]:
    """Turn a flax linen module into (apply, params).

    Args:
        module: the module, which maps a batch to outputs.
        variables: what ``module.init`` returned.
        train: keyword arguments of the call that compute batch statistics, e.g. ``{"train": True}``.
        evaluate: keyword arguments that use stored statistics, e.g. ``{"train": False}``.

    Returns:
        A ``Normalized`` function if there is a ``batch_stats`` collection, else a plain one; and the params.

    >>> import jax
    >>> from flax import linen
    >>> dense, x = linen.Dense(1), jnp.ones((5, 3))
    >>> apply, params = from_linen(dense, dense.init(jax.random.key(0), x), {}, {})
    >>> apply(params, x).shape
    (5, 1)
    """
    params = variables["params"]
    others = {k: v for k, v in variables.items() if k != "params"}
    if "batch_stats" not in others:
        return lambda p, x: module.apply({"params": p, **others}, x, **evaluate), params

    def run(p: Params, x: Batch, start: float) -> Statistics:
        stats = jax.tree.map(lambda a: jnp.full(a.shape, start, x.dtype), others["batch_stats"])
        _, new = module.apply(
            {"params": p, **others, "batch_stats": stats}, x, mutable=["batch_stats"], **train
        )
        return new["batch_stats"]

    def collect(p: Params, x: Batch) -> Statistics:
        # stored = momentum * old + (1 - momentum) * batch: two runs solve for batch, whatever the momentum
        low, high = run(p, x, 0.0), run(p, x, 1.0)
        return jax.tree.map(lambda a, b: a / (1.0 - (b - a)), low, high)

    def forward(p: Params, x: Batch, statistics: Statistics) -> Outputs:
        return module.apply({"params": p, **others, "batch_stats": statistics}, x, **evaluate)

    return Normalized(forward, collect), params


@_checks.arguments(model=_checks.function, per_sample=_checks.flag)
def from_equinox(model: Callable[..., Array], *, per_sample: bool = True) -> tuple[Apply, Params]:
    """Turn an equinox module, or any callable pytree, into (apply, params).

    Args:
        model: the module; its floating-point arrays are the parameters.
        per_sample: whether the module maps one sample, as is the habit of equinox, and has to be vmapped over the
            batch. False: it maps a whole batch.

    >>> apply, params = from_equinox(lambda sample: jnp.tanh(sample).sum())
    >>> apply(params, jnp.ones((5, 3))).shape
    (5,)
    """
    params, static = eqx.partition(model, eqx.is_inexact_array)

    def apply(p: Params, x: Batch) -> Outputs:
        whole = eqx.combine(p, static)
        return jax.vmap(whole)(x) if per_sample else whole(x)

    return apply, params
