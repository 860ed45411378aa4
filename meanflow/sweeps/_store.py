"""A run directory: the configuration, and one Zarr group per finished chunk, each written atomically.

    DIR/config.json            what is computed, with versions and the cells of every chunk; carries its own digest
    DIR/chunks/003-00012.zarr  a finished chunk: arrays whose leading axis are its cells
    DIR/chunks/.part-*         a chunk being written; never read, removed by the next run
    DIR/.lock                  names the process that writes here; gone when that process ends in good order

A chunk gets its final name by one rename after everything is written, so a killed run leaves only whole chunks. It
records its name, its cells, the digest of the run it belongs to and a digest of each array, so that files which were
lost, changed, or put in another's place later (a crashed machine, a bad copy) are noticed.

One process at a time writes in a directory. Reading needs no lock: a reader sees whole chunks only.
"""

import errno
import io
import json
import os
import pathlib
import reprlib
import shutil
import socket
import stat
import warnings
from collections.abc import Mapping
from types import TracebackType

import numpy as np

from meanflow._identity import Json, array_text, difference, json_digest
from meanflow.files import PART, atomic_write

try:
    import fcntl
except ImportError:  # no file locks on this platform
    fcntl = None  # type: ignore[assignment]

FORMAT = 3
CONFIG, CHUNKS, LOCK = "config.json", "chunks", ".lock"
NUMBERS = ("bool", *(f"{kind}{bits}" for kind in ("int", "uint") for bits in (8, 16, 32, 64)))
NUMBERS += ("float16", "float32", "float64", "complex64", "complex128")  # the types of arrays that are read
CODECS = ("bytes", "zstd")  # what is written, and all that is read: other codecs run code of other packages
NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP, errno.EINVAL)


class StoreError(ValueError):
    """A run directory that cannot be used; nothing in it was changed."""


