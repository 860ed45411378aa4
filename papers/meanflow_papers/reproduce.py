"""Runs the catalogue: each figure, table and theorem on its own, with results on disk as soon as they exist.

A folder holds ``results/NAME.json`` and ``data/NAME.npz`` for each experiment, ``figures/NAME.png``, and
``summary.json``, ``gallery.md`` and ``gallery.html`` about all of them. A second run skips what is there. Experiments
run in worker processes, so that one which fails, hangs, or takes its process down, costs only itself.
"""

import contextlib
import json
import math
import multiprocessing
import os
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np

from meanflow_papers.catalogue import CATALOGUE
from meanflow_papers.drawing import figure_of
from meanflow_papers.entry import PAPERS, Arguments, Entry
from meanflow_papers.gallery import write_gallery
from meanflow_papers.outcome import Outcome

VERSION = 2  # of the layout of the records
GOOD = ("passed", "explained", "needs data", "out of scope")
FINISHED = ("passed", "explained", "failed", "out of scope")
PATIENCE = 20  # an experiment is ended after so many times its expected minutes, at least ten minutes


def stem(name: str) -> str:
    """File name of an entry, without its ending."""
    return name.replace("/", "_")


def run_entry(
    entry: Entry,
    folder: str | Path,
    *,
    full: bool = False,
    formats: Sequence[str] = ("png",),
    data: str | None = None,
) -> dict[str, Any]:
    """Runs and draws one entry and writes its files; never raises for a fault of the experiment.

    Args:
        entry: of the catalogue.
        folder: where results, arrays and figures go.
        full: paper size instead of the small one.
        formats: of the figures: png, svg, pdf.
        data: folder with local data sets, for entries that need one.

    Returns:
        The record, JSON-ready.
    """
    folder = Path(folder)
    record = _blank(entry, full)
    clock, cpu = time.perf_counter(), time.process_time()
    if entry.status == "out of scope" or (entry.status == "needs data" and data is None):
        return _keep(folder, record | {"status": entry.status, "reason": entry.reason})
    try:
        arguments = entry.arguments(full)
        if entry.status == "needs data":
            arguments["folder"] = data
        record["arguments"] = _plain(arguments)
        record["seed"] = record["arguments"].get("seed", record["seed"])
        outcome = _compute(entry, arguments)
        record |= {
            "claim": outcome.claim,
            "finding": outcome.finding,
            "criteria": _criteria(entry, outcome, full),
        }
        marks = {c["passed"] or ("explained" if c["explanation"] else False) for c in record["criteria"]}
        record["status"] = "failed" if False in marks else "explained" if "explained" in marks else "passed"
        record["seconds"] = round(time.perf_counter() - clock, 2)
        record["cpu_seconds"] = round(time.process_time() - cpu, 2)
        record["figures"] = _draw(entry, outcome, folder, formats)
        _arrays(folder / "data" / f"{stem(entry.name)}.npz", outcome.data)
    except FileNotFoundError as missing:
        if entry.status != "needs data":
            return _keep(folder, record | _fault(clock, cpu))
        record |= {"status": "needs data", "reason": str(missing)}
    except Exception:
        record |= _fault(clock, cpu)
    return _keep(folder, record)


def _compute(entry: Entry, arguments: Arguments) -> Outcome:
    """Run the experiment and what its picture needs; the arrays are computed when this returns."""
    import jax

    assert entry.compute is not None  # entries that are out of scope never come here
    outcome = entry.compute(**arguments)
    if entry.picture is not None:
        outcome = replace(outcome, data={**outcome.data, **entry.picture(outcome, arguments)})
    return jax.block_until_ready(outcome)


def _draw(entry: Entry, outcome: Outcome, folder: Path, formats: Sequence[str]) -> list[str]:
    """Draw the outcome and return the paths of the written files, relative to the folder."""
    from meanflow.plots import save

    paths = save(figure_of(entry, outcome), folder / "figures" / stem(entry.name), formats)
    return [str(path.relative_to(folder)) for path in paths]


