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
import math
import re
import shutil
import uuid
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
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
    """Return the versions of the packages that decide the numbers."""
    found = {}
    for name in ("meanflow", "jax", "jaxlib", "diffrax", "optax", "equinox", "numpy"):
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
            with archive.open(f"{name}.npy", "w", force_zip64=True) as member:
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
    readers = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}
    shape, by_columns, dtype = readers[np.lib.format.read_magic(stream)](stream)
    body = bytearray(content[stream.tell() :])
    if dtype.kind not in "biufc":
        raise ValueError(f"it holds {dtype}, which are no numbers")
    if min(shape, default=0) < 0 or math.prod(shape) * dtype.itemsize != len(body):
        raise ValueError(f"it declares {dtype} {shape}, but holds {len(body)} bytes")
    return np.frombuffer(body, dtype).reshape(shape, order="F" if by_columns else "C")


class Refusal(ValueError):
    """A whole file that cannot be read here, as opposed to a damaged one."""


class Tree:
    """A pytree as a JSON layout and plain arrays by name, and back.

    Dictionaries, lists, tuples and NamedTuples are known, the last by the name of their type among ``records``: a file
    never decides which code is called. A subclass may know further types.
    """

    def __init__(self, records: Sequence[type] = (), arrays: Arrays | None = None) -> None:
        self.records: dict[str, Any] = {type_name(record): record for record in records}
        self.arrays: dict[str, Any] = dict(arrays or {})

    def describe(self, node: Any, name: str) -> Any:
        """Return the layout of ``node``; its arrays are put into ``arrays`` under dotted names."""
        if node is None:
            return None
        if isinstance(node, tuple) and hasattr(node, "_fields"):
            values = self.describe_all(dict(zip(node._fields, node, strict=True)), name)
            return {"record": type_name(type(node)), "fields": list(node._fields), "values": values}
        if type(node) is dict and all(type(key) in (str, int) for key in node):
            return {"dict": [[key, self.describe(value, f"{name}.{key}")] for key, value in node.items()]}
        if isinstance(node, tuple | list):  # no others are nodes of a pytree
            return {type(node).__name__: self.describe_all(dict(enumerate(node)), name)}
        dtype = node.dtype if isinstance(node, jax.Array) else np.asarray(node).dtype
        if getattr(dtype, "kind", "O") not in "biufc":  # numpy would pickle it, or lose its type
            raise ValueError(
                f"{name} must be an array of numbers, or tuples, lists and dicts of them with keys that are texts or "
                f"integers, got {show(node)}, which cannot be saved"
            )
        name = re.sub(r"[^\w.]", "_", name)  # an archive changes some characters of its names
        while name in self.arrays:  # {"a.b": u, "a": {"b": v}}
            name += "_"
        self.arrays[name] = node
        return name

    def describe_all(self, parts: Mapping[Any, Any], name: str) -> list[Any]:
        """Return the layouts of parts that have names of their own."""
        return [self.describe(value, f"{name}.{key}") for key, value in parts.items()]

    def restore(self, layout: Any) -> Any:
        """Return what was described by ``layout``; any exception but ``Refusal`` means that it is damaged."""
        match layout:
            case None:
                return None
            case str():
                return _in_its_precision(layout, self.arrays[layout])
            case {"record": str(name), "fields": list(fields), "values": list(values)}:
                return self._record(name, fields)._make(map(self.restore, values))
            case {"dict": list(pairs)}:
                return {key: self.restore(value) for key, value in pairs}
            case {"list": list(items)}:
                return [self.restore(item) for item in items]
            case {"tuple": list(items)}:
                return tuple(self.restore(item) for item in items)
        raise TypeError(f"{show(layout)} describes no part of a pytree")

    def _record(self, name: str, fields: list[object]) -> Any:
        found = self.records.get(name)
        if found is None or list(found._fields) != fields:
            raise Refusal(
                f"holds a record {name} with fields {fields}, which is not known here; pass records=[...] with this "
                "NamedTuple to Solution.load"
            )
        return found


def type_name(kind: type) -> str:
    """Return module and name of a type."""
    return f"{kind.__module__}.{kind.__qualname__}"


def _in_its_precision(name: str, array: np.ndarray) -> jax.Array:
    """Return the array in the precision in which it was stored, or refuse: half of its digits must not vanish."""
    if array.dtype == np.float64 and jnp.result_type(float) != np.float64:
        raise Refusal(
            f"holds {name}, which was stored in float64, which is switched off; "
            "call jax.config.update('jax_enable_x64', True) before loading"
        )
    return jnp.asarray(array)
