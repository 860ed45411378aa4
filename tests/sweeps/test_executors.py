"""Chunks computed by the workers of an executor: the bits of one process, also when workers are lost."""

import concurrent.futures
import multiprocessing
import os
import signal
import time

import numpy as np
import pytest
import xarray

import meanflow as mf
from meanflow.sweeps import _store as stores

pytest.importorskip("cloudpickle", reason="the extra clusters is not installed")
X = np.linspace(-1.0, 1.0, 5)


def run(store, executor=None, slow=0, **change):
    """A sweep with functions of the user that exist in this process only."""
    shift = 3.0
    settings = {"widths": (4, 5), "deltas": (0.0,), "seeds": 4, "steps": 20 + slow, "step": 1e-4} | change
    return mf.sweep(
        mf.lifted(alpha="sqrt"),
        lambda key, shape: mf.Dataset(X, X**2 + shift * shape, "sum"),
        axes={"shape": [0.0, 1.0]},
        observe={"own": lambda flow, cloud, data: mf.energy(flow, cloud, data)},
        store=store,
        execution=mf.sweeps.Execution(chunk=2, executor=executor, progress=False),
        **settings,
    )


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    return run(tmp_path_factory.mktemp("whole") / "run")


def test_a_pool_of_spawned_processes(tmp_path, whole):
    context = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(1, mp_context=context) as pool:
        xarray.testing.assert_identical(run(tmp_path / "run", pool), whole)


@pytest.mark.filterwarnings("ignore:os.fork")
def test_a_pool_of_forks_is_refused(tmp_path):
    """It would stand still for ever as soon as JAX waits for one of its threads."""
    context = multiprocessing.get_context("fork")
    with (
        concurrent.futures.ProcessPoolExecutor(1, mp_context=context) as pool,
        pytest.raises(ValueError, match=r'get_context\("spawn"\)'),
    ):
        run(tmp_path / "run", pool)


class Unsteady(concurrent.futures.ThreadPoolExecutor):
    """Loses its worker now and then, as clusters do."""

    def __init__(self, losses):
        super().__init__(2)
        self.losses, self.submitted = losses, []

    def submit(self, function, *arguments):
        self.submitted.append(arguments[-1])
        if self.submitted.count(arguments[-1]) <= self.losses:
            return super().submit(self.lose)
        return super().submit(function, *arguments)

    def lose(self):
        raise ConnectionError("the node is gone")


def test_chunks_of_lost_workers_are_submitted_again(tmp_path, whole):
    with Unsteady(2) as executor:
        xarray.testing.assert_identical(run(tmp_path / "run", executor), whole)
    assert len(executor.submitted) == 3 * 8
    with (
        Unsteady(99) as executor,
        pytest.raises(RuntimeError, match="lost with its worker .*node is gone.*kept"),
    ):
        run(tmp_path / "other", executor)


def test_errors_come_back_and_what_has_not_begun_is_cancelled(tmp_path, monkeypatch):
    with pytest.raises(ValueError, match="store must be a run directory"):
        run(None, Unsteady(0))
    with pytest.raises(ValueError, match="executor must be an executor"):
        mf.sweeps.Execution(executor=3)
    futures = []

    class Watched(concurrent.futures.ThreadPoolExecutor):
        def submit(self, *some):
            futures.append(super().submit(*some))
            return futures[-1]

    def full(*some):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(stores, "write_arrays", full)
    with Watched(1) as executor, pytest.raises(stores.StoreError, match="chunk .*No space left"):
        run(tmp_path / "run", executor)
    monkeypatch.undo()
    assert any(future.cancelled() for future in futures)

    def interrupt(done, total):
        raise KeyboardInterrupt

    futures.clear()
    with Watched(1) as executor, pytest.raises(KeyboardInterrupt):
        execution = mf.sweeps.Execution(chunk=1, executor=executor, progress=interrupt)
        mf.sweep(
            *(mf.canonical(), mf.Dataset(X, X, "sum")),
            widths=[3],
            seeds=20,
            steps=2,
            step=0.1,
            store=tmp_path / "two",
            execution=execution,
        )
    assert any(future.cancelled() for future in futures)


@pytest.mark.slow
def test_dask_with_a_worker_killed_in_the_middle(tmp_path):
    distributed = pytest.importorskip("distributed", reason="the extra clusters is not installed")
    slow = {"slow": 200_000}
    whole = run(tmp_path / "whole", **slow)
    cluster = distributed.LocalCluster(n_workers=2, threads_per_worker=1, dashboard_address=None)
    with cluster, distributed.Client(cluster) as client:
        pids = client.run(os.getpid)

        def kill():
            until = time.monotonic() + 100
            while not list((tmp_path / "run").glob("chunks/0*")) and time.monotonic() < until:
                time.sleep(0.01)
            os.kill(next(iter(pids.values())), signal.SIGKILL)

        with concurrent.futures.ThreadPoolExecutor(1) as other:
            killed = other.submit(kill)
            found = run(tmp_path / "run", client.get_executor(), **slow)
            killed.result()
        assert set(client.run(os.getpid).values()) != set(pids.values())
    xarray.testing.assert_identical(found, whole)


@pytest.mark.slow
def test_submitit(tmp_path, whole):
    submitit = pytest.importorskip("submitit", reason="the extra clusters is not installed")
    executor = submitit.AutoExecutor(tmp_path / "log", cluster="local")
    executor.update_parameters(timeout_min=5)
    xarray.testing.assert_identical(run(tmp_path / "run", executor), whole)
