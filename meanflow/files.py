"""Files that are either whole or absent, and the one format of arrays on disk.

A process can be killed at any moment. A rename within one folder is atomic, so a reader sees the old content or
the new one and never half of it.

Arrays are kept in npz files with a JSON header: the version of the format, the versions of the libraries that made
them, a digest of the arrays, and what they mean. Files may come from anybody. So nothing in them is unpickled, names
in them are looked up only among the records that the caller gives, and a small file cannot ask for much memory.
"""

import functools
import io
import json
import shutil
import uuid
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np

from meanflow._identity import Json, digest
from meanflow._properties import show

PART = ".part-"  # names that start with this are unfinished, and may be deleted when nobody is writing


@contextmanager
def atomic_write(path: str | Path) -> Iterator[Path]:
    """Yield a fresh path beside ``path`` to write to; when the block ends well it is renamed to ``path``.

    Args:
        path: final name of a file, which may exist and is then replaced, or of a folder, which must not exist.
            Its parent folder must exist (else FileNotFoundError).

    Yields:
        A path in the same folder with the same suffix, different for every call, at which a file or a folder is
        to be created. When the block raises, what was written there is deleted and ``path`` is as before.

    >>> import tempfile
    >>> folder = Path(tempfile.mkdtemp())
    >>> with atomic_write(folder / "a.txt") as part:
    ...     _ = part.write_text("whole")
    >>> [p.name for p in folder.iterdir()], (folder / "a.txt").read_text()
    (['a.txt'], 'whole')
    """
    path = Path(path)
    if not path.parent.is_dir():
        raise FileNotFoundError(f"{path} cannot be written: there is no folder {path.parent}")
    # the end of the name alone, so that a name which is long but allowed stays so
    part = path.with_name(f"{PART}{uuid.uuid4().hex}-{path.name[-80:]}")
    try:
        yield part
        part.replace(path)
    except BaseException:
        # also on KeyboardInterrupt: an unfinished file must not stay behind
        if part.is_dir():
            shutil.rmtree(part, ignore_errors=True)
        else:
            part.unlink(missing_ok=True)
        raise


@functools.cache
def versions() -> dict[str, str]:
    """Return the versions of the packages that decide the numbers and how they are stored.

    >>> sorted(versions())[:3]
    ['diffrax', 'equinox', 'jax']
    """
    found = {}
    for name in ("meanflow", "jax", "jaxlib", "diffrax", "optax", "equinox", "numpy", "xarray"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "not installed"
    return found


Arrays = Mapping[str, np.ndarray]


def write_arrays(path: str | Path, arrays: Mapping[str, Any], header: Json, form: int) -> None:
    """Write arrays and a JSON header to one npz file, which is never left half written.

    Args:
        path: name of the file, which is replaced if it exists.
        arrays: arrays of numbers by name, but none that is called "header".
        header: what they mean, JSON-ready. "format", "versions" and "digest" are added.
        form: number of the format, which changes whenever older files cannot be read any more.

    >>> import tempfile
    >>> path = Path(tempfile.mkdtemp()) / "a.npz"
    >>> write_arrays(path, {"x": np.arange(2.0)}, {"about": "two numbers"}, form=1)
    >>> arrays, header = read_arrays(path, form=1, writer="me")
    >>> arrays["x"].tolist(), header["about"]
    ([0.0, 1.0], 'two numbers')
    """
    plain = {name: np.asarray(value) for name, value in arrays.items()}
    text = json.dumps({"format": form, "versions": versions(), "digest": _digest(plain), **header})
    with atomic_write(path) as part, zipfile.ZipFile(part, "w") as archive:
        for name, array in {"header": np.frombuffer(text.encode(), np.uint8), **plain}.items():
            # without the time of day: two processes that write the same arrays write the same bytes
            with archive.open(zipfile.ZipInfo(f"{name}.npy"), "w", force_zip64=True) as member:
                np.lib.format.write_array(member, array, allow_pickle=False)


def read_arrays(path: str | Path, form: int, writer: str) -> tuple[dict[str, np.ndarray], Json]:
    """Return the arrays and the header of a file that ``write_arrays`` wrote.

    Args:
        path: name of the file.
        form: the number of the format that is wanted.
        writer: what writes such files, for messages.

    Raises:
        ValueError: if the file is damaged, of another format, or no such file at all.
    """
    try:
        arrays = _members(Path(path))
        header = json.loads(arrays.pop("header").tobytes().decode())
        found = header["format"]
    except Exception as problem:  # damaged archives raise whatever they like
        raise ValueError(
            f"{path} is damaged or not written by {writer}: {type(problem).__name__}: {problem}"
        ) from problem
    if found != form:
        wrote = header.get("versions")
        wrote = wrote.get("meanflow") if isinstance(wrote, dict) else None
        raise ValueError(
            f"{path} has format {show(found)}, written by meanflow {wrote or 'of an unknown version'}; this version "
            f"reads format {form}: read the file with the version that wrote it, or run again"
        )
    if header.get("digest") != _digest(arrays):
        raise ValueError(f"{path} is damaged: its arrays have another digest than when they were written")
    return arrays, header


def _digest(arrays: Arrays) -> str:
    parts = [(f"{name} {a.dtype.str} {a.shape}".encode(), a.tobytes()) for name, a in sorted(arrays.items())]
    return digest(*(part for pair in parts for part in pair))


def _members(path: Path) -> dict[str, np.ndarray]:
    with zipfile.ZipFile(path) as archive:
        entries = archive.infolist()
        # a small file must not fill the memory: nothing is unpacked, and no bytes are counted twice
        if any(entry.compress_type != zipfile.ZIP_STORED for entry in entries):
            raise ValueError("it is compressed")
        if sum(entry.file_size for entry in entries) > path.stat().st_size:
            raise ValueError("it declares more than it holds")
        if len({entry.filename for entry in entries}) < len(entries):
            raise ValueError("it holds two arrays of one name")
        return {entry.filename.removesuffix(".npy"): _array(archive.read(entry)) for entry in entries}


def _array(content: bytes) -> np.ndarray:
    stream = io.BytesIO(content)
    array = np.lib.format.read_array(stream, allow_pickle=False)
    if array.dtype.kind not in "biufc":
        raise ValueError(f"it holds {array.dtype}, which are no numbers")
    if stream.read(1):
        raise ValueError(f"it declares {array.dtype} {array.shape}, but holds more")
    return array
