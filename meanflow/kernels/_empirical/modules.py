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
from jaxtyping import Array, Key, PyTree, Shaped

from meanflow import _checks

Params: TypeAlias = PyTree
Statistics: TypeAlias = PyTree
# axes without a name, since functions take batches of different sizes
Batch: TypeAlias = PyTree[Shaped[Array, "_ ..."]]
Outputs: TypeAlias = Shaped[Array, "_ ..."]
Apply: TypeAlias = Callable[[Params, Batch], Outputs]


def batch(name: str, value: object) -> object:
    """Accept a batch of samples, an array of at least one axis; integers (such as tokens) stay integers."""
    _checks.numeric(name, value)
    samples = jnp.asarray(value)
    if samples.ndim < 1:
        raise ValueError(f"{name} must be a batch of samples (T, ...), got a single number")
    if jnp.issubdtype(samples.dtype, jnp.floating):
        _checks.array(least=0, half=True, squares=True)(name, value)
    return samples


class Function(eqx.Module):
    """A function with arrays inside, which ``eqx.filter_jit`` traces.

    To ``jax.jit``, which hashes the function it is given, two of them are the same only if they are one object.
    """

    def probed(self, x: Batch) -> tuple[Callable[..., PyTree], PyTree]:
        """Return the function, and the samples for x, at which to probe whether samples are coupled."""
        return cast(Callable[..., PyTree], self), x

    def __hash__(self) -> int:
        return id(self)

    def __eq__(self, other: object) -> bool:
        return self is other


class Adapter(Function):
    """A module of another library as a function of (params, batch).

    Attributes:
        state: all that the module keeps beside its parameters and training may change, such as running averages, as it
            was when the function was made; None for none.
    """

    state: eqx.AbstractVar[PyTree]


class Normalized(Function):
    """A network whose normalization statistics are an argument instead of a side effect.

    Called as ``network(params, batch)`` it normalizes with the statistics of that very batch.

    Attributes:
        apply: (params, batch, statistics) -> outputs (T, ...). Once the statistics are given, the output at a sample
            must depend on that sample alone.
        statistics: (params, batch) -> the statistics of the batch, any pytree of arrays.
        running: the averages of the statistics that the model has gathered in training, which it normalizes with in
            inference; None if it keeps none. ``stats="running"`` uses them.

    >>> import jax.numpy as jnp
    >>> moments = lambda w, x: (jnp.mean(x @ w), jnp.std(x @ w))
    >>> net = Normalized(lambda w, x, s: (x @ w - s[0]) / s[1], moments)
    >>> net(jnp.ones(1), jnp.array([[0.0], [2.0]])).tolist()
    [-1.0, 1.0]
    """

    apply: Callable[[Params, Batch, Statistics], Outputs]
    statistics: Callable[[Params, Batch], Statistics]
    running: Statistics = None

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


def parameters(name: str, value: object) -> object:
    """Accept a pytree with at least one array of finite floats; what else it holds is the function's matter."""
    floats = 0
    for path, leaf in jax.tree_util.tree_leaves_with_path(value):
        place = f"{name}{jax.tree_util.keystr(path)}"
        if isinstance(leaf, str):
            raise TypeError(f"{place} must be an array, got {_checks.show(leaf)}")
        dtype = getattr(leaf, "dtype", jnp.result_type(float) if isinstance(leaf, float) else None)
        if dtype is not None and jnp.issubdtype(dtype, jnp.inexact):
            _checks.numeric(place, leaf)
            _checks.finite(place, leaf)
            floats += 1
    if not floats:
        raise ValueError(f"{name} must hold at least one array of floats, got {_checks.show(value)}")
    return value


PARAMS = parameters
OF_CALL = _checks.mapping(_checks.unchecked("the module's own arguments"))


def one_by_one(function: Callable[[Batch], Outputs], x: Batch) -> Outputs:
    """Evaluate each sample as a batch of its own, so that random numbers held fixed are the same for every sample."""
    return jax.vmap(lambda sample: function(sample[None])[0])(x)


class ByValue:
    """A constant that jit compares by its value where it can be hashed, else by its identity."""

    def __init__(self, value: object):
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


