"""What a solver returns: the solution of a run, its result code, and the state from which it goes on."""

from __future__ import annotations

import functools
import pathlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, NamedTuple, Self

import diffrax
import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, PyTree

from meanflow import _boundary
from meanflow._boundary import FilePath, checked, record, sequence
from meanflow.flows._flow import Flow
from meanflow.flows._problem import Weighted
from meanflow.measures._cloud import Cloud
from meanflow.measures._dataset import Dataset

if TYPE_CHECKING:  # slow to import
    import xarray


class RESULTS(diffrax.RESULTS):  # type: ignore[misc,valid-type]
    """Result codes: those of diffrax, and three of our own."""

    successful = ""
    non_finite = "The solution is not finite: the step is too large, or the flow blew up."
    event_overflow = "A step met more kinks than max_events allows. Use smaller steps or raise max_events."
    energy_rose = "The energy rose, which no flow does: use smaller steps, or step=KernelStep(0.25)."


# Codes by name. Files hold the name: the integer behind a code may change with the library that numbers it.
CODES = (
    "successful",
    "event_occurred",
    "max_steps_reached",
    "dt_min_reached",
    "non_finite",
    "event_overflow",
    "energy_rose",
    "max_steps_rejected",
    "internal_error",
    "nonlinear_max_steps_reached",
    "nonlinear_divergence",
    "nonfinite",
    "nonfinite_input",
    "singular",
    "breakdown",
    "stagnation",
    "conlim",
)


@functools.cache
def code_numbers() -> dict[str, int]:
    """Return the integer behind each result code that the installed libraries know, by name."""
    known = [name for name in CODES if hasattr(RESULTS, name)]
    return {name: int(np.asarray(getattr(RESULTS, name)._value)) for name in known}


FINE = ("successful", "event_occurred")  # the codes of runs that are ok


def outcomes(result: RESULTS) -> np.ndarray | None:
    """Return the names of result codes, an array of texts; None while they are traced.

    On the host: comparing codes on the device would take longer than a small run.
    """
    code = _boundary.concrete(result._value)  # the integer behind the enumeration
    if code is None:
        return None
    names = {number: name for name, number in code_numbers().items()}
    return np.vectorize(lambda number: names[int(number)], otypes=[object])(code)


class Settings(eqx.Module):
    """How a run was made: numbers are arrays, so that runs with different numbers stack; names are static.

    Attributes:
        numbers: end time, step, tolerances and the like, as arrays.
        names: pairs (setting, name) such as ("clock", "lazy").
    """

    numbers: dict[str, jax.Array | np.ndarray]
    names: tuple[tuple[str, str], ...] = eqx.field(static=True)

    def differences(self, other: "Settings") -> list[str]:
        """List the names that differ, and the numbers whose values are known and differ, as text."""
        found = [
            f"{name}: {old!r} before, {dict(other.names).get(name)!r} now"
            for name, old in self.names
            if dict(other.names).get(name) != old
        ]
        for name, value in self.numbers.items():
            old, new = _boundary.concrete(value), _boundary.concrete(other.numbers.get(name, value))
            if old is not None and new is not None and not np.array_equal(old, new):
                found.append(f"{name}: {old} before, {new} now")
        return found


class State(NamedTuple):
    """Everything the next step needs, and what a run must share with the one it continues.

    Attributes:
        t: time on the clock of the run.
        y: the integrated coordinates, those of the flow's chart.
        steps: number of steps taken so far.
        leaves: arrays of the stepper's own state (solver, controller or optimizer), flattened.
        settings: settings that a resumed run must share.
        data: fingerprint of the training data.
        start: the cloud from which the first run began; weights, labels and charts refer to it.
        offset: the cloud whose prediction a centered flow subtracts; None for other flows.
    """

    t: Float[Array, ""]
    y: PyTree[Array]
    steps: Int[Array, ""]
    leaves: tuple[Array, ...]
    settings: Settings
    data: Float[Array, " k"]
    start: Cloud
    offset: Cloud | None