def _fault(clock: float, cpu: float) -> dict[str, Any]:
    return {
        "status": "error",
        "error": traceback.format_exc(),
        "seconds": round(time.perf_counter() - clock, 2),
        "cpu_seconds": round(time.process_time() - cpu, 2),
    }


def _blank(entry: Entry, full: bool) -> dict[str, Any]:
    from meanflow.sweeps.plan import all_versions

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
        "claim": "",
        "finding": "",
        "criteria": [],
        "arguments": {},
        "seed": "fixed in the function",
        "seconds": 0.0,
        "cpu_seconds": 0.0,
        "figures": [],
        "error": "",
        "versions": all_versions(),
        "finished": "",
    }


def _criteria(entry: Entry, outcome: Outcome, full: bool) -> list[dict[str, Any]]:
    return [
        {
            "name": c.name,
            "value": _number(c.value),
            "low": _number(c.low),
            "high": _number(c.high),
            "passed": c.passed,
            "explanation": "" if c.passed else entry.explanation(c.name, full),
        }
        for c in outcome.criteria
    ]


def _number(value: Any) -> float | None:
    """A finite number, or None: strict JSON has neither NaN nor infinities."""
    number = float(value)
    return number if math.isfinite(number) else None


def _plain(value: Any) -> Any:
    """Arguments as JSON: sequences as lists, infinities as text, the rest by its name."""
    if isinstance(value, dict):
        return {str(k): _plain(v) for k, v in value.items()}
    if isinstance(value, list | tuple | set):
        return [_plain(v) for v in value]
    if isinstance(value, float | np.floating):
        return float(value) if math.isfinite(value) else str(value)
    return value if isinstance(value, str | bool | int | None) else str(value)


def _arrays(path: Path, data: Any) -> None:
    """The numbers behind a figure as one npz file, keyed by their place in the outcome's data."""
    import jax

    leaves = jax.tree_util.tree_leaves_with_path(data)
    found = {jax.tree_util.keystr(place): leaf for place, leaf in leaves}
    path.parent.mkdir(parents=True, exist_ok=True)
    kinds = (bool, int, float, np.generic, np.ndarray, jax.Array)
    arrays: Any = {k: np.asarray(v) for k, v in found.items() if isinstance(v, kinds)}
    np.savez_compressed(path, **arrays)


def _keep(folder: Path, record: dict[str, Any]) -> dict[str, Any]:
    record["finished"] = datetime.now(UTC).isoformat(timespec="seconds")
    _write(folder / "results" / f"{stem(record['name'])}.json", record)
    return record


