"""Avoid recompiling: two functions with the same code and captured values share one compiled program.

JAX finds a compiled program by the functions that were compiled in. A lambda or ``optax.adam(0.1)`` made anew is
another object, although it computes the same, and would be compiled again. ``canonical`` returns the first one of the
same value. It never guesses: what it cannot look into counts as equal to itself only.

Programs, and what they are found by, are kept in caches of bounded size (``kept``): a process that makes new functions
for ever does not grow for ever. ``clear_caches`` empties them all.
"""

import functools
import inspect
import os
import pathlib
import platform
import sys
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Annotated, Any, ParamSpec, TypeVar

import jax
import numpy as np

from meanflow._boundary import FilePath, checked, number
from meanflow._identity import ARRAYS, Unknown, digest, is_comparable, value_key
from meanflow._properties import concrete

Arguments = ParamSpec("Arguments")
Value = TypeVar("Value")
# Programs that each function of the library keeps. One of `descend` or of a tangent kernel takes 4 MB, one of `solve`
# 12 MB: a process that makes new closures for ever grows by 300 MB and no more.
KEPT = 12
PATIENCE = 2.0  # seconds of compiling after which a terminal or notebook says what it waits for
QUICK = 0.05  # seconds: a program that is compiled in less is not worth a file
# numbers that numpy works on in about the time that starting a compiled program takes, ten microseconds
FEW = 2**14
_ARRAY = object()  # stands for an array among what decides a program
_CLEARING: list[Callable[[], None]] = []  # empties one cache each


def inlined(function: Callable[Arguments, Value]) -> Callable[Arguments, Value]:
    """Return the function behind ``equinox.filter_jit``, for calls inside of compiled programs.

    What a jitted function has traced is kept as long as that function is: that of ``diffrax.diffeqsolve``, with the
    closures of all runs, for ever.
    """
    return inspect.unwrap(function)


def clear_caches() -> None:
    """Forget the compiled programs of this library and everything by which they are found again.

    Each function of the library keeps the programs that were used last, of which one takes a few megabytes. Nothing
    is wrong after a call of this function: what is needed again is compiled again. ``jax.clear_caches`` forgets the
    programs of JAX's own functions and of yours.

    >>> import meanflow as mf
    >>> mf.clear_caches()
    """
    for clear in _CLEARING:
        clear()


@checked
def keep_programs(
    folder: FilePath | None = None, *, megabytes: Annotated[float, number(above=0)] = 2000.0
) -> pathlib.Path:
    """Keep compiled programs in a folder, where other processes find them; call it once, at the start.

    This sets options of JAX, so that it holds for all its programs. The folder has one part for each kind of processor,
    since programs of another kind may not run. The oldest programs are deleted when a process starts with more of them
    than fit. The log of JAX's C++ code is silenced, which otherwise has a line for each program that is read; set
    ``jax_logging_level`` to keep it.

    Args:
        folder: where; default ``meanflow`` in the user's cache, ``$XDG_CACHE_HOME`` or ``~/.cache``.
        megabytes: the size that is not exceeded at the start of a process.

    Returns:
        The part of the folder for this processor.

    >>> import meanflow as mf
    >>> mf.keep_programs()  # doctest: +SKIP
    PosixPath('/home/you/.cache/meanflow/programs-5f2d9c0b7e61a384')
    """
    if folder is None:
        folder = pathlib.Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "meanflow"
    place = pathlib.Path(folder) / f"programs-{digest(_processor().encode())}"
    place.mkdir(parents=True, exist_ok=True)
    # another process may delete at the same time
    found = [(path.stat(), path) for path in place.iterdir() if path.exists()]
    room = 1e6 * megabytes
    for status, path in sorted(found, key=lambda item: -item[0].st_mtime):
        room -= status.st_size
        if room < 0:
            path.unlink(missing_ok=True)
    jax.config.update("jax_compilation_cache_dir", str(place))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", QUICK)
    # a level that the user has chosen stands; without one the C++ code keeps the first of these two
    chosen = getattr(jax.config, "jax_logging_level", None)
    jax.config.update("jax_logging_level", "CRITICAL")
    jax.config.update("jax_logging_level", chosen)
    return place


