"""Run entries of the catalogue, each on its own, with results on disk as soon as they exist.

A folder holds ``results/NAME.json`` and ``data/NAME.npz`` for each experiment, ``figures/NAME.png``, and
``summary.json``, ``gallery.md`` and ``gallery.html`` about all of them. A second run skips what is there. Experiments
run in worker processes, so that one which fails, hangs, or takes its process down, costs only itself.
"""

import contextlib
import json
import math
import multiprocessing
import os
import signal
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import UTC, datetime
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import TypedDict, Unpack, cast

import jax
import numpy as np
import xarray

from meanflow.files import atomic_write, versions, write_arrays
from meanflow.training.data import find
from meanflow_papers.catalogue import CATALOGUE
from meanflow_papers.drawing import figure_of
from meanflow_papers.entry import PAPERS, Arguments, Entry
from meanflow_papers.gallery import write_gallery
from meanflow_papers.outcome import Arrays, Outcome
from meanflow_papers.record import Check, Record, Summary
from meanflow_papers.style import save

VERSION = 2  # of the layout of the records
GOOD = ("passed", "explained", "needs data", "out of scope")
FINISHED = ("passed", "explained", "failed", "out of scope")
PATIENCE = 20  # an experiment is ended after so many times its expected processor time, at least ten minutes
LOOK = 10.0  # seconds between two looks at a worker
IDLE = 0.001  # share of the time below which a worker does not compute: it hangs, or waits for ever


class Options(TypedDict, total=False):
    """How an entry is run: arguments of ``run_entry``."""

    full: bool
    formats: Sequence[str]
    data: str | None


def stem(name: str) -> str:
    """Return the file name of an entry, without its ending."""
    return name.replace("/", "_")


def run_entry(
    entry: Entry,
    folder: str | Path,
    *,
    full: bool = False,
    formats: Sequence[str] = ("png",),
    data: str | None = None,
) -> Record:
    """Run and draw one entry and write its files; a fault of the experiment is recorded, never raised.

    Args:
        entry: an entry of the catalogue.
        folder: where results, arrays and figures go.
        full: run the size of the paper instead of the small one.
        formats: file formats of the figures: png, svg, pdf.
        data: folder with local data sets, for entries that need one; default where ``meanflow data`` puts them.

    Returns:
        The record, JSON-ready.
    """
    folder = Path(folder)
    record = _blank(entry, full)
    clock, cpu = time.perf_counter(), time.process_time()
    files = _data_files(entry, data) if entry.status == "needs data" else None
    if entry.status == "out of scope" or (entry.status == "needs data" and files is None):
        record["status"], record["reason"] = entry.status, entry.reason
        return _keep(folder, record)
    try:
        arguments = entry.arguments(full)
        if entry.status == "needs data":
            arguments["folder"] = str(files)
        record["arguments"] = {name: _plain(value) for name, value in arguments.items()}
        record["seed"] = record["arguments"].get("seed", record["seed"])
        outcome = _compute(entry, arguments)
        record["finding"] = outcome.finding
        record["criteria"] = _boundary(entry, outcome, full)
        record["status"] = _status(record["criteria"])
        record["seconds"] = round(time.perf_counter() - clock, 2)
        record["cpu_seconds"] = round(time.process_time() - cpu, 2)
        paths = save(figure_of(entry, outcome), folder / "figures" / stem(entry.name), formats)
        record["figures"] = [str(path.relative_to(folder)) for path in paths]
        _save_arrays(folder / "data" / f"{stem(entry.name)}.npz", outcome.data)
    except Exception as problem:
        # whatever goes wrong in one experiment, the others go on
        if isinstance(problem, FileNotFoundError) and entry.status == "needs data":
            record["status"], record["reason"] = "needs data", str(problem)
        else:
            record["status"], record["error"] = "error", traceback.format_exc()
            record["seconds"] = round(time.perf_counter() - clock, 2)
            record["cpu_seconds"] = round(time.process_time() - cpu, 2)
    return _keep(folder, record)


def _data_files(entry: Entry, given: str | None) -> Path | None:
    """Return the folder with the data set of an entry: the given one, or where ``meanflow data`` has put it."""
    if given is not None:
        below = Path(given) / entry.data
        return below if below.is_dir() else Path(given)
    return find(entry.data)