class LinenFunction(Adapter):
    """A linen module as a function of (params, batch); ``statistics`` replaces its collection of batch statistics."""

    module: ByValue = eqx.field(static=True)
    state: dict[str, PyTree]
    train: dict[str, object]
    evaluate: dict[str, object]
    key: Key[Array, ""] | None

    def __call__(self, params: Params, x: Batch, statistics: Statistics = None) -> Outputs:
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

        module = cast(LinenModule, self.module.value)
        try:
            return module.apply(variables, x, **options)
        except InvalidRngError as error:
            raise ValueError(
                "the module draws random numbers, which are no part of a kernel: give evaluate= the arguments that "
                'switch them off, such as {"deterministic": True}, or key= to hold them fixed'
            ) from error

    def batch_statistics(self, params: Params, x: Batch) -> Statistics:
        """Return what training mode computes on the batch, without the running averages mixed in."""

        def run(old: Statistics) -> Statistics:
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
        dtype = jnp.result_type(jnp.float32, *floats)
        constant = lambda value: jax.tree.map(
            lambda a: jnp.full(a.shape, value, dtype), self.state["batch_stats"]
        )
        # Stored is momentum * old + (1 - momentum) * batch. From old = 0 it holds the batch alone, and its derivative
        # in old is the momentum, which the difference of two runs would lose beside a large batch.
        return jax.tree.map(unmixed, *jax.jvp(run, (constant(0.0),), (constant(1.0),)))


@_checks.arguments(
    module=_checks.instance(LinenModule),
    variables=_checks.mapping(_checks.unchecked("collections of the module")),
    train=_checks.optional(OF_CALL),
    evaluate=_checks.optional(OF_CALL),
    key=_checks.optional(_checks.prng_key),
)
def from_linen(
    module: LinenModule,
    variables: Mapping[str, PyTree],
    train: dict[str, object] | None = None,
    evaluate: dict[str, object] | None = None,
    *,
    key: Key[Array, ""] | None = None,
) -> tuple[Apply | Normalized, Params]:
    """Turn a flax linen module into (apply, params).

    Args:
        module: the module, which maps a batch to outputs.
        variables: what ``module.init`` returned, or training made of it. All but the params is held fixed.
        train: keyword arguments of the call that compute batch statistics, e.g. ``{"train": True}``; only modules with
            batch norm need them. Without ``train`` such a module is taken in inference.
        evaluate: keyword arguments that use stored statistics, e.g. ``{"train": False}``.
        key: holds the random numbers that the module draws (dropout) fixed, the same for every sample.

    Returns:
        A ``Normalized`` function if there is a ``batch_stats`` collection and ``train`` is given, else a plain one; and
        the params.

    >>> import jax
    >>> from flax import linen
    >>> dense, x = linen.Dense(1), jnp.ones((5, 3))
    >>> apply, params = from_linen(dense, dense.init(jax.random.key(0), x))
    >>> apply(params, x).shape
    (5, 1)
    """
    if "params" not in variables:
        raise ValueError(f"variables must hold a collection 'params', got {sorted(variables)}")
    others = {k: v for k, v in variables.items() if k != "params"}
    function = LinenFunction(
        module=ByValue(module), state=others, train=train or {}, evaluate=evaluate or {}, key=key
    )
    if "batch_stats" not in others or train is None:
        return function, variables["params"]
    _refuse_key(key)
    return Normalized(function, function.batch_statistics, others["batch_stats"]), variables["params"]


def _refuse_key(key: Key[Array, ""] | None) -> None:
    """Refuse random numbers held fixed together with batch norm in training mode."""
    if key is not None:
        raise ValueError(
            "key cannot be given for a module with batch norm in training mode: random numbers that are the same for "
            "every sample need samples that are evaluated one by one"
        )


class EquinoxFunction(Adapter):
    """An equinox module as a function of (params, batch); ``statistics`` replaces those of its batch norms."""

    static: PyTree
    state: PyTree
    key: Key[Array, ""] | None
    per_sample: bool = eqx.field(static=True)

    def __call__(self, params: Params, x: Batch, statistics: Statistics = None) -> Outputs:
        """Return the outputs at a batch, with the given statistics in place of its own."""
        model = eqx.combine(params, self.static)
        options = {} if self.key is None else {"key": self.key}
        if self.state is None:
            return jax.vmap(lambda u: model(u, **options))(x) if self.per_sample else model(x, **options)
        if statistics is None:
            return self._run(model, self.state, x)[0]
        state = _fresh(self.state)
        for layer, (mean, variance) in zip(_batch_norms(model), statistics, strict=True):
            if layer.mode == "ema":
                state = state.set(layer.ema_state_index, (mean, variance))
            else:
                state = state.set(layer.batch_state_index, (mean, variance))
                # a count of 0 switches equinox's correction of young averages off
                state = state.set(layer.batch_counter, jnp.zeros_like(state.get(layer.batch_counter)))
        return self._run(_in_mode(model, inference=True), state, x)[0]

    def _run(self, model: Callable[..., PyTree], state: PyTree, x: Batch) -> PyTree:
        options = {} if self.key is None else {"key": self.key}
        names = {layer.axis_name for layer in _batch_norms(model)}
        if len(names) > 1 or any(not isinstance(name, str) for name in names):
            raise ValueError(
                f"all batch norms must have one and the same axis_name, got {sorted(map(str, names))}"
            )
        name = next(iter(names), "batch")
        one = lambda u, s: model(u, s, **options)
        return jax.vmap(one, axis_name=name, in_axes=(0, None), out_axes=(0, None))(x, _fresh(state))

    def batch_statistics(self, params: Params, x: Batch) -> Statistics:
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
        found = []
        for layer in _batch_norms(model):
            if layer.mode == "ema":
                found.append(state.get(layer.ema_state_index))
            else:  # from zero: (1 - momentum) x batch
                scale = 1 / (1 - layer.momentum)
                found.append(tuple(scale * u for u in state.get(layer.batch_state_index)))
        return tuple(found)

    def running(self, params: Params) -> Statistics:
        """Return the running averages as inference uses them."""
        found = []
        for layer in _batch_norms(eqx.combine(params, self.static)):
            if layer.mode == "ema":
                found.append(self.state.get(layer.ema_state_index))
            else:
                count = self.state.get(layer.batch_counter)
                grown = jnp.where(count == 0, 1, 1 - layer.momentum**count)
                found.append(tuple(u / grown for u in self.state.get(layer.batch_state_index)))
        return tuple(found)


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


