"""The benchmark's numbers that do not depend on the clock: agreement and memory."""

import pytest

from meanflow_benchmarks import kernels as bench


def test_small_run():
    out = bench.speed(widths=(2, 64, 64, 1), samples=32, repeats=2, peers=())
    assert out["relative_difference"] < 1e-5
    assert out["memory_ratio"] < 2.0
    assert {"structured", "jacobian", "vs_jacobian", "of_matmul_peak"} <= set(out)
    chunked = bench.large(samples=300, widths=(2, 64, 64, 1), chunk=64)
    assert chunked["difference_of_first_rows"] < 1e-5


@pytest.mark.slow
def test_memory_at_full_size():
    assert bench.speed(repeats=2, peers=())["memory_ratio"] < 2.0
    out = bench.large()
    assert out["peak_bytes"] < 2e9
    assert out["difference_of_first_rows"] < 1e-4


def test_flop_count():
    # one hidden layer: forward 2 T (d N + N), backward 2 T N, Grams 2 T^2 (d + N + N + 1)
    assert bench._structured_flops((3, 10, 1), 5) == 2 * 5 * 40 + 2 * 5 * 10 + 2 * 25 * 24


def test_networks_of_the_table(monkeypatch):
    from meanflow_benchmarks import networks

    small = {
        "cnn": lambda: networks.convolutional(3, 4, 2),
        "batch norm, 3": lambda: networks.dense(3, (2, 4, 1), 0),
    }
    monkeypatch.setattr(bench, "NETWORKS", small)
    out = bench.of_networks(tuple(small), ("trace",), repeats=1, peers=())
    assert all(out[f"{name}, trace: seconds"] > 0 for name in small)
    assert {f"{name}, trace: method" for name in small} <= set(out)


def test_coupled_networks():
    out = bench.coupled(repeats=1, samples=(4, 3), width=32)
    assert set(out) == {f"{n}: {k}" for n in ("dense", "conv") for k in ("seconds", "by hand", "jacobian")}
    assert min(out.values()) > 0
