"""A run directory: what is computed, one file per finished chunk, and who computes which chunk at the moment.

    DIR/plan/config.json        what is computed, with versions and the cells of every chunk; carries its own digest
    DIR/chunks/003-00012.npz    a finished chunk: arrays whose leading axis are its cells
    DIR/claims/003-00012.0/     names the process that computes this chunk; gone when that process is done with it
    .part-*                     what is being written; never read

Any number of processes, on one host or on many, write in a directory at the same time. There is no lock: the file
system has to rename files and folders, as NFS and Lustre do: a file replaces what was there, a folder never does.

- The plan is written once: it is a folder that is renamed into place.
- A chunk is written under another name and renamed into place. Two processes that finish the same chunk write the same
  bytes, so that it does not matter whose file stays. A chunk records its name, its cells, the digest of the run it
  belongs to and a digest of its arrays, so that files which were changed or put in another's place are noticed.
- A claim keeps two processes from computing the same chunk, and nothing else depends on it. Its holder touches it every
  ``BEAT`` seconds. It is void when the holder is a process of this host that has ended, or when it has not changed for
  ``LEASE`` seconds on the watch of the observer: the clocks of two hosts are never compared. A claim is a folder too.
  Who takes a chunk over makes one with the next number, so that one of several observers wins.
"""

import contextlib
import json
import math
import os
import pathlib
import reprlib
import shutil
import socket
import stat
import threading
import time
import warnings
from collections.abc import Mapping

import numpy as np

from meanflow._identity import Json, difference, json_digest
from meanflow.files import PART, atomic_write, read_arrays, write_arrays

FORMAT = 4
PLAN, CONFIG, CHUNKS, CLAIMS, HOLDER = "plan", "config.json", "chunks", "claims", "holder.json"
BEAT, LEASE = 15.0, 180.0  # seconds; network file systems may show old times for up to a minute


class StoreError(ValueError):
    """A run directory that cannot be used; nothing in it was changed."""


