"""Networks as functions of (params, batch), and statistics that can be taken out of them.

The kernel engine takes any JAX function ``apply(params, batch) -> outputs``. Batch normalisation makes the
output of one sample depend on the others through a few statistics; a ``Normalised`` function exposes them,
so that the engine can take them from another batch, or hold them fixed.
"""

from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp

Params = Any
Apply = Callable[[Params, jax.Array], jax.Array]


class Normalised(eqx.Module):
    """A network whose normalisation statistics are a value, not a side effect.

    Called as ``network(params, batch)`` it uses the statistics of that very batch.

    Attributes:
        apply: (params, batch, statistics) -> outputs (T, ...); a function of each sample alone once the
            statistics are given.
        statistics: (params, batch) -> any pytree of arrays.

    >>> import jax.numpy as jnp
    >>> moments = lambda w, x: (jnp.mean(x @ w), jnp.std(x @ w))
    >>> net = Normalised(lambda w, x, s: (x @ w - s[0]) / s[1], moments)
    >>> net(jnp.ones(1), jnp.array([[0.0], [2.0]])).tolist()
    [-1.0, 1.0]
    """

    apply: Callable[[Params, jax.Array, Any], jax.Array]
    statistics: Callable[[Params, jax.Array], Any]

    def __call__(self, params: Params, batch: jax.Array) -> jax.Array:
        """Outputs at ``batch`` under its own statistics."""
        return self.apply(params, batch, self.statistics(params, batch))


def from_nnx(model: Any) -> tuple[Apply | Normalised, Params]:
    """(apply, params) of a flax NNX module that maps a batch to outputs.

    A module with ``nnx.BatchNorm`` layers becomes a ``Normalised`` function: its statistics are those that
    training mode would compute on the batch (momentum plays no part), its parameters the ``nnx.Param`` s.
    """
    from flax import nnx

    graph, *states = nnx.split(model, nnx.Param, ...)
    params, rest = states
    if not any(isinstance(m, nnx.BatchNorm) for _, m in nnx.iter_modules(model)):
        return lambda p, x: nnx.merge(graph, p, rest)(x), params

    def collect(p: Params, x: jax.Array) -> Any:
        network, statistics = _explicit(nnx.merge(graph, p, rest, copy=True), None)
        network(x)
        return statistics

    def evaluate(p: Params, x: jax.Array, statistics: Any) -> jax.Array:
        return _explicit(nnx.merge(graph, p, rest, copy=True), statistics)[0](x)

    return Normalised(evaluate, collect), params


def _explicit(model: Any, given: dict[str, Any] | None) -> tuple[Any, dict[str, Any]]:
    """The NNX model with batch norms that use ``given`` statistics, or record those of the batch they see.

    flax's running averages cannot serve: gradients stop there, and they are float32 whatever the batch is.
    """
    from flax import nnx

    recorded: dict[str, Any] = {} if given is None else given
    paths: dict[int, str] = {}

    class Explicit(nnx.BatchNorm):
        def __call__(self, x: jax.Array, *args: Any, **kwargs: Any) -> jax.Array:
            path, axes = paths[id(self)], tuple(range(x.ndim - 1))
            if given is None:
                recorded[path] = (jnp.mean(x, axes, keepdims=True), jnp.var(x, axes, keepdims=True))
            mean, variance = recorded[path]
            out = (x - mean) / jnp.sqrt(variance + self.epsilon)
            like = lambda a: a[...].reshape((1,) * len(axes) + (-1,))
            out = out if self.scale is None else out * like(self.scale)
            return out if self.bias is None else out + like(self.bias)

    for path, module in nnx.iter_modules(model):
        if isinstance(module, nnx.BatchNorm):
            if module.axis != -1 or module.axis_name is not None:
                raise ValueError("nnx.BatchNorm must have axis=-1 and no axis_name here")
            module.__class__ = Explicit
            paths[id(module)] = "/".join(map(str, path))
    return model, recorded


def from_linen(module: Any, variables: Any, train: dict[str, Any], evaluate: dict[str, Any]) -> Any:
    """(apply, params) of a flax linen module.

    Args:
        module: the module; ``variables``: what ``module.init`` returned.
        train: keyword arguments of the call that compute batch statistics, e.g. ``{"train": True}``.
        evaluate: keyword arguments that use stored statistics, e.g. ``{"train": False}``.

    Returns:
        A ``Normalised`` function if there is a ``batch_stats`` collection, else a plain one; and the params.
    """
    params = variables["params"]
    others = {k: v for k, v in variables.items() if k != "params"}
    if "batch_stats" not in others:
        return lambda p, x: module.apply({"params": p, **others}, x, **evaluate), params

    def run(p: Params, x: jax.Array, start: float) -> Any:
        stats = jax.tree.map(lambda a: jnp.full(a.shape, start, x.dtype), others["batch_stats"])
        _, new = module.apply(
            {"params": p, **others, "batch_stats": stats}, x, mutable=["batch_stats"], **train
        )
        return new["batch_stats"]

    def collect(p: Params, x: jax.Array) -> Any:
        # stored = momentum * old + (1 - momentum) * batch: two runs solve for batch, whatever the momentum
        low, high = run(p, x, 0.0), run(p, x, 1.0)
        return jax.tree.map(lambda a, b: a / (1.0 - (b - a)), low, high)

    def forward(p: Params, x: jax.Array, statistics: Any) -> jax.Array:
        return module.apply({"params": p, **others, "batch_stats": statistics}, x, **evaluate)

    return Normalised(forward, collect), params


def from_equinox(model: Any, *, per_sample: bool = True) -> tuple[Apply, Params]:
    """(apply, params) of an equinox module; ``per_sample`` modules (the equinox habit) are vmapped."""
    params, static = eqx.partition(model, eqx.is_inexact_array)

    def apply(p: Params, x: jax.Array) -> jax.Array:
        whole = eqx.combine(p, static)
        return jax.vmap(whole)(x) if per_sample else whole(x)

    return apply, params