def _processor() -> str:
    """Return a text that differs for processors that do not run each other's programs."""
    try:
        lines = pathlib.Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    features = [line for line in lines if line.lower().startswith(("flags", "features"))]
    return features[0] if features else f"{platform.machine()} {platform.processor()}"


def kept(limit: int = 2 * KEPT) -> Callable[[Callable[..., Value]], Callable[..., Value]]:
    """Keep the results of a function for the last ``limit`` arguments; for those without a hash, none are kept.

    >>> calls = []
    >>> double = kept(2)(lambda u: calls.append(u) or 2 * u)
    >>> double(1), double(1), double([1]), calls
    (2, 2, [1, 1], [1, [1]])
    """

    def decorate(function: Callable[..., Value]) -> Callable[..., Value]:
        cached = functools.lru_cache(limit, typed=True)(function)  # typed: 1 and 1.0 make different programs
        _CLEARING.append(cached.cache_clear)

        @functools.wraps(function)
        def call(*args: Hashable) -> Value:
            try:
                return cached(*args)
            except TypeError:
                try:
                    hash(args)
                except TypeError:
                    return function(*args)
                raise

        return call

    return decorate


class _Call:
    """Arguments that are equal if their key is; they themselves are dropped once they have been used."""

    def __init__(self, key: Hashable, arguments: tuple[tuple[Any, ...], dict[str, Any]]) -> None:
        self.key, self.arguments = key, [arguments]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Call) and self.key == other.key

    def __hash__(self) -> int:
        return hash(self.key)