def _compute(entry: Entry, arguments: Arguments) -> Outcome:
    """Run the experiment and what its picture needs; the arrays are computed when this returns."""
    assert entry.compute is not None  # entries that are out of scope never come here
    outcome = entry.compute(**arguments)
    if entry.picture is not None:
        outcome = replace(outcome, data={**outcome.data, **entry.picture(outcome, arguments)})
    return jax.block_until_ready(outcome)


def _status(checks: Sequence[Check]) -> str:
    """Return "failed" if a criterion fails without a known reason, "explained" if one fails with it, else "passed"."""
    failures = [check for check in checks if not check["passed"]]
    if not failures:
        return "passed"
    return "explained" if all(check["explanation"] for check in failures) else "failed"


def _blank(entry: Entry, full: bool) -> Record:
    """Return the record of a run that has not come to an end."""
    return {
        "version": VERSION,
        "name": entry.name,
        "paper": entry.paper,
        "title": entry.title,
        "setup": entry.setup,
        "verdict": entry.verdict,
        "size": "full" if full else "small",
        "status": "error",
        "reason": "",
        "claim": entry.claim,
        "finding": "",
        "criteria": [],
        "arguments": {},
        "seed": "fixed in the function",
        "seconds": 0.0,
        "cpu_seconds": 0.0,
        "figures": [],
        "error": "",
        "versions": versions(),
        "finished": "",
    }


def _boundary(entry: Entry, outcome: Outcome, full: bool) -> list[Check]:
    """Return the criteria as JSON, with the known reasons of those that fail."""
    # strict JSON has no NaN and no infinity
    finite = lambda number: float(number) if math.isfinite(number) else None
    return [
        {
            "name": c.name,
            "value": finite(c.value),
            "low": finite(c.low),
            "high": finite(c.high),
            "passed": c.passed,
            "explanation": "" if c.passed else entry.explanation(c.name, full),
        }
        for c in outcome.criteria
    ]


def _plain(value: object) -> object:
    """Return an argument as JSON: sequences as lists, infinities as text, what JSON does not know by its text."""
    if isinstance(value, dict):
        return {str(k): _plain(v) for k, v in value.items()}
    if isinstance(value, list | tuple | set):
        return [_plain(v) for v in value]
    if isinstance(value, float | np.floating):
        return float(value) if math.isfinite(value) else str(value)
    return value if isinstance(value, str | bool | int | None) else str(value)


def _save_arrays(path: Path, data: Arrays) -> None:
    """Write the numbers behind a figure as one npz file, under plain names: data["runs"]["f"] is ``runs/f``."""
    kinds = (bool, int, float, np.generic, np.ndarray, jax.Array)
    plain = {name: _variables(value) for name, value in data.items()}
    leaves = jax.tree_util.tree_leaves_with_path(plain)
    arrays = {
        jax.tree_util.keystr(place, simple=True, separator="/"): np.asarray(leaf)
        for place, leaf in leaves
        if isinstance(leaf, kinds)
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    write_arrays(path, arrays, {}, VERSION)


def _variables(value: object) -> object:
    """Return the axes and variables of a sweep as a dictionary of arrays, and anything else as it is."""
    if not isinstance(value, xarray.Dataset):
        return value
    return {str(name): column.values for name, column in {**value.coords, **value.data_vars}.items()}


def _keep(folder: Path, record: Record) -> Record:
    """Write the record with the time of its end and return it."""
    record["finished"] = datetime.now(UTC).isoformat(timespec="seconds")
    _write(folder / "results" / f"{stem(record['name'])}.json", record)
    return record


def _write(path: Path, content: Mapping[str, object]) -> None:
    """Write JSON so that a reader finds the old or the new file, never half of one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with atomic_write(path) as part:
        part.write_text(json.dumps(content, indent=1, allow_nan=False))


def _read(path: Path) -> Record | None:
    """Return a record of this layout, or None for a file that is not there, damaged, or of another version."""
    try:
        record = json.loads(path.read_text())
    except (OSError, ValueError):
        return None
    whole = isinstance(record, dict) and record.keys() == Record.__annotations__.keys()
    return cast(Record, record) if whole and record["version"] == VERSION else None


def finished(entry: Entry, folder: str | Path, full: bool, formats: Sequence[str] = ()) -> Record | None:
    """Return the record of an earlier run of the same size and arguments, if it came to an end."""
    record = _read(Path(folder) / "results" / f"{stem(entry.name)}.json")
    if record is None or record["size"] != ("full" if full else "small") or record["status"] not in FINISHED:
        return None
    if entry.compute is None:
        return record
    # the folder of local data is no part of what was computed
    wanted = {name: _plain(value) for name, value in entry.arguments(full).items() if name != "folder"}
    if any(record["arguments"].get(name) != value for name, value in wanted.items()):
        return None
    drawn = {Path(figure).suffix[1:] for figure in record["figures"]}
    return record if drawn >= set(formats) else None


def _processor_seconds(pid: int | None) -> float | None:
    """Return the processor time that a process has used, or None where the system has no file that tells it."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")  # user and system time