@jax.jit
def fingerprint(data: Dataset) -> Float[Array, " k"]:
    """Return a few weighted sums of the data, by which a resumed run recognises them."""
    dtype = data.weights.dtype

    def mixed(u: jax.Array) -> jax.Array:
        # weights without symmetry, so that exchanged samples are noticed, and exchanged coordinates: the fractional
        # parts of the multiples of the golden ratio, by integers that wrap around
        places = jnp.arange(u.size, dtype=jnp.uint32) * jnp.uint32(2654435769)
        uneven = 1 + 2.0**-32 * places.astype(dtype)
        return jnp.sum(u.reshape(-1).astype(dtype) * uneven)

    # a population has a teacher, whose arrays follow those of every data set
    return jnp.stack([mixed(u) for u in jax.tree.leaves(data)])


def begin(flow: Flow, cloud: Cloud, state: State | None) -> tuple[Flow, Cloud]:
    """Return the flow of a run and the cloud from which it began.

    A resumed run began where the first one did: growth of the weights, labels, charts and offsets all count from there.
    ``cloud`` is then not used, and refused where it cannot belong to that run.
    """
    if state is None:
        return flow.begin(cloud), cloud
    old, new = ([np.shape(u) for u in jax.tree.leaves(c.particles)] for c in (state.start, cloud))
    if old != new:
        raise ValueError(f"state must come from a run of the same cloud; it holds {old}, the cloud {new}")
    for name in ("labels",) if isinstance(state.y, Weighted) else ("weights", "labels"):
        if not _agree(getattr(state.start, name), getattr(cloud, name)):
            raise ValueError(
                f"cloud must have the {name} of the run behind state, got others; start a new run without state instead"
            )
    if flow.centered != (state.offset is not None):
        was, now = ("centered" if c else "not centered" for c in (not flow.centered, flow.centered))
        raise ValueError(f"state must come from a run of the same flow; it was {was}, this one is {now}")
    if state.offset is None:
        return flow, state.start
    if flow.offset is not None and not _agree(state.offset, flow.offset.cloud):
        raise ValueError(
            "flow must subtract the prediction that the run behind state did, got flow.begin(another cloud)"
        )
    return flow.begin(state.offset), state.start


def _agree(one: PyTree[Array], other: PyTree[Array]) -> bool:
    """Say whether two pytrees have the same arrays, as far as their values are known while tracing."""
    pairs = [[_boundary.concrete(u) for u in jax.tree.leaves(tree)] for tree in (one, other)]
    if len(pairs[0]) != len(pairs[1]):
        return False
    known = [(u, v) for u, v in zip(*pairs, strict=True) if u is not None and v is not None]
    return all(np.array_equal(u, v) for u, v in known)


def check_resumed(state: State, settings: Settings, data: Dataset) -> None:
    """Raise ValueError if a run with these settings and data is not a continuation of the run behind ``state``."""
    found = state.settings.differences(settings)
    old, new = _boundary.concrete(state.data), _boundary.concrete(fingerprint(data))
    if old is not None and new is not None:
        # programs may sum in different orders, so equal data agree to rounding only
        close = np.sqrt(np.finfo(new.dtype).eps)
        if old.shape != new.shape or not np.allclose(old, new, rtol=close, atol=close):
            found.append("data: other data than before")
    if found:
        raise ValueError(
            "state must come from a run with the same settings and data; start a new run from Solution.final "
            f"instead. Differences: {'; '.join(found)}"
        )


