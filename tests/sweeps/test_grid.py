import itertools

import numpy as np
import pytest

from meanflow.sweeps._grid import Grid, group_widths, make_chunks, make_groups, padding_waste


def brute_force(widths, waste):
    """Number of groups and stored particles of the best partition, over all partitions into intervals."""
    order, real = sorted(widths), sum(widths)
    best = None
    for cuts in itertools.product([0, 1], repeat=len(order) - 1):
        bounds = [0, *(k + 1 for k, c in enumerate(cuts) if c), len(order)]
        padded = sum(order[b - 1] * (b - a) for a, b in zip(bounds, bounds[1:], strict=False))
        if padded - real <= waste * padded:
            best = min(best or (99, 0), (len(bounds) - 1, padded))
    return best


@pytest.mark.parametrize("waste", [0.0, 0.05, 0.15, 0.4])
def test_width_groups_are_the_best_partition(waste):
    rng = np.random.default_rng(int(100 * waste))
    for _ in range(20):
        widths = [int(w) for w in rng.choice(np.arange(1, 400), size=rng.integers(1, 9), replace=False)]
        groups = group_widths(widths, waste)
        assert sorted(itertools.chain(*groups)) == sorted(widths)
        padded = sum(max(g) * len(g) for g in groups)
        assert (len(groups), padded) == brute_force(widths, waste)


def test_stored_sizes_fit_the_devices():
    grid = Grid({"width": (5, 8, 30), "seed": (0, 1)})
    assert [g.size for g in make_groups(grid, [], 0.4, 4, ["width", "seed"])] == [8, 32]


def test_chunks_hold_every_cell_once_in_one_length_per_group():
    grid = Grid({"width": (10, 100, 110), "kind": ("x", "y"), "delta": (0.0, 1.0, 2.0), "seed": (0, 1)})
    groups = make_groups(grid, ["kind"], 0.15, 1, ["width", "seed", "delta"])
    assert len(groups) == 4  # two sizes, two programs each
    assert padding_waste(groups, grid) <= 0.15
    for chunk in (None, 1, 4, 5, 100):
        chunks = make_chunks(groups, chunk, 400)
        assert sorted(c for piece in chunks for c in piece.cells) == list(range(grid.size))
        assert len({piece.name for piece in chunks}) == len(chunks)
        for number in range(len(groups)):
            (length,) = {piece.length for piece in chunks if piece.group == number}
            assert all(len(p.cells) <= length <= (chunk or 10**6) for p in chunks if p.group == number)
    fixed = {
        dict(g.fixed)["kind"] for g in groups for c in g.cells if grid.at(c)["kind"] == dict(g.fixed)["kind"]
    }
    assert fixed == {"x", "y"}


@pytest.mark.parametrize("devices", [1, 2, 4])
def test_chunks_leave_no_device_idle(devices):
    grid = Grid({"width": (300,), "seed": tuple(range(22))})
    groups = make_groups(grid, [], 0.0, 1, ["seed"])
    chunks = make_chunks(groups, None, 400, devices)  # one cell of 300 fits on a device
    assert {c.length for c in chunks} == {devices}
    assert [c for piece in chunks for c in piece.cells] == list(range(22))


def test_cells_are_found_by_their_values():
    grid = Grid({"width": (3, 5), "delta": (-np.inf, 0.0, np.inf), "seed": (7,)})
    for cell in range(grid.size):
        assert grid.find(**grid.at(cell)) == cell
    assert grid.find(width=5, delta=np.inf) == grid.find(width=5, delta=np.inf, seed=7)
    with pytest.raises(ValueError, match="delta must be one of"):
        grid.find(width=3, delta=2.0)
    with pytest.raises(ValueError, match="must name axes among"):
        grid.find(width=3, depth=2.0)


@pytest.mark.bad_input
@pytest.mark.parametrize(
    ("widths", "waste", "message"),
    [
        ([], 0.1, "at least one"),
        ([0], 0.1, ">= 1"),
        ([3, 3], 0.1, "distinct"),
        ([3], 1.0, "waste"),
        ([2.5], 0.1, "integer"),
    ],
)
def test_bad_widths(widths, waste, message):
    with pytest.raises(ValueError, match=message):
        group_widths(widths, waste)
