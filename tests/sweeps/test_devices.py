"""The same sweep on 1, 2 and 4 simulated devices, and in two processes."""

import os
import pathlib
import socket
import subprocess
import sys

import numpy as np
import pytest

WORKER = pathlib.Path(__file__).with_name("devices_worker.py")
ROOT = WORKER.parents[2]


def start(devices, *arguments):
    environment = os.environ | {
        "XLA_FLAGS": f"--xla_force_host_platform_device_count={devices}",
        "PYTHONPATH": str(ROOT),
        "JAX_PLATFORMS": "cpu",
    }
    command = [sys.executable, "-W", "ignore", str(WORKER), *map(str, arguments)]
    return subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True)


def finish(*processes):
    try:
        for process in processes:
            _, errors = process.communicate(timeout=200)
            assert process.returncode == 0, errors[-3000:]
    finally:
        for process in processes:
            process.kill()


@pytest.fixture(scope="module")
def reference(tmp_path_factory):
    out = tmp_path_factory.mktemp("devices") / "one"
    finish(start(1, out, 1, 1))
    return dict(np.load(f"{out}-0.npz"))


def same(path, reference, devices):
    found = dict(np.load(path))
    assert int(found.pop("devices")) == devices
    for name, value in found.items():
        np.testing.assert_allclose(value, reference[name], rtol=1e-12, atol=1e-12, err_msg=name)


@pytest.mark.parametrize(("across", "along"), [(2, 1), (2, 2)])
def test_devices_do_not_change_the_result(tmp_path, reference, across, along):
    finish(start(across * along, tmp_path / "out", across, along))
    same(tmp_path / "out-0.npz", reference, across * along)


def test_two_processes_do_not_change_the_result(tmp_path, reference):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    shared = (port, tmp_path / "store")
    finish(*(start(1, tmp_path / "out", 2, 1, number, *shared) for number in (0, 1)))
    for number in (0, 1):
        same(tmp_path / f"out-{number}.npz", reference, 2)
    assert len(list((tmp_path / "store" / "chunks").glob("*.zarr"))) == 2
    # resumed: both processes get what process 0 has stored
    finish(*(start(1, tmp_path / "twice", 2, 1, number, port, tmp_path / "store") for number in (0, 1)))
    same(tmp_path / "twice-1.npz", reference, 2)