@_checks.arguments(
    model=_checks.function,
    state=_checks.optional(_checks.instance(eqx.nn.State)),
    per_sample=_checks.flag,
    key=_checks.optional(_checks.prng_key),
)
def from_equinox(
    model: Callable[..., PyTree],
    state: eqx.nn.State | None = None,
    *,
    per_sample: bool = True,
    key: Key[Array, ""] | None = None,
) -> tuple[Apply | Normalized, Params]:
    """Turn an equinox module, or any callable pytree, into (apply, params).

    Args:
        model: the module; its floating-point arrays are the parameters.
        state: the state of a module with ``eqx.nn.BatchNorm`` or other stateful layers, which is called as
            ``model(sample, state)`` then; it is held fixed. Batch norms in training make the function ``Normalized``;
            after ``eqx.nn.inference_mode`` it is a plain one.
        per_sample: whether the module maps one sample, as is the habit of equinox, and has to be vmapped over the
            batch. False: it maps a whole batch.
        key: passed to the module as ``key=``, the same for every sample, to hold random numbers (dropout) fixed.

    >>> apply, params = from_equinox(lambda sample: jnp.tanh(sample).sum())
    >>> apply(params, jnp.ones((5, 3))).shape
    (5,)
    """
    params, static = eqx.partition(model, eqx.is_inexact_array)
    function = EquinoxFunction(static=static, state=state, key=key, per_sample=per_sample)
    if state is None:
        return function, params
    if not per_sample:
        raise ValueError(
            "per_sample must be True for a module with a state, which equinox vmaps over the batch"
        )
    modes = {bool(layer.inference) for layer in _batch_norms(model)}
    if modes == {True, False}:
        raise ValueError("the batch norms of model must be all in training or all in inference, got both")
    if modes != {False}:
        return function, params
    return Normalized(function, function.batch_statistics, function.running(params)), params


class HaikuFunction(Adapter):
    """A function in the style of haiku as a function of (params, batch)."""

    function: Callable[..., PyTree]
    state: PyTree
    key: Key[Array, ""] | None

    def __call__(self, params: Params, x: Batch) -> Outputs:
        """Return the outputs at a batch."""
        if self.state is not None:
            return self.function(params, self.state, None, x)[0]
        if self.key is None:
            return self.function(params, None, x)
        return one_by_one(lambda batch: self.function(params, self.key, batch), x)


@_checks.arguments(
    apply=_checks.function,
    params=PARAMS,
    state=_checks.unchecked("any pytree that the module takes"),
    key=_checks.optional(_checks.prng_key),
)
def from_haiku(
    apply: Callable[..., PyTree],
    params: Params,
    *,
    state: PyTree = None,
    key: Key[Array, ""] | None = None,
) -> tuple[Apply, Params]:
    """Turn a function ``apply(params, rng, batch)``, as ``haiku.transform`` makes them, into (apply, params).

    Args:
        apply: (params, rng, batch) -> outputs; or with ``state`` (params, state, rng, batch) -> (outputs, state), as
            ``haiku.transform_with_state`` makes them. Take batch norm in inference (``is_training=False``).
        params: its parameters, returned as they are.
        state: its state, which is held fixed.
        key: the ``rng`` of every call, so that random numbers (dropout) are held fixed, the same for every sample; each
            sample is then evaluated on its own. Without it ``rng`` is None.

    >>> apply, params = from_haiku(lambda w, rng, x: x @ w, jnp.ones((3, 1)))
    >>> apply(params, jnp.ones((5, 3))).shape
    (5, 1)
    """
    if state is not None and key is not None:
        raise ValueError(
            "key cannot be given together with state: a state is held fixed in inference, without rng"
        )
    return HaikuFunction(function=apply, state=state, key=key), params