def _write(path: Path, content: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(".part")
    part.write_text(json.dumps(content, indent=1, allow_nan=False))
    part.replace(path)  # never half a file


def finished(
    entry: Entry, folder: str | Path, full: bool, formats: Sequence[str] = ()
) -> dict[str, Any] | None:
    """The record of an earlier run of the same size and arguments, if it came to an end."""
    path = Path(folder) / "results" / f"{stem(entry.name)}.json"
    try:
        record = json.loads(path.read_text())
    except (OSError, ValueError):
        return None
    same = record.get("version") == VERSION and record.get("size") == ("full" if full else "small")
    if not same or record["status"] not in FINISHED:
        return None
    if entry.compute is not None:
        wanted = _plain(entry.arguments(full))
        if any(record["arguments"].get(k) != v for k, v in wanted.items() if k != "folder"):
            return None
    drawn = {Path(f).suffix[1:] for f in record["figures"]}
    return record if entry.compute is None or drawn >= set(formats) else None


class Worker:
    """One process that runs entries; a new one is started when it has died."""

    def __init__(self) -> None:
        self.process: Any = None
        self.pipe: Any = None

    def run(self, entry: Entry, folder: Path, **options: Any) -> dict[str, Any]:
        """The record of one entry, also when its process dies or never answers."""
        if self.process is None or not self.process.is_alive():
            self.start()
        try:
            self.pipe.send((entry, str(folder), options))
            if self.pipe.poll(60 * max(10.0, PATIENCE * entry.minutes[options["full"]])):
                return self.pipe.recv()
            self.process.kill()
            error = f"no answer in {PATIENCE} times the expected time; its process was ended"
        except (EOFError, OSError):
            error = ""
        self.process.join()
        error = error or f"the process died with exit code {self.process.exitcode}"
        return _keep(folder, _blank(entry, options["full"]) | {"error": error})

    def start(self) -> None:
        """A new process; ``run`` does it by itself."""
        context = multiprocessing.get_context("spawn")  # jax must not be forked
        self.pipe, far = context.Pipe()
        self.process = context.Process(target=_serve, args=(far,), daemon=True)
        self.process.start()
        far.close()

    def stop(self) -> None:
        """Ends the process."""
        if self.process is not None:
            with contextlib.suppress(OSError):
                self.pipe.send(None)
            self.process.join(5)
            if self.process.is_alive():
                self.process.terminate()


def _serve(pipe: Any) -> None:
    import jax

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
) -> dict[str, Any]:
    """Runs entries one by one and writes summary and gallery.

    Args:
        entries: of the catalogue.
        folder: results of earlier runs in it are kept and skipped.
        full: paper size.
        force: run again what is finished.
        formats: of the figures; png is always written.
        data: folder with local data sets.
        jobs: worker processes; 0 runs in this process.
        tell: called with one line at each end.

    Returns:
        The summary, as in ``summary.json``.
    """
    folder, entries = Path(folder), list(entries)
    formats = tuple(dict.fromkeys(("png", *formats)))
    options: dict[str, Any] = {"full": full, "formats": formats, "data": data}
    started, done, lock = time.perf_counter(), 0, threading.Lock()
    todo = []
    for entry in entries:
        old = None if force else finished(entry, folder, full, formats)
        if old is not None:
            done += 1
            tell(_line(old, done, len(entries), again=True))
        else:
            todo.append(entry)
    todo.sort(key=lambda e: -e.minutes[full] if e.status == "runnable" else -math.inf)  # longest first

    def note(record: dict[str, Any]) -> None:
        nonlocal done
        with lock:
            done += 1
            tell(_line(record, done, len(entries)))
            _write(folder / "summary.json", summarize(folder, full))

    spare = threading.local()
    workers: list[Worker] = []

    def one(entry: Entry) -> None:
        if not hasattr(spare, "worker"):
            spare.worker = Worker()
            with lock:
                workers.append(spare.worker)
        note(spare.worker.run(entry, folder, **options))

    try:
        if jobs == 0:
            for entry in todo:
                note(run_entry(entry, folder, **options))
        elif todo:
            _share(jobs, one, todo)
    finally:
        for worker in workers:
            worker.stop()
        summary = summarize(folder, full) | {"wall_seconds": round(time.perf_counter() - started, 1)}
        _write(folder / "summary.json", summary)
        write_gallery(summary, folder)
    return summary


def _share(jobs: int, one: Callable[[Entry], None], todo: list[Entry]) -> None:
    """``one`` of each entry in ``jobs`` threads; an interrupt drops what has not begun."""
    pool = ThreadPoolExecutor(jobs)
    try:
        for future in [pool.submit(one, entry) for entry in todo]:
            future.result()
    finally:
        pool.shutdown(wait=False, cancel_futures=True)


def summarize(folder: str | Path, full: bool) -> dict[str, Any]:
    """What ``summary.json`` holds: every record of this size in the folder, in the order of the catalogue."""
    size = "full" if full else "small"
    records = []
    for path in sorted((Path(folder) / "results").glob("*.json")):
        record = json.loads(path.read_text())
        if record.get("version") == VERSION and record["size"] == size:
            records.append(record)
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
        "unexplained": [r["name"] for r in records if r["status"] not in GOOD],
        "experiments": records,
    }


def _line(record: dict[str, Any], done: int, count: int, again: bool = False) -> str:
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
