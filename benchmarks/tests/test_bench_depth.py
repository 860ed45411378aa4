"""The benchmark of random networks: what it claims beside seconds."""

import pytest

from meanflow_benchmarks import depth as bench


@pytest.mark.slow
def test_hundred_networks_in_one_program():
    # 100 seeds x depth 100 x width 1000 x batch 64; memory must not grow with the number of seeds
    result = bench.propagation()
    assert abs(result["mean_angle"] - result["infinite_width_angle"]) < 0.5
    # all 100 networks side by side would need 100 times one batch: 2.5 GB
    assert result["temporary_mb"] < 100
    assert result["output_mb"] < 250