def _answers(pipe: Connection, process: BaseProcess, seconds: float) -> bool:
    """Wait for an answer of a worker until it has computed for so many seconds; False if none has come.

    Processor time counts, so that an experiment on a busy machine is not ended for the work of others. While a worker
    does not compute at all, or where its processor time is not known, the time that passes counts instead.
    """
    spent, before = 0.0, _processor_seconds(process.pid)
    while spent < seconds:
        began = time.monotonic()
        if pipe.poll(LOOK):
            return True
        passed, now = time.monotonic() - began, _processor_seconds(process.pid)
        used = None if now is None or before is None else now - before
        spent += passed if used is None or used < IDLE * passed else used
        before = now
    return False


class Worker:
    """One process that runs entries; a new one is started when it has died."""

    def __init__(self) -> None:
        self.process: BaseProcess | None = None
        self.pipe: Connection | None = None
        self.stopped = False

    def run(self, entry: Entry, folder: Path, **options: Unpack[Options]) -> Record:
        """Return the record of one entry, also when its process dies or never answers."""
        full = options.get("full", False)
        process, pipe = self._running()
        try:
            pipe.send((entry, str(folder), options))
            if _answers(pipe, process, 60 * max(10.0, PATIENCE * entry.minutes[full])):
                return pipe.recv()
            process.kill()
            error = f"no answer in {PATIENCE} times the expected time; its process was ended"
        except (EOFError, OSError):
            error = ""
        process.join()
        if self.stopped:  # by an interrupt, which says nothing about the entry
            raise KeyboardInterrupt
        record = _blank(entry, full)
        record["error"] = error or f"the process died with exit code {process.exitcode}"
        return _keep(folder, record)

    def _running(self) -> tuple[BaseProcess, Connection]:
        """Return the process and the pipe to it, started if need be."""
        if self.process is None or self.pipe is None or not self.process.is_alive():
            return self.start()
        return self.process, self.pipe

    def start(self) -> tuple[BaseProcess, Connection]:
        """Start a new process; ``run`` does it by itself."""
        context = multiprocessing.get_context("spawn")  # jax must not be forked
        pipe, far = context.Pipe()
        process = context.Process(target=_serve, args=(far,), daemon=True)
        process.start()
        far.close()
        self.process, self.pipe = process, pipe
        return process, pipe

    def stop(self) -> None:
        """End the process."""
        self.stopped = True
        if self.process is not None and self.pipe is not None:
            with contextlib.suppress(OSError):
                self.pipe.send(None)
            self.process.join(5)
            if self.process.is_alive():
                self.process.terminate()


def _serve(pipe: Connection) -> None:
    """Run what comes through the pipe until None comes; the main function of a worker process."""
    # Ctrl-C reaches the whole group of processes; the one that started this one ends it in good order
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # read when the first program is compiled: workers share the cores
    os.environ["XLA_FLAGS"] = f"--xla_cpu_multi_thread_eigen=false {os.environ.get('XLA_FLAGS', '')}"
    jax.config.update("jax_enable_x64", True)
    while (job := pipe.recv()) is not None:
        entry, folder, options = job
        pipe.send(run_entry(entry, folder, **options))
        jax.clear_caches()  # programs of one experiment are of no use to the next