class Store:
    """A run directory opened for writing; others may write there too. ``close`` gives back what is claimed.

    Args:
        path: the directory; made if it does not exist.
        config: JSON-ready description of the run. Everything under ``"run"`` must equal that of the directory;
            ``"versions"`` and ``"source"`` may differ, with a warning; ``"layout"`` lists the chunks with their cells,
            and that of the directory stays.

    Raises:
        StoreError: if the directory holds another run or something else, or cannot be written.
    """

    def __init__(self, path: str | pathlib.Path, config: Json) -> None:
        self.path = pathlib.Path(path)
        self.held: dict[str, list[pathlib.Path]] = {}  # claims of this process, each with those it replaces
        # times of others' claims, and since when they stand on the watch of this process
        self._seen: dict[pathlib.Path, tuple[int, float]] = {}
        self._over, self._beats = threading.Event(), False
        try:
            check_place(self.path)
            for name in (CHUNKS, CLAIMS):
                (self.path / name).mkdir(parents=True, exist_ok=True)
                if not os.access(self.path / name, os.W_OK):
                    raise PermissionError(f"no permission to write in {self.path / name}")
            self.config = self._first_config({"format": FORMAT, **config})
        except OSError as problem:
            raise StoreError(f"store {self.path} cannot be used: {problem}") from problem
        self._compare(config)

    def close(self) -> None:
        """Give back all claims, and touch no more."""
        self._over.set()
        self.give_back()

    def give_back(self) -> None:
        """Let others compute what this process has claimed and not finished."""
        for name in list(self.held):
            self.release(name)

    def _first_config(self, config: Json) -> Json:
        """Write the plan if this process is the first; return that of the process which was."""
        if not has_plan(self.path):
            try:
                with atomic_write(self.path / PLAN) as part:
                    part.mkdir()
                    (part / CONFIG).write_text(json.dumps(config | {"digest": _seal(config)}))
            except OSError:
                if not has_plan(self.path):  # nobody else was faster
                    raise
        return read_config(self.path)

    def _compare(self, config: Json) -> None:
        """Refuse another run; warn if the same run was begun with other versions or another source of this package."""
        old = self.config
        found = difference(old.get("run"), json.loads(json.dumps(config["run"])))
        if found:
            listed = "\n  ".join(found[:8])
            if any(line.startswith("groups") for line in found):
                listed += "\n  (which widths share a group follows from widths and waste)"
            raise StoreError(
                f"store {self.path} holds a different run; use another directory or the same settings. "
                f"Differences:\n  {listed}"
            )
        newer = difference(old.get("versions"), config.get("versions"))
        if newer:
            warnings.warn(
                f"store {self.path} was started with other versions ({'; '.join(newer)}); "
                "new chunks may differ from old ones by rounding",
                stacklevel=2,
            )
        if old.get("source") != config.get("source"):
            warnings.warn(
                f"store {self.path} was started with another source code of meanflow (digest {old.get('source')}, "
                f"now {config.get('source')}); new chunks may differ from old ones: use another directory if the "
                "change matters to the numbers",
                stacklevel=2,
            )

    def claim(self, name: str) -> bool:
        """Reserve a chunk for this process; False if it is finished, or if another process is at work on it."""
        replaced: list[pathlib.Path] = []
        while True:
            path = self.path / CLAIMS / f"{name}.{len(replaced)}"
            replaced.append(path)
            try:
                # a folder that is renamed is there with its content, and never replaces another
                with atomic_write(path) as part:
                    part.mkdir()
                    (part / HOLDER).write_text(json.dumps({"pid": os.getpid(), "host": socket.gethostname()}))
            except OSError as problem:
                if not path.exists() and not path.is_symlink() and not self.is_finished(name):
                    raise self._lost(name, problem) from problem
                if not self._is_void(path):
                    return False
                continue
            self.held[name] = replaced
            self._begin_beating()
            if not self.is_finished(name):
                return True
            self.release(name)  # it was finished between a look at it and this claim
            return False

    def release(self, name: str) -> None:
        """Give a claim back, with those of dead processes that it replaced."""
        for path in self.held.pop(name, []):
            shutil.rmtree(path, ignore_errors=True)

    def _is_void(self, path: pathlib.Path) -> bool:
        """Say whether the holder of a claim is dead, as far as this process can tell by now."""
        try:
            status = path.lstat()
            if not stat.S_ISDIR(status.st_mode):
                raise StoreError(
                    f"{path} must be a folder, got a link or something else; remove it if no process writes in this "
                    "store"
                )
            if _is_gone(_holder(path)):
                return True
        except OSError:  # given back meanwhile: the next look will find out
            return False
        since = self._seen.get(path)
        if since is None or since[0] != status.st_mtime_ns:
            self._seen[path] = status.st_mtime_ns, time.monotonic()
            return False
        return time.monotonic() - since[1] > LEASE

    def _begin_beating(self) -> None:
        """Touch the claims of this process from time to time, in a thread that ends with the store or the process."""
        if self._beats:
            return
        self._beats = True

        def beat() -> None:
            while not self._over.wait(BEAT):
                for claims in list(self.held.values()):
                    with contextlib.suppress(OSError):  # given back or taken over
                        os.utime(claims[-1])

        threading.Thread(target=beat, name="meanflow claims", daemon=True).start()

    def is_finished(self, name: str) -> bool:
        """Say whether a chunk is on disk."""
        return (self.path / CHUNKS / f"{name}.npz").exists()

    def write(self, name: str, arrays: Mapping[str, np.ndarray]) -> None:
        """Write a chunk and give its claim back; on any failure the chunks are as before.

        Args:
            name: name of the chunk; its cells are those of the layout.
            arrays: its results by name, with the cells along the leading axis.
        """
        try:
            write_arrays(self.path / CHUNKS / f"{name}.npz", arrays, _expected(self.config, name), FORMAT)
        except OSError as problem:
            # whoever finished the chunk before may have cleared our part away
            if not self.is_finished(name):
                raise self._lost(name, problem) from problem
        self.release(name)

    def _lost(self, name: str, problem: OSError) -> StoreError:
        return StoreError(
            f"chunk {name} could not be written to {self.path}: {problem}; "
            "chunks finished before it are safe and the run can be resumed"
        )

    def read(self, name: str) -> dict[str, np.ndarray]:
        """Return the arrays of a finished chunk."""
        return read_chunk(self.path, name, self.config)

    def tidy(self) -> None:
        """Remove what dead processes have left: parts and claims of chunks that are finished."""
        there = finished_chunks(self.path)
        whole = set(self.config["layout"]["chunks"]) <= there
        for entry in (self.path / CLAIMS).iterdir():
            if entry.name.rpartition(".")[0] in there or (whole and entry.name.startswith(PART)):
                shutil.rmtree(entry, ignore_errors=True)
        for part in (self.path / CHUNKS).glob(f"{PART}*.npz"):
            # behind the prefix and 32 digits a part is called like its chunk
            if part.stem[len(PART) + 33 :] in there:
                part.unlink(missing_ok=True)
        for left in self.path.glob(f"{PART}*"):  # the plan is written: these have lost
            shutil.rmtree(left, ignore_errors=True)