class Solution(eqx.Module):
    """A finished run.

    Attributes:
        ts: (k,) save times on the clock of the run.
        energy: (k,) energies at those times.
        clouds: the cloud at each save time, stacked along a leading axis k; ``sol.clouds[i]`` is one of them and
            ``for cloud in sol.clouds`` goes through all. None if ``observe`` was given.
        observed: what ``observe`` returned, stacked along a leading axis k; None without it.
        final: the cloud at the end of the run.
        state: pass it to the same solver to go on.
        result: result code; ``sol.ok`` is True for success and for a steady-state stop.
        stats: counts such as ``num_steps``.
        settings: how the run was made.

    Entries of save times that were not reached (a failed or stopped run) are infinite.
    """

    ts: Float[Array, " k"]
    energy: Float[Array, " k"]
    clouds: Cloud | None
    observed: PyTree[Array]
    final: Cloud
    state: State
    result: RESULTS
    stats: dict[str, Array]
    settings: Settings

    @property
    def ok(self) -> Bool[Array, "*runs"]:
        """True where the run succeeded or stopped at a steady state; one value a run if several are stacked."""
        done = jnp.asarray(self.result == RESULTS.successful)
        return done | jnp.asarray(self.result == RESULTS.event_occurred)

    def to_xarray(self) -> "xarray.Dataset":
        """Return the run as a labelled data set over the axis ``time``.

        It holds the energy; what was observed, by name and with the axes that the observables name (an array inside a
        dict gets the joined names); and, where clouds were saved, the coordinates of the particles with their weights
        and labels, all over (time, particle). Settings, counts, versions and the message of the result are attributes,
        as text.

        Raises:
            ValueError: for several runs at once, or if two variables would get the same name.

        >>> import jax, jax.numpy as jnp, meanflow as mf
        >>> data = mf.Dataset(jnp.linspace(-1.0, 1.0, 3), jnp.array([1.0, -1.0, 1.0]))
        >>> flow = mf.canonical()
        >>> run = mf.descend(flow, flow.init(jax.random.key(0), 4), data, 2, step=0.1, every=1)
        >>> dict(run.to_xarray().theta.sizes)
        {'time': 3, 'particle': 4}
        """
        from meanflow.solvers._labelled import as_dataset

        return as_dataset(self)

    @checked
    def save(self, path: FilePath) -> pathlib.Path:
        """Write the solution to one .npz file (arrays, settings, versions; no pickles) and return its path.

        ``.npz`` is appended unless the name ends with it. ``observed`` must be an array or nested dicts (with texts or
        integers as keys), tuples, NamedTuples and lists of arrays; anything else is refused.
        """
        from meanflow.solvers._files import write_solution

        return write_solution(self, pathlib.Path(path))

    @classmethod
    @checked
    def load(
        cls, path: FilePath, *, records: Annotated[Sequence[type], sequence(record, least=0)] = ()
    ) -> Self:
        """Read a solution written by ``save``; it can be resumed through ``state``.

        Args:
            path: the file; ``.npz`` may be left out.
            records: NamedTuples of your own that the file holds, such as the particles of your model. A file names
                its records, but only these and the particles of the package are looked up: reading runs no code that
                the file chooses.

        Raises:
            ValueError: if there is no such file, it is damaged, or it holds a record that was not given.
        """
        from meanflow.solvers._files import read_solution

        return read_solution(cls, pathlib.Path(path), records)


class FailedRun(RuntimeError):
    """A run that failed, raised outside of tracing. ``solution`` holds what was computed.

    Attributes:
        solution: the ``Solution``, with its result code.
    """

    def __init__(self, message: str, solution: Solution) -> None:
        super().__init__(message)
        self.solution = solution


def raise_on_failure(solution: Solution) -> None:
    """Raise ``FailedRun`` with the code's message unless every run is ok; does nothing while tracing."""
    code = _boundary.concrete(solution.result._value)
    if code is None or np.all(code == code_numbers()["successful"]):
        return
    ok = np.isin(outcomes(solution.result).astype(str), FINE)  # type: ignore[union-attr]
    if np.all(ok):
        return
    if ok.ndim:
        message = f"{int(np.sum(~ok))} of {ok.size} runs failed; see Solution.result"
    else:
        steps = int(np.asarray(solution.state.steps))
        time = float(np.asarray(solution.state.t))
        message = f"the run failed at t = {time:g} after {steps} steps: {RESULTS[solution.result]}"  # type: ignore[misc]
    raise FailedRun(f"{message} (throw=False returns the Solution instead)", solution)
