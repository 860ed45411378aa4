"""Loaders against files written by the tests themselves, in each published format."""

import gzip
import pickle
import struct
import tracemalloc

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from meanflow.training.data import cifar, crop_and_flip, digits, mnist, read_idx


def write_idx(path, array, compress=False):
    raw = (
        b"\x00\x00\x08" + bytes([array.ndim]) + struct.pack(f">{array.ndim}I", *array.shape) + array.tobytes()
    )
    path.write_bytes(gzip.compress(raw) if compress else raw)


def random_bytes(seed, *shape):
    return np.random.default_rng(seed).integers(0, 256, size=shape, dtype=np.uint8)


def test_digits():
    data = digits(seed=3, train=1500)
    assert data.train_x.shape == (1500, 8, 8, 1)
    assert data.test_x.shape == (297, 8, 8, 1)
    assert data.classes == 10
    assert data.train_x.dtype == np.float32
    assert data.train_x.min() == 0
    assert data.train_x.max() == 1
    np.testing.assert_array_equal(data.train_x, digits(seed=3).train_x)
    assert not np.array_equal(data.train_y, digits(seed=4).train_y)
    np.testing.assert_array_equal(data.flat().test_x, data.test_x.reshape(297, 64))
    # the split loses and repeats nothing
    both = np.concatenate([data.train_x, data.test_x]).reshape(1797, -1)
    other = np.concatenate([digits(9).train_x, digits(9).test_x]).reshape(1797, -1)
    np.testing.assert_array_equal(np.sort(both.sum(1)), np.sort(other.sum(1)))
    with pytest.raises(ValueError, match="train must be < 1797"):
        digits(train=1797)


@pytest.mark.parametrize("compress", [False, True])
def test_mnist(tmp_path, compress):
    suffix = ".gz" if compress else ""
    images, labels = random_bytes(0, 7, 5, 4), random_bytes(1, 7) % 10
    for stem, rows in (("train", slice(0, 5)), ("t10k", slice(5, 7))):
        write_idx(tmp_path / f"{stem}-images-idx3-ubyte{suffix}", images[rows], compress)
        write_idx(tmp_path / f"{stem}-labels-idx1-ubyte{suffix}", labels[rows], compress)
    data = mnist(tmp_path)
    np.testing.assert_allclose(data.train_x[..., 0], images[:5] / 255, rtol=1e-6)
    np.testing.assert_array_equal(data.test_y, labels[5:])


def test_mnist_errors(tmp_path):
    with pytest.raises(FileNotFoundError, match="train-images-idx3-ubyte"):
        mnist(tmp_path)
    (tmp_path / "bad").write_bytes(b"PK\x03\x04")
    with pytest.raises(ValueError, match="not an idx file"):
        read_idx(tmp_path / "bad")
    write_idx(tmp_path / "short", random_bytes(0, 4, 3))
    (tmp_path / "short").write_bytes((tmp_path / "short").read_bytes()[:-1])
    with pytest.raises(ValueError, match="announces shape"):
        read_idx(tmp_path / "short")


@pytest.mark.parametrize("classes", [10, 100])
@pytest.mark.parametrize("binary", [False, True])
def test_cifar(tmp_path, classes, binary):
    folder = tmp_path / f"cifar-{classes}-batches"  # also found one level down
    folder.mkdir()
    names = [*(f"data_batch_{i}" for i in range(1, 6)), "test_batch"] if classes == 10 else ["train", "test"]
    rows, labels = {}, {}
    for seed, name in enumerate(names):
        rows[name], labels[name] = random_bytes(seed, 3, 3072), random_bytes(seed + 50, 3) % classes
        if binary:
            coarse = [] if classes == 10 else [np.full((3, 1), 7, np.uint8)]
            raw = np.concatenate([*coarse, labels[name][:, None], rows[name]], axis=1)
            (folder / f"{name}.bin").write_bytes(raw.tobytes())
        else:
            key = b"labels" if classes == 10 else b"fine_labels"
            batch = {b"data": rows[name], key: [int(v) for v in labels[name]], b"batch_label": b"x"}
            (folder / name).write_bytes(pickle.dumps(batch, protocol=2))
    data = cifar(tmp_path, classes)
    assert data.train_x.shape == (15 if classes == 10 else 3, 32, 32, 3)
    first = rows[names[0]][1]
    # red plane first, rows of 32 within it
    for channel, i, j in ((0, 0, 5), (2, 31, 31), (1, 4, 7)):
        value = first[channel * 1024 + i * 32 + j] / 255
        assert data.train_x[1, i, j, channel] == pytest.approx(value, rel=1e-6)
    np.testing.assert_array_equal(data.test_y, labels[names[-1]])


def test_cifar_errors(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"data_batch_1 or data_batch_1\.bin"):
        cifar(tmp_path)
    with pytest.raises(ValueError, match="classes must be one of"):
        cifar(tmp_path, 20)
    for name in ("train", "test"):
        (tmp_path / name).write_bytes(pickle.dumps({b"data": random_bytes(0, 2, 3072)}, protocol=2))
    with pytest.raises(ValueError, match="lacks 'fine_labels'"):
        cifar(tmp_path, 100)
    (tmp_path / "train").write_bytes(pickle.dumps({b"data": print}, protocol=2))
    with pytest.raises(ValueError, match="only numpy arrays"):
        cifar(tmp_path, 100)