def reproduce(
    entries: Iterable[Entry],
    folder: str | Path,
    *,
    full: bool = False,
    force: bool = False,
    formats: Sequence[str] = ("png",),
    data: str | None = None,
    jobs: int = 1,
    tell: Callable[[str], None] = lambda line: None,
) -> Summary:
    """Run entries one by one and write summary and gallery.

    Args:
        entries: entries of the catalogue.
        folder: results of earlier runs in it are kept and skipped.
        full: run the size of the papers.
        force: run again what is finished.
        formats: file formats of the figures; png is always written.
        data: folder with local data sets.
        jobs: number of worker processes; 0 runs in this process.
        tell: called with one line when an entry has ended.

    Returns:
        The summary, as in ``summary.json``.
    """
    folder, entries = Path(folder), list(entries)
    options: Options = {"full": full, "formats": tuple(dict.fromkeys(("png", *formats))), "data": data}
    started, done, lock = time.perf_counter(), 0, threading.Lock()
    todo = []
    for entry in entries:
        old = None if force else finished(entry, folder, full, options["formats"])
        if old is None:
            todo.append(entry)
        else:
            done += 1
            tell(_line(old, done, len(entries), again=True))
    todo.sort(key=lambda e: -e.minutes[full] if e.status == "runnable" else -math.inf)  # longest first

    def note(record: Record) -> None:
        nonlocal done
        with lock:
            done += 1
            tell(_line(record, done, len(entries)))
            _write(folder / "summary.json", summarize(folder, full))

    try:
        if jobs == 0:
            for entry in todo:
                note(run_entry(entry, folder, **options))
        elif todo:
            _share(jobs, todo, lambda worker, entry: note(worker.run(entry, folder, **options)))
    finally:
        summary = summarize(folder, full)
        summary["wall_seconds"] = round(time.perf_counter() - started, 1)
        _write(folder / "summary.json", summary)
        write_gallery(summary, folder)
    return summary


def _share(jobs: int, todo: list[Entry], one: Callable[[Worker, Entry], None]) -> None:
    """Call ``one`` for each entry in ``jobs`` threads with a worker each; an interrupt drops what has not begun."""
    idle = [Worker() for _ in range(jobs)]
    workers = list(idle)

    def run(entry: Entry) -> None:
        worker = idle.pop()  # there are as many threads as workers
        try:
            one(worker, entry)
        finally:
            idle.append(worker)

    pool = ThreadPoolExecutor(jobs)
    try:
        for future in [pool.submit(run, entry) for entry in todo]:
            future.result()
    finally:
        pool.shutdown(wait=False, cancel_futures=True)
        for worker in workers:
            worker.stop()


def summarize(folder: str | Path, full: bool) -> Summary:
    """Return what ``summary.json`` holds: every record of this size in the folder, in the order of the catalogue."""
    size = "full" if full else "small"
    found = map(_read, sorted((Path(folder) / "results").glob("[!.]*.json")))  # hidden files are unfinished
    records = [record for record in found if record is not None and record["size"] == size]
    place = {name: k for k, name in enumerate(CATALOGUE)}
    records.sort(key=lambda r: (place.get(r["name"], len(place)), r["name"]))
    counts: dict[str, int] = {}
    for record in records:
        counts[record["status"]] = counts.get(record["status"], 0) + 1
    return {
        "version": VERSION,
        "size": size,
        "papers": PAPERS,
        "counts": counts,
        "cpu_seconds": round(sum(r["cpu_seconds"] for r in records), 1),
        "wall_seconds": 0.0,
        "unexplained": [r["name"] for r in records if r["status"] not in GOOD],
        "experiments": records,
    }


def _line(record: Record, done: int, count: int, again: bool = False) -> str:
    """Return the line that tells the user about one entry."""
    checks = record["criteria"]
    score = f"{sum(c['passed'] for c in checks)}/{len(checks)}" if checks else ""
    seconds = "kept" if again else f"{record['seconds']:.1f} s" if record["seconds"] else ""
    line = f"[{done:>3}/{count}] {record['name']:<30} {record['status']:<12} {score:>6} {seconds:>9}"
    if record["status"] == "error":
        line += f"  {record['error'].strip().splitlines()[-1]}"
    if record["status"] == "failed":
        bad = [c["name"] for c in checks if not c["passed"] and not c["explanation"]]
        line += f"  {'; '.join(bad)}"
    return line
