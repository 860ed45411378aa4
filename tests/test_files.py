"""The format of arrays on disk: what was written comes back, and any other file is refused by name."""

import io
import tracemalloc
import zipfile

import numpy as np
import pytest

from meanflow._files import read_arrays, write_arrays

ARRAYS = {"x": np.arange(6.0).reshape(2, 3), "flag": np.array(True), "a.b": np.arange(3, dtype=np.int32)}


@pytest.fixture
def path(tmp_path):
    write_arrays(tmp_path / "some.npz", ARRAYS, {"about": [1, None]}, form=2)
    return tmp_path / "some.npz"


def read(path):
    return read_arrays(path, form=2, writer="tests")


def member(array, shape=None):
    """The bytes of an array in an archive, with another shape in its header."""
    stream = io.BytesIO()
    np.lib.format.write_array(stream, array)
    content = stream.getvalue()
    if shape is None:
        return content
    stream = io.BytesIO()
    head = {"descr": array.dtype.str, "fortran_order": False, "shape": shape}
    np.lib.format.write_array_header_1_0(stream, head)
    return stream.getvalue() + array.tobytes()


def rewrite(path, change, compression=zipfile.ZIP_STORED):
    """Write the archive anew after ``change`` has edited its members."""
    with zipfile.ZipFile(path) as archive:
        members = {name: archive.read(name) for name in archive.namelist()}
    change(members)
    with zipfile.ZipFile(path, "w", compression) as archive:
        for name, content in members.items():
            archive.writestr(name, content)


def test_what_was_written_comes_back(path):
    arrays, header = read(path)
    assert arrays.keys() == ARRAYS.keys() and header["about"] == [1, None]
    for name, array in ARRAYS.items():
        assert arrays[name].dtype == array.dtype and arrays[name].flags.writeable
        np.testing.assert_array_equal(arrays[name], array)
    with np.load(path) as file:  # any npz reader can read it
        np.testing.assert_array_equal(file["x"], ARRAYS["x"])


def test_another_format_is_named_with_its_version(path):
    with pytest.raises(
        ValueError, match=r"some.npz has format 2, written by meanflow .*; this version reads format 3"
    ):
        read_arrays(path, form=3, writer="tests")


@pytest.mark.parametrize("seed", range(4))
def test_flipped_and_cut_files_are_refused_or_whole(path, seed):
    whole, rng = path.read_bytes(), np.random.default_rng(seed)
    for _ in range(100):
        flipped = bytearray(whole)
        flipped[rng.integers(len(whole))] ^= int(rng.integers(1, 256))
        for content in (bytes(flipped), whole[: rng.integers(len(whole))]):
            path.write_bytes(content)
            try:
                arrays, _ = read(path)
            except ValueError as problem:
                assert "some.npz" in str(problem)
            else:  # dates of the archive, for instance
                assert all(np.array_equal(arrays[name], array) for name, array in ARRAYS.items())


HEADERS = {
    "nothing": b"",
    "text": b"text",
    "no text": b"\xff\xfe",
    "number": b"3",
    "list": b"[]",
    "null": b"null",
    "empty": b"{}",
    "deep": b"[" * 100_000,
    "huge number": b'{"format": ' + b"9" * 10_000 + b"}",
    "no digest": b'{"format": 2}',
    "digest of nothing": b'{"format": 2, "digest": null}',
    "digest of a list": b'{"format": 2, "digest": [1]}',
    "other digest": b'{"format": 2, "digest": "0123456789abcdef"}',
    "format of text": b'{"format": "2"}',
    "format of a list": b'{"format": [2]}',
    "no format": b'{"digest": "0123456789abcdef"}',
    "versions of text": b'{"format": 1, "versions": "new"}',
    "versions of a list": b'{"format": 1, "versions": ["meanflow"]}',
    "version of a number": b'{"format": 1, "versions": {"meanflow": 7}}',
    "not a number": b'{"format": NaN}',
}


@pytest.mark.parametrize("kind", HEADERS)
def test_edited_headers_are_refused(path, kind):
    header = member(np.frombuffer(HEADERS[kind], np.uint8))
    rewrite(path, lambda members: members.update({"header.npy": header}))
    with pytest.raises(ValueError, match="some.npz"):
        read(path)


MEMBERS = {
    "missing": lambda m: m.pop("x.npy"),
    "one more": lambda m: m.update({"y.npy": m["x.npy"]}),
    "another name": lambda m: m.update({"y.npy": m.pop("x.npy")}),
    "another value": lambda m: m.update({"x.npy": member(ARRAYS["x"] + 1)}),
    "another shape": lambda m: m.update({"x.npy": member(ARRAYS["x"].reshape(3, 2))}),
    "another type": lambda m: m.update({"x.npy": member(ARRAYS["x"].astype(np.float32))}),
    "text": lambda m: m.update({"x.npy": b"text"}),
    "nothing": lambda m: m.update({"x.npy": b""}),
    "texts": lambda m: m.update({"x.npy": member(np.array(["a"]))}),
    "objects": lambda m: m.update({"x.npy": member(np.array([None]))}),
    "records": lambda m: m.update({"x.npy": member(np.zeros(2, [("a", float)]))}),
    "more than there is": lambda m: m.update({"x.npy": member(ARRAYS["x"], shape=(2**28,))}),
    "overflowing": lambda m: m.update({"x.npy": member(ARRAYS["x"], shape=(2**62, 2**62))}),
    "negative": lambda m: m.update({"x.npy": member(ARRAYS["x"], shape=(-2, -3))}),
    "less than there is": lambda m: m.update({"x.npy": member(ARRAYS["x"], shape=(2,))}),
    "no header": lambda m: m.pop("header.npy"),
}


@pytest.mark.parametrize("kind", MEMBERS)
def test_edited_arrays_are_refused(path, kind):
    rewrite(path, MEMBERS[kind])
    with pytest.raises(ValueError, match="some.npz is damaged"):
        read(path)


def peak(path):
    """The memory that it takes to refuse a file."""
    tracemalloc.start()
    try:
        with pytest.raises(ValueError, match="some.npz is damaged"):
            read(path)
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def test_a_small_file_cannot_ask_for_much_memory(path):
    zeros = member(np.zeros(10**6))
    rewrite(path, lambda members: members.update({"y.npy": zeros}), zipfile.ZIP_DEFLATED)
    assert path.stat().st_size < 2e4 and peak(path) < 1e6
    # sizes in the directory of the archive are only promises
    content = bytearray(path.read_bytes())
    rewrite(path, lambda members: members.update({"y.npy": b"few"}))
    content = bytearray(path.read_bytes())
    place = content.rindex(b"y.npy") - 46  # of its entry in the directory
    for offset in (20, 24):
        content[place + offset : place + offset + 4] = (2**31 - 1).to_bytes(4, "little")
    path.write_bytes(bytes(content))
    assert peak(path) < 1e6


def test_a_name_may_be_there_once(path):
    with pytest.warns(UserWarning, match="Duplicate"), zipfile.ZipFile(path, "a") as archive:
        archive.writestr("x.npy", member(ARRAYS["x"]))
    with pytest.raises(ValueError, match="some.npz is damaged.*two arrays of one name"):
        read(path)


def test_what_is_no_json_leaves_no_file(tmp_path):
    with pytest.raises(TypeError):
        write_arrays(tmp_path / "a.npz", ARRAYS, {"about": object()}, form=1)
    with pytest.raises(ValueError, match="Object arrays"):
        write_arrays(tmp_path / "a.npz", {"x": np.array([None])}, {}, form=1)
    assert list(tmp_path.iterdir()) == []