class Store:
    """A run directory opened for writing by one process, which holds its lock until ``close`` or its end.

    Args:
        path: the directory; made if it does not exist.
        config: JSON-ready description of the run. Everything under ``"run"`` must equal that of the directory;
            ``"versions"`` and ``"source"`` may differ, with a warning; ``"layout"`` lists the chunks with their cells.

    Raises:
        StoreError: if the directory holds another run or something else, is being written by another process, or
            cannot be written.
    """

    def __init__(self, path: str | pathlib.Path, config: Json) -> None:
        self.path = pathlib.Path(path)
        self.config = {"format": FORMAT, **config}
        try:
            self._check_place()
            (self.path / CHUNKS).mkdir(parents=True, exist_ok=True)
            if not os.access(self.path / CHUNKS, os.W_OK):
                raise PermissionError(f"no permission to write in {self.path / CHUNKS}")
            self._lock = Lock(self.path)
            try:
                self._start()
            except BaseException:
                self._lock.release()
                raise
        except OSError as problem:
            raise StoreError(f"store {self.path} cannot be used: {problem}") from problem

    def __enter__(self) -> "Store":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, problem: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Let other processes write in this directory."""
        self._lock.release()

    def _check_place(self) -> None:
        """Refuse a directory that is neither a store nor empty, before anything is written there."""
        if (self.path / CHUNKS).is_symlink():
            raise StoreError(
                f"store {self.path} must hold its chunks itself, got a link {self.path / CHUNKS}, through which "
                "nothing is written; reading is possible"
            )
        if (self.path / CONFIG).exists():
            read_config(self.path)
        elif self.path.exists() and not self._is_new():
            raise StoreError(
                f"store must name a new or empty directory or an earlier run, got {self.path}, "
                "which holds other files; nothing was changed"
            )

    def _is_new(self) -> bool:
        """Say whether the directory is empty, or holds only what a run leaves that ends while it makes its store."""
        if not self.path.is_dir():
            return False
        rest = [e for e in self.path.iterdir() if not e.name.startswith(PART) and e.name != LOCK]
        return all(e.name == CHUNKS and e.is_dir() and not any(e.iterdir()) for e in rest)

    def _start(self) -> None:
        """Compare with the run that is there, or write the configuration; clear away what a dead process left."""
        if (self.path / CONFIG).exists():
            # read again: another process may have made the store before this one got the lock
            old = read_config(self.path)
            self._compare(old)
            self.config = old
        else:
            self._write_config()
        # parts are the lock holder's own, and nobody else holds the lock
        for left in (self.path / CHUNKS).glob(f"{PART}*"):
            shutil.rmtree(left, ignore_errors=True)
        for left in self.path.glob(f"{PART}*"):
            left.unlink(missing_ok=True)

    def _write_config(self) -> None:
        sealed = self.config | {"digest": _seal(self.config)}
        with atomic_write(self.path / CONFIG) as part:
            part.write_text(json.dumps(sealed, indent=1))

    def set_layout(self, layout: Json) -> None:
        """Store another division into chunks; those that are finished must be part of it."""
        self.config = read_config(self.path) | {"layout": layout}
        try:
            self._write_config()
        except OSError as problem:
            raise StoreError(f"store {self.path} cannot be used: {problem}") from problem

    def _compare(self, old: Json) -> None:
        """Refuse another run; warn if the same run was begun with other versions or another source of this package."""
        new = json.loads(json.dumps(self.config))
        found = difference(old.get("run"), new["run"])
        if found:
            listed = "\n  ".join(found[:8])
            if any(line.startswith("groups") for line in found):
                listed += "\n  (which widths share a group follows from widths and waste)"
            raise StoreError(
                f"store {self.path} holds a different run; use another directory or the same settings. "
                f"Differences:\n  {listed}"
            )
        newer = difference(old.get("versions"), new.get("versions"))
        if newer:
            warnings.warn(
                f"store {self.path} was started with other versions ({'; '.join(newer)}); "
                "new chunks may differ from old ones by rounding",
                stacklevel=2,
            )
        if old.get("source") != new.get("source"):
            warnings.warn(
                f"store {self.path} was started with another source code of meanflow (digest {old.get('source')}, "
                f"now {new.get('source')}); new chunks may differ from old ones: use another directory if the change "
                "matters to the numbers",
                stacklevel=2,
            )

    def finished(self) -> set[str]:
        """Return the names of the chunks on disk."""
        return finished_chunks(self.path)

    def write(self, name: str, arrays: Mapping[str, np.ndarray]) -> None:
        """Write a chunk; on any failure the directory is as before.

        Args:
            name: name of the chunk; its cells are those of the layout.
            arrays: its results by name, with the cells along the leading axis.
        """
        import zarr

        record = _expected(self.config, name) | {
            "digests": {key: array_text(value) for key, value in sorted(arrays.items())}
        }
        try:
            with atomic_write(self.path / CHUNKS / f"{name}.zarr") as part:
                group = zarr.open_group(part, mode="w-", zarr_format=3)
                for key, value in arrays.items():
                    group.create_array(key, data=np.asarray(value))
                group.attrs.update({"record": record, "digest": json_digest(record)})
        except OSError as problem:
            raise StoreError(
                f"chunk {name} could not be written to {self.path}: {problem}; "
                "chunks finished before it are safe and the run can be resumed"
            ) from problem

    def read(self, name: str) -> dict[str, np.ndarray]:
        """Return the arrays of a finished chunk."""
        return read_chunk(self.path, name, self.config)


class Lock:
    """The exclusive right to write in a run directory.

    It is an advisory lock (``flock``) on the file ``.lock``, which names the owner. The system drops it when the owner
    ends, however that happens, so the lock of a dead process is free. Where the file system has no such locks the
    name in the file is all there is, and a warning says so.

    Args:
        folder: the run directory.

    Raises:
        StoreError: if another process, or this one, holds the lock, or its file is not one that a store makes.
    """

    def __init__(self, folder: pathlib.Path) -> None:
        self.path = folder / LOCK
        while True:
            self._file = self._open()
            try:
                self._take()
            except BaseException:
                self._file.close()
                raise
            if self._is_current():
                break
            self._file.close()  # the owner before us removed the file between our opening and locking it
        try:
            self._sign()
        except BaseException:  # such as a full disk
            self.path.unlink(missing_ok=True)  # while it is locked, as in release
            self._file.close()
            raise

    def _open(self) -> io.FileIO:
        """Open the file, or make it; refuse whatever would carry our writing to a file outside of the directory."""
        try:
            there = self.path.lstat()
        except FileNotFoundError:
            pass
        else:
            if not stat.S_ISREG(there.st_mode) or there.st_nlink > 1:
                raise StoreError(
                    f"{self.path} must be a regular file of its own, got a link or something else; remove it if no "
                    "process writes in this store"
                )
        # a link that was put there since is an error where the platform can tell
        flags = os.O_RDWR | os.O_CREAT | getattr(os, "O_NOFOLLOW", 0)
        return io.FileIO(os.open(self.path, flags, 0o666), "r+")

    def _sign(self) -> None:
        """Write this process into the locked file."""
        text = json.dumps({"pid": os.getpid(), "host": socket.gethostname()}).encode()
        self._file.seek(0)
        self._file.truncate()
        if self._file.write(text) != len(text):
            raise OSError(errno.ENOSPC, f"{self.path} could not be written")

    def _take(self) -> None:
        """Lock the open file, or refuse."""
        owner = self._owner()
        here = owner.get("host") == socket.gethostname()
        try:
            if fcntl is None:
                raise OSError(errno.ENOSYS, "this platform has no flock")
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as problem:
            if problem.errno not in NO_LOCKS:
                raise self._refusal(self._owner()) from None
            if owner and not (here and not _is_running(int(owner["pid"]))):
                raise self._refusal(owner, f" (if that process is dead, remove {self.path})") from None
            warnings.warn(
                f"the file system of {self.path.parent} has no file locks ({problem}): make sure that no other "
                "process writes there at the same time",
                stacklevel=2,
            )
        else:
            if owner and not here:
                warnings.warn(
                    f"{self.path} was left by process {owner['pid']} on {owner['host']} and is taken over; if hosts "
                    "do not share locks on this file system, make sure that this process has ended",
                    stacklevel=2,
                )

    def _refusal(self, owner: Json, more: str = "") -> StoreError:
        who = f"process {owner['pid']} on {owner['host']}" if owner else "another process"
        return StoreError(
            f"store {self.path.parent} is being written by {who}; wait until it ends or use another directory"
            f"{more}. Reading is possible meanwhile"
        )

    def _owner(self) -> Json:
        """Return ``pid`` and ``host`` of the process named in the file; nothing if it is empty or unreadable."""
        self._file.seek(0)
        try:
            owner = json.load(self._file)
            return {"pid": int(owner["pid"]), "host": str(owner["host"])}
        except (ValueError, KeyError, TypeError):
            return {}

    def _is_current(self) -> bool:
        """Say whether the locked file is still the one that the directory shows."""
        try:
            shown = self.path.lstat()
        except FileNotFoundError:
            return False
        return os.path.samestat(shown, os.fstat(self._file.fileno()))

    def release(self) -> None:
        """Remove the file and give the lock up; a second call does nothing."""
        if self._file.closed:
            return
        # a forked child shares the open file, but the lock belongs to its parent
        if self._owner().get("pid") == os.getpid() and self._is_current():
            self.path.unlink(missing_ok=True)  # while it is locked, so that nobody else's file is removed
        self._file.close()


def _is_running(pid: int) -> bool:
    """Say whether a process of this host is alive; True where the platform cannot tell."""
    if fcntl is None:
        return True
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def _seal(config: Json) -> str:
    """Return the digest that ``config.json`` carries: of everything but itself."""
    return json_digest({name: value for name, value in config.items() if name != "digest"})


def _expected(config: Json, name: str) -> Json:
    """Return what a chunk of this name must record: the name, its cells, and the digest of the run."""
    planned = config.get("layout", {}).get("chunks", {}).get(name, {})
    return {"chunk": name, "cells": planned.get("cells"), "run": json_digest(config["run"])}


def read_config(path: str | pathlib.Path) -> Json:
    """Return the configuration of a run directory, after a check of its digest."""
    known = pathlib.Path(path) / CONFIG
    if not known.is_file():
        raise StoreError(f"store must name a run directory, got {path}, which has no {CONFIG}")
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
    """Return the names of the whole chunks in a run directory."""
    found = (pathlib.Path(path) / CHUNKS).glob("*.zarr")
    return {entry.stem for entry in found if not entry.name.startswith(PART)}


def read_chunk(path: str | pathlib.Path, name: str, config: Json | None = None) -> dict[str, np.ndarray]:
    """Return the arrays of one finished chunk of a run directory, after a check that they are its own and whole.

    Args:
        path: the run directory.
        name: name of the chunk.
        config: configuration of the directory, if it is at hand; otherwise it is read.
    """
    import zarr

    config = read_config(path) if config is None else config
    folder = pathlib.Path(path) / CHUNKS / f"{name}.zarr"
    advice = f"remove {folder} and resume the run to have it computed again"
    try:
        attributes = _node(folder, "group")["attributes"]
        record, seal = attributes["record"], attributes["digest"]
        for key, text in record["digests"].items():
            _check_array(folder, key, text)
        group = zarr.open_group(folder, mode="r", zarr_format=3, use_consolidated=False)
        arrays = {str(key): np.asarray(group[key][...]) for key in record["digests"]}  # type: ignore[index]
    except Exception as problem:  # damaged files make zarr and its codecs raise whatever they like
        raise StoreError(
            f"chunk {name} of store {path} is damaged: {type(problem).__name__}: {problem}; {advice}"
        ) from problem
    if seal != json_digest(record):
        raise StoreError(f"chunk {name} of store {path} is damaged: its record was changed; {advice}")
    for key, expected in json.loads(json.dumps(_expected(config, name))).items():
        if record.get(key) != expected:
            raise StoreError(
                f"chunk {name} of store {path} is another's: it records {key} {reprlib.repr(record.get(key))}, "
                f"expected {reprlib.repr(expected)}; {advice}"
            )
    # zarr takes a missing file for zeros
    bad = [key for key, value in arrays.items() if array_text(value) != record["digests"][key]]
    if bad:
        raise StoreError(
            f"chunk {name} of store {path} is damaged: {bad} changed since it was written; {advice}"
        )
    return arrays


def _node(folder: pathlib.Path, kind: str) -> Json:
    """Return the description of a Zarr group or array, read as JSON, before Zarr acts on what it says."""
    node = json.loads((folder / "zarr.json").read_text(encoding="utf-8"))
    if not isinstance(node, dict) or node.get("zarr_format") != 3 or node.get("node_type") != kind:
        raise ValueError(f"{folder.name} must be a {kind} of Zarr format 3")
    if kind == "group" and not isinstance(node.get("attributes"), dict):
        raise ValueError(f"{folder.name} has no attributes")
    return node


def _check_array(folder: pathlib.Path, key: str, text: str) -> None:
    """Refuse an array that this package did not write: it is to hold numbers, in the codecs of this module alone.

    Args:
        folder: the chunk.
        key: name of the array.
        text: its digest, which begins with type and shape; an edited shape could ask for any amount of memory.
    """
    if not key.replace("-", "_").replace(".", "_").isidentifier():
        raise ValueError(f"{key!r} is no name of an array")
    node = _node(folder / key, "array")
    codecs = [codec.get("name") for codec in node["codecs"]]
    if node["data_type"] not in NUMBERS or not set(codecs) <= set(CODECS) or node.get("storage_transformers"):
        raise ValueError(
            f"{key} must hold numbers ({', '.join(NUMBERS)}) in the codecs {list(CODECS)}, got "
            f"{reprlib.repr(node['data_type'])} in {reprlib.repr(codecs)}"
        )
    given = f"{node['data_type']}{node['shape']}:"
    if not text.startswith((given, f"{node['data_type']}:")) or (
        not text.startswith(given) and int(np.prod(node["shape"])) != 1
    ):
        raise ValueError(f"{key} is described as {given[:-1]}, and its digest as {reprlib.repr(text)}")