def check_place(path: pathlib.Path) -> None:
    """Refuse a directory that is neither a store nor empty, before anything is written there."""
    for name in (PLAN, CHUNKS, CLAIMS):
        if (path / name).is_symlink():
            raise StoreError(
                f"store {path} must hold its folders itself, got a link {path / name}, through which "
                "nothing is written; reading is possible"
            )
    if has_plan(path) or not path.exists():
        return
    # what another process may have made so far, or one that has died meanwhile
    known = (PLAN, CHUNKS, CLAIMS)
    if not path.is_dir() or any(e.name not in known and not e.name.startswith(PART) for e in path.iterdir()):
        raise StoreError(
            f"store must name a new or empty directory or an earlier run, got {path}, "
            "which holds other files; nothing was changed"
        )


def _holder(path: pathlib.Path) -> Json:
    """Return ``pid`` and ``host`` of the process named in a claim; nothing if it is not written yet, or damaged."""
    file = path / HOLDER
    try:
        if not stat.S_ISREG(file.lstat().st_mode):  # a pipe would keep us waiting
            return {}
        with open(file, "rb") as content:
            owner = json.loads(content.read(1000))
        return {"pid": int(owner["pid"]), "host": str(owner["host"])}
    except (OSError, ValueError, KeyError, TypeError):
        return {}


def _is_gone(holder: Json) -> bool:
    """Say whether the holder of a claim is known to have ended, which only its own host can tell."""
    if holder.get("host") != socket.gethostname() or os.name != "posix":
        return False
    try:
        os.kill(holder["pid"], 0)
    except (ProcessLookupError, OverflowError):
        return True
    except PermissionError:
        return False
    return False


def _seal(config: Json) -> str:
    """Return the digest that ``config.json`` carries: of everything but itself."""
    return json_digest({name: value for name, value in config.items() if name != "digest"})


def _expected(config: Json, name: str) -> Json:
    """Return what a chunk of this name must record: the name, its cells, and the digest of the run."""
    planned = config.get("layout", {}).get("chunks", {}).get(name, {})
    return {"chunk": name, "cells": planned.get("cells"), "run": json_digest(config["run"])}


def has_plan(path: str | pathlib.Path) -> bool:
    """Say whether a directory holds the plan of a run."""
    return (pathlib.Path(path) / PLAN / CONFIG).is_file()