def kept_by_shape(function: Callable[Arguments, Value]) -> Callable[Arguments, Value]:
    """Keep what a function says of pytrees whose arrays matter to it by shape and dtype alone; for slow questions.

    >>> import numpy as np
    >>> calls = []
    >>> size = kept_by_shape(lambda tree: calls.append("called") or tree["a"].size)
    >>> size({"a": np.ones(2)}), size({"a": np.zeros(2)}), size({"a": np.ones(3)}), len(calls)
    (2, 2, 3, 2)
    """

    @kept()
    def ask(call: _Call) -> Value:
        args, kwargs = call.arguments.pop()
        return function(*args, **kwargs)

    @functools.wraps(function)
    def call(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Value:
        leaves, structure = jax.tree.flatten((args, kwargs))
        described = [(u.shape, u.dtype) if isinstance(u, ARRAYS) else (type(u), u) for u in leaves]
        return ask(_Call((structure, *described), (args, kwargs)))

    return call


def compiled_if_large(function: Callable[..., Value]) -> Callable[..., Value]:
    """Compile a function of (numpy module, arrays...) for arrays that are large or traced; run it by numpy else.

    The work of a small check takes microseconds, its compilation a tenth of a second, and a first call waits for it.

    >>> import jax.numpy as jnp, numpy as np
    >>> total = compiled_if_large(lambda xp, u: xp.sum(u))
    >>> isinstance(total(jnp.ones(2)), jax.Array), isinstance(total(jnp.ones(2 * FEW)), jax.Array)
    (False, True)
    """
    large = jax.jit(functools.partial(function, jax.numpy))

    @functools.wraps(function)
    def call(*arrays: jax.Array) -> Value:
        known = [concrete(u) for u in arrays] if sum(u.size for u in arrays) <= FEW else [None]
        return large(*arrays) if any(u is None for u in known) else function(np, *known)

    return call


def canonical(value: Value) -> Value:
    """Return the first value that was given so far and is equal to ``value``, if possible; else ``value`` itself.

    Functions are equal if their code, defaults, closed-over values and the globals that they name are.

    >>> scaled = lambda c: lambda z: c * z
    >>> canonical(scaled(2.0)) is canonical(scaled(2.0)), canonical(scaled(2.0)) is canonical(scaled(3.0))
    (True, False)
    """
    try:
        key = value_key(value)
        if not is_comparable(key):
            return value
        found = _KNOWN.get(key)
        if found is None and any(value is one for one in _KNOWN.values()):
            return value  # its meaning has changed since it was compiled: equals of its present meaning must not get it
        if found is None or (
            found is not value and value_key(found) != key
        ):  # what that one names or holds has changed
            found = _KNOWN[key] = value
    except (Unknown, TypeError):  # traced, or without a hash
        return value
    _KNOWN.move_to_end(key)
    if len(_KNOWN) > 4 * KEPT:
        _KNOWN.popitem(last=False)
    return found


_KNOWN: OrderedDict[Any, Any] = OrderedDict()  # what ``canonical`` has returned, by key
_CLEARING.append(_KNOWN.clear)


def compiled(
    function: Callable[Arguments, Value], *, compiler_options: dict[str, Any] | None = None
) -> Callable[Arguments, Value]:
    """Compile a function of pytrees that returns arrays; what is no array in its arguments decides the program.

    This is ``equinox.filter_jit`` without donation and results that are no arrays, for programs that are called often:
    a call takes two thirds of the time. The last few programs are kept, each for all shapes that it was called with; a
    closure that is no longer in use vanishes with its program.

    Args:
        function: what is compiled.
        compiler_options: passed on to ``jax.jit`` where no other program is being traced, in which JAX takes none.

    >>> power = compiled(lambda u, name: u**2 if name == "square" else u)
    >>> float(power(jax.numpy.asarray(3.0), "square"))
    9.0
    """

    plain = compiled(function) if compiler_options else None

    # a function of its own for each program: those that JAX has are let go when its function is
    @kept(KEPT)
    def program(structure: jax.tree_util.PyTreeDef, *others: Hashable) -> Callable[[list[Any]], Value]:
        def run(arrays: list[Any]) -> Value:
            _wait()
            rest = iter(arrays)
            leaves = [next(rest) if other is _ARRAY else other for other in others]
            args, kwargs = jax.tree.unflatten(structure, leaves)
            return function(*args, **kwargs)

        run.__name__ = getattr(function, "__name__", "run")  # the name that profiles show
        return jax.jit(run, compiler_options=compiler_options)

    @functools.wraps(function)
    def call(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Value:
        leaves, structure = jax.tree.flatten((args, kwargs))
        arrays, others = [], []
        for leaf in leaves:
            known = isinstance(leaf, ARRAYS)
            others.append(_ARRAY if known else leaf)
            if known:
                arrays.append(leaf)
        outermost = not _WAITING
        try:
            return program(structure, *others)(arrays)
        except ValueError as problem:
            if plain is None or "top-level" not in str(problem):
                raise
            return plain(*args, **kwargs)
        finally:
            if outermost and _WAITING:
                _WAITING.pop().end()

    return call


class _Notice:
    """Says that a program is being compiled if that takes more than two seconds, and in the end how long it took."""

    def __init__(self) -> None:
        self.start, self.said = time.monotonic(), False
        self.timer = threading.Timer(PATIENCE, self.say)
        self.timer.daemon = True
        self.timer.start()

    def say(self) -> None:
        self.said = True
        sys.stderr.write("meanflow: compiling, ")
        sys.stderr.flush()

    def end(self) -> None:
        self.timer.cancel()
        if self.said:
            seconds = time.monotonic() - self.start
            sys.stderr.write(f"{seconds:.0f} s (mf.keep_programs() spares it the next time)\n")


_WAITING: list[_Notice] = []  # the one of the outermost call that is being traced or compiled


def _wait() -> None:
    """Start a notice where somebody sees it: on a terminal or in a notebook, unless MEANFLOW_QUIET is set."""
    stream = sys.stderr
    seen = stream is not None and (stream.isatty() or type(stream).__module__.startswith("ipykernel"))
    if seen and not _WAITING and not os.environ.get("MEANFLOW_QUIET"):
        _WAITING.append(_Notice())
