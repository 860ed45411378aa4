"""A run directory: the configuration, and one Zarr group per finished chunk, each written atomically.

    DIR/config.json            what is computed, with versions; written once
    DIR/chunks/003-00012.zarr  a finished chunk: arrays whose leading axis are its cells
    DIR/chunks/.part-*         a chunk being written; never read, removed by the next run

A chunk gets its final name by one rename after everything is written, so a killed run leaves only whole chunks. It
carries a digest of each array, so files that were lost or changed later (a crashed machine, a bad copy) are noticed.
"""

import json
import os
import pathlib
import shutil
import uuid
import warnings
from typing import Any

import numpy as np

from meanflow.sweeps.identity import array_text, difference

FORMAT = 2
CONFIG, CHUNKS, PART = "config.json", "chunks", ".part-"


class StoreError(ValueError):
    """A run directory that cannot be used; nothing in it was changed."""


class Store:
    """A run directory opened for one configuration.

    Args:
        path: the directory; made if it does not exist.
        config: JSON-ready description of the run. Everything under ``"run"`` must equal that of the directory.

    Raises:
        StoreError: if the directory holds another run, something else, or cannot be written.
    """

    def __init__(self, path: str | pathlib.Path, config: dict[str, Any]) -> None:
        self.path = pathlib.Path(path)
        self.config = {"format": FORMAT, **config}
        known = self.path / CONFIG
        try:
            if known.exists():
                self._compare(read_config(self.path))
            elif self.path.exists() and not self._is_new():
                raise StoreError(
                    f"store must name a new or empty directory or an earlier run, got {self.path}, "
                    "which holds other files; nothing was changed"
                )
            (self.path / CHUNKS).mkdir(parents=True, exist_ok=True)
            if not os.access(self.path / CHUNKS, os.W_OK):
                raise PermissionError(f"no permission to write in {self.path / CHUNKS}")
            if not known.exists():
                self._write_config()
            for left in (self.path / CHUNKS).glob(f"{PART}*"):
                shutil.rmtree(left, ignore_errors=True)
            for left in self.path.glob(f"{PART}*"):
                left.unlink(missing_ok=True)
        except OSError as problem:
            raise StoreError(f"store {self.path} cannot be used: {problem}") from problem

    def _is_new(self) -> bool:
        """Whether the directory is empty, or holds only what a run leaves that ends while it makes its store."""
        if not self.path.is_dir():
            return False
        rest = [entry for entry in self.path.iterdir() if not entry.name.startswith(PART)]
        return all(e.name == CHUNKS and e.is_dir() and not any(e.iterdir()) for e in rest)

    def _write_config(self) -> None:
        partial = self.path / f"{PART}{uuid.uuid4().hex}"
        try:
            partial.write_text(json.dumps(self.config, indent=1))
            partial.replace(self.path / CONFIG)
        finally:
            partial.unlink(missing_ok=True)

    def set_layout(self, layout: dict[str, Any]) -> None:
        """Another division into chunks; those that are finished must be part of it."""
        self.config = read_config(self.path) | {"layout": layout}
        try:
            self._write_config()
        except OSError as problem:
            raise StoreError(f"store {self.path} cannot be used: {problem}") from problem

    def _compare(self, old: dict[str, Any]) -> None:
        found = difference(old.get("run"), json.loads(json.dumps(self.config["run"])))
        if found:
            listed = "\n  ".join(found[:8])
            raise StoreError(
                f"store {self.path} holds a different run; use another directory or the same settings. "
                f"Differences:\n  {listed}"
            )
        newer = difference(old.get("versions"), json.loads(json.dumps(self.config.get("versions"))))
        if newer:
            warnings.warn(
                f"store {self.path} was started with other versions ({'; '.join(newer)}); "
                "new chunks may differ from old ones by rounding",
                stacklevel=4,
            )

    def finished(self) -> set[str]:
        """Names of the chunks on disk."""
        return finished_chunks(self.path)

    def write(self, name: str, arrays: dict[str, np.ndarray]) -> None:
        """Writes a chunk; on any failure the directory is as before."""
        import zarr

        folder = self.path / CHUNKS
        partial = folder / f"{PART}{name}-{uuid.uuid4().hex}"
        try:
            group = zarr.open_group(partial, mode="w-")
            for key, value in arrays.items():
                group.create_array(key, data=np.asarray(value))
            group.attrs["digests"] = {key: array_text(value) for key, value in sorted(arrays.items())}
            partial.rename(folder / f"{name}.zarr")
        except OSError as problem:
            shutil.rmtree(partial, ignore_errors=True)
            raise StoreError(
                f"chunk {name} could not be written to {self.path}: {problem}; "
                "chunks finished before it are safe and the run can be resumed"
            ) from problem
        except BaseException:
            shutil.rmtree(partial, ignore_errors=True)
            raise

    def read(self, name: str) -> dict[str, np.ndarray]:
        """The arrays of a finished chunk."""
        return read_chunk(self.path, name)


def read_config(path: str | pathlib.Path) -> dict[str, Any]:
    """The configuration of a run directory."""
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
    return config


def finished_chunks(path: str | pathlib.Path) -> set[str]:
    """Names of the whole chunks in a run directory."""
    return {entry.stem for entry in (pathlib.Path(path) / CHUNKS).glob("*.zarr")}


def read_chunk(path: str | pathlib.Path, name: str) -> dict[str, np.ndarray]:
    """The arrays of one finished chunk of a run directory."""
    import zarr

    folder = pathlib.Path(path) / CHUNKS / f"{name}.zarr"
    advice = f"remove {folder} to have it computed again"
    try:
        group: Any = zarr.open_group(folder, mode="r")
        digests = dict(group.attrs["digests"])
        arrays = {key: np.asarray(group[key][...]) for key in digests}
    except (OSError, KeyError, ValueError) as problem:
        raise StoreError(f"chunk {name} of store {path} cannot be read: {problem}; {advice}") from problem
    # zarr takes a missing file for zeros
    bad = [key for key, value in arrays.items() if array_text(value) != digests[key]]
    if bad:
        raise StoreError(
            f"chunk {name} of store {path} is damaged: {bad} changed since it was written; {advice}"
        )
    return arrays