def test_crop_and_flip(key):
    images = np.random.default_rng(0).random((300, 5, 6, 2)) + 1
    out = np.asarray(jax.jit(crop_and_flip, static_argnums=2)(key, jnp.asarray(images), 1))
    padded = np.pad(images, ((0, 0), (1, 1), (1, 1), (0, 0)))
    seen = set()
    for image, source in zip(out, padded, strict=True):
        windows = {
            (i, j, f): source[i : i + 5, j : j + 6][:, :: (-1 if f else 1)] for i, j, f in np.ndindex(3, 3, 2)
        }
        matches = [which for which, window in windows.items() if np.array_equal(window, image)]
        assert len(matches) == 1
        seen.add(matches[0])
    assert len(seen) == 18  # every corner, mirrored and not
    np.testing.assert_array_equal(
        np.sort(crop_and_flip(key, jnp.asarray(images), 0).ravel()), np.sort(images.ravel())
    )


class Payload:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return (open, (str(self.path), "w"))


def test_a_batch_that_would_run_code_is_refused(tmp_path):
    trace = tmp_path / "it ran"
    for seed, name in enumerate(["train", "test"]):
        batch = {b"data": random_bytes(seed, 3, 3072), b"fine_labels": Payload(trace)}
        (tmp_path / name).write_bytes(pickle.dumps(batch))
    with pytest.raises(ValueError, match="only numpy arrays are read"):
        cifar(tmp_path, 100)
    assert not trace.exists()


BOMBS = {
    # numpy.ndarray((2^31,)), numpy's own constructor of empty arrays, a place far out in the list of objects,
    "ndarray": b"cnumpy\nndarray\n((I2147483648\nttR.",
    "reconstruct": b"cnumpy.core.multiarray\n_reconstruct\n(cnumpy\nndarray\n(I2147483648\ntS'b'\ntR.",
    "memo": b"N" + b"r\xff\xff\xff\x01" + b".",
    # a text of 2^31 bytes that are not there, and lists in lists
    "bytearray": b"\x80\x05\x96" + struct.pack("<Q", 2**31) + b".",
    "lists": b"]q\x00(K\x01"
    + b"".join(b"]q%c(" % k + b"h%c" % (k - 1) * 16 + b"e" for k in range(1, 9))
    + b".",
}


@pytest.mark.parametrize("name", BOMBS)
def test_a_small_pickle_does_not_fill_the_memory(name, tmp_path):
    whole = pickle.dumps({b"data": random_bytes(0, 2, 3072), b"fine_labels": [1, 2]}, protocol=2)
    bomb = BOMBS[name]
    if name == "lists":
        bomb = b"}(U\x04data" + bomb[:-1] + b"U\x0bfine_labels](K\x01eu."
    (tmp_path / "train").write_bytes(bomb)
    (tmp_path / "test").write_bytes(whole)
    tracemalloc.start()
    try:
        with pytest.raises(ValueError, match="not a python CIFAR-100 batch"):
            cifar(tmp_path, 100)
        assert tracemalloc.get_traced_memory()[1] < 2**23
    finally:
        tracemalloc.stop()


def test_a_small_gzip_file_does_not_fill_the_memory(tmp_path):
    zeros = struct.pack(">4BI", 0, 0, 8, 1, 2**27) + bytes(2**27)
    (tmp_path / "bomb.gz").write_bytes(gzip.compress(zeros, 1))
    del zeros
    tracemalloc.start()
    try:
        with pytest.raises(ValueError, match="more than a file of its size can hold"):
            read_idx(tmp_path / "bomb.gz")
        assert tracemalloc.get_traced_memory()[1] < 2**23
    finally:
        tracemalloc.stop()
    # data of one value are packed as tightly, and are read
    write_idx(tmp_path / "labels.gz", np.zeros(60_000, np.uint8), compress=True)
    assert not read_idx(tmp_path / "labels.gz").any()


def test_damaged_files_are_named(tmp_path):
    """Files that are cut, or have bytes changed, are read as they are or refused with ValueError and their name."""
    rng = np.random.default_rng(0)
    whole = {b"data": random_bytes(0, 2, 3072), b"fine_labels": [1, 2]}
    (tmp_path / "test").write_bytes(pickle.dumps(whole))
    (tmp_path / "train").write_bytes(pickle.dumps(whole))
    write_idx(tmp_path / "images.gz", random_bytes(1, 4, 3, 2), compress=True)
    readers = {"train": lambda path: cifar(path.parent, 100), "images.gz": read_idx}
    for name, read in readers.items():
        path = tmp_path / name
        raw = path.read_bytes()
        refused = 0
        for case in range(16):
            broken = bytearray(raw[: rng.integers(len(raw))] if case % 2 else raw)
            for _ in range(3 * (1 - case % 2)):
                broken[rng.integers(min(len(raw), 90))] = rng.integers(256)
            path.write_bytes(bytes(broken))
            try:
                read(path)
            except ValueError as problem:
                refused += 1
                assert name in str(problem)
        assert refused >= 8
        path.write_bytes(raw)
        read(path)
