"""The same sweep on 1, 2 and 4 simulated devices, and in two processes."""

import json
import os
import pathlib
import socket
import subprocess
import sys

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from meanflow.sweeps import load
from meanflow.sweeps._devices import compile_batched
from meanflow.sweeps._sweep import FunctionCell

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


CONFIG = """
flow = {name = "lifted", alpha = "sqrt"}
data = {x = [-1.0, -0.5, 0.0, 0.5, 1.0], y = [1.0, -1.0, 1.0, 0.0, 1.0], weights = "sum"}
grid = {widths = [5, 6], deltas = [-inf, 0, inf]}
[run]
steps = 6
every = 3
step = {kernel = 0.2, every = 3}
chunk = 3
observe = ["predictions", "angle_displacement"]
"""


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


def free_port():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def same(path, reference, devices):
    found = dict(np.load(path))
    assert int(found.pop("devices")) == devices
    for name, value in found.items():
        np.testing.assert_allclose(value, reference[name], rtol=1e-12, atol=1e-12, err_msg=name)


@pytest.mark.parametrize(
    ("across", "along"),
    [(2, 1), (2, 2), *(pytest.param(*shape, marks=pytest.mark.slow) for shape in ((4, 1), (1, 4)))],
)
def test_devices_do_not_change_the_result(tmp_path, reference, across, along):
    finish(start(across * along, tmp_path / "out", across, along))
    same(tmp_path / "out-0.npz", reference, across * along)


def test_two_processes_do_not_change_the_result(tmp_path, reference):
    port = free_port()
    shared = (port, tmp_path / "store")
    finish(*(start(1, tmp_path / "out", 2, 1, number, *shared) for number in (0, 1)))
    for number in (0, 1):
        same(tmp_path / f"out-{number}.npz", reference, 2)
    assert len(list((tmp_path / "store" / "chunks").glob("*.npz"))) == 2
    # resumed: both processes get what process 0 has stored
    finish(*(start(1, tmp_path / "twice", 2, 1, number, port, tmp_path / "store") for number in (0, 1)))
    same(tmp_path / "twice-1.npz", reference, 2)


def test_the_command_runs_as_a_team_on_slurm(tmp_path, reference):
    """What srun sets for two tasks of one job is all that the processes are told."""
    (tmp_path / "config.toml").write_text(CONFIG)
    job = {
        "SLURM_JOB_ID": "7",
        "SLURM_STEP_NODELIST": "127.0.0.1",
        "SLURM_NTASKS": "2",
        "JAX_COORDINATOR_PORT": str(free_port()),
        "PYTHONPATH": str(ROOT),
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": "",
    }
    start = "from meanflow.cli import main; main()"
    command = (
        "sweep",
        str(tmp_path / "config.toml"),
        "--store",
        str(tmp_path / "run"),
        "--distributed",
        "--json",
    )
    team = [
        subprocess.Popen(
            [sys.executable, "-W", "ignore", "-c", start, *command],
            env=os.environ | job | {"SLURM_PROCID": str(k), "SLURM_LOCALID": str(k)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for k in (0, 1)
    ]
    told = [process.communicate(timeout=200) for process in team]
    assert [process.returncode for process in team] == [0, 0], told
    assert json.loads(told[0][0].splitlines()[-1])["cells"] == 6 and '"cells"' not in told[1][0]
    stored = load(tmp_path / "run")
    for name in ("energy", "predictions", "angle_displacement", "result"):
        np.testing.assert_allclose(stored[name], reference[name], rtol=1e-12, atol=1e-12, err_msg=name)


def test_cells_that_factorize_batches_run_one_by_one():
    """Batched LAPACK calls of several devices, or several of one program, wait for each other for ever."""

    def cell(key, scale):
        matrix = jax.random.normal(key, (3, 3))
        symmetric = scale * (matrix + matrix.T)
        return {
            "spectrum": jnp.linalg.eigvalsh(symmetric),
            "lengths": jnp.linalg.svd(matrix, compute_uv=False),
        }

    function = FunctionCell(cell, {})
    keys = jax.random.key_data(jax.random.split(jax.random.key(0), 4))
    inputs = {"key": keys, "axes": {"scale": jnp.arange(1.0, 5.0)}}
    chosen = compile_batched(function, None, inputs, None)
    arrays, _ = eqx.partition((function, None, inputs), eqx.is_array)
    found = chosen(arrays)
    matrices = [np.asarray(jax.random.normal(k, (3, 3))) for k in jax.random.split(jax.random.key(0), 4)]
    expected = [np.linalg.eigvalsh(s * (a + a.T)) for s, a in zip(range(1, 5), matrices, strict=True)]
    np.testing.assert_allclose(found["spectrum"], expected, rtol=1e-10, atol=1e-12)
    assert "while" in chosen.as_text()


@pytest.mark.slow
@pytest.mark.parametrize("devices", [2, 4])
def test_spectra_in_sweeps_over_devices_do_not_hang(tmp_path, devices):
    finish(start(devices, tmp_path / "out", "spectra"))
    found = dict(np.load(tmp_path / "out-spectra.npz"))
    np.testing.assert_allclose(found["spectrum"], found["expected"], rtol=1e-8, atol=1e-10)
    assert np.all(np.isfinite(found["gram"]))


@pytest.mark.parametrize(
    ("how", "kind", "words"),
    [
        ("1-memory", "ValueError", "one cell is too large"),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (
                ("1-error", "OSError", "the disk is gone"),
                ("0-progress", "ZeroDivisionError", "division by zero"),
                ("0-interrupt", "KeyboardInterrupt", ""),
                ("1-interrupt", "KeyboardInterrupt", ""),
            )
        ),
    ],
)
def test_an_error_of_one_process_ends_both(tmp_path, how, kind, words):
    """Whatever happens to one process, the other hears of it, with the message, within 30 seconds."""
    port = free_port()
    finish(*(start(1, tmp_path / "out", "failing", how, number, port) for number in (0, 1)))
    told = [(tmp_path / f"out-{number}.txt").read_text().split(" ", 2) for number in (0, 1)]
    failed = int(how[0])
    assert told[failed][2].startswith(kind) and words in told[failed][2]
    assert f"on process {failed}: {kind}" in told[1 - failed][2] and words in told[1 - failed][2]
    since = max(float(begun) for begun, _, _ in told) if "interrupt" in how else float(told[failed][1])
    assert all(abs(float(ended) - since) < 30 for _, ended, _ in told)
    assert not list((tmp_path / "out-store" / "claims").iterdir())