def read_config(path: str | pathlib.Path) -> Json:
    """Return the configuration of a run directory, after a check of its digest."""
    known = pathlib.Path(path) / PLAN / CONFIG
    if not known.is_file():
        raise StoreError(f"store must name a run directory, got {path}, which has no {PLAN}/{CONFIG}")
    try:
        config = json.loads(known.read_text())
    except (OSError, ValueError) as problem:
        raise StoreError(f"store {path} has an unreadable {CONFIG}: {problem}") from problem
    if not isinstance(config, dict) or "run" not in config:
        raise StoreError(f"store {path} has a {CONFIG} that this package did not write")
    if config.get("format") != FORMAT:
        raise StoreError(
            f"store {path} has format {config.get('format')}, this version reads format {FORMAT}"
        )
    if config.get("digest") != _seal(config):
        raise StoreError(
            f"store {path} has a damaged {CONFIG}: it changed since it was written; restore it from a copy, or run "
            "the sweep again in another directory"
        )
    return config


def finished_chunks(path: str | pathlib.Path) -> set[str]:
    """Return the names of the finished chunks in a run directory."""
    try:
        names = os.listdir(pathlib.Path(path) / CHUNKS)
    except FileNotFoundError:
        return set()
    return {name[:-4] for name in names if name.endswith(".npz") and not name.startswith(PART)}


def read_chunk(path: str | pathlib.Path, name: str, config: Json | None = None) -> dict[str, np.ndarray]:
    """Return the arrays of one finished chunk of a run directory, after a check that they are its own and whole.

    Args:
        path: the run directory.
        name: name of the chunk.
        config: configuration of the directory, if it is at hand; otherwise it is read.
    """
    config = read_config(path) if config is None else config
    file = pathlib.Path(path) / CHUNKS / f"{name}.npz"
    advice = f"remove {file} and resume the run to have it computed again"
    try:
        arrays, record = read_arrays(file, FORMAT, "a sweep")
    except (OSError, ValueError) as problem:
        raise StoreError(f"chunk {name} of store {path} is damaged: {problem}; {advice}") from problem
    for key, expected in json.loads(json.dumps(_expected(config, name))).items():
        if record.get(key) != expected:
            raise StoreError(
                f"chunk {name} of store {path} is another's: it records {key} {reprlib.repr(record.get(key))}, "
                f"expected {reprlib.repr(expected)}; {advice}"
            )
    return arrays


def progress(path: str | pathlib.Path) -> Json:
    """Return how far a run directory is: {"cells", "done", "claimed", "rate", "left", "workers"}.

    ``rate`` is in cells a second over the last chunks, ``left`` the seconds that the rest takes at this rate; both are
    None while nothing is known. ``workers`` lists host, pid, chunk and "alive" of each claim. All times are those of
    the file system, since clocks of hosts differ.
    """
    path = pathlib.Path(path)
    planned = read_config(path)["layout"]["chunks"]
    cells = {name: len(chunk["cells"]) for name, chunk in planned.items()}
    there = finished_chunks(path) & set(cells)
    stamps = sorted((_changed(path / CHUNKS / f"{name}.npz"), cells[name]) for name in there)
    # of several claims of one chunk the last counts
    last = {one.name.rpartition(".")[0]: one for one in sorted((path / CLAIMS).glob("[!.]*.*"))}
    claims = [(name, _changed(one), _holder(one)) for name, one in last.items() if name not in there]
    now = max([when for when, _ in stamps] + [when for _, when, _ in claims], default=0.0)
    recent = stamps[-50:]
    span = recent[-1][0] - recent[0][0] if recent else 0.0
    rate = sum(count for _, count in recent[1:]) / span if span > 0 else None
    total, done = sum(cells.values()), sum(count for _, count in stamps)
    workers = [
        {**holder, "chunk": name, "alive": not _is_gone(holder) and now - when < LEASE}
        for name, when, holder in claims
    ]
    return {
        "cells": total,
        "done": done,
        "claimed": sum(cells.get(worker["chunk"], 0) for worker in workers if worker["alive"]),
        "rate": rate,
        "left": math.ceil((total - done) / rate) if rate else None,
        "workers": workers,
    }


def _changed(path: pathlib.Path) -> float:
    try:
        return path.lstat().st_mtime
    except OSError:
        return 0.0
