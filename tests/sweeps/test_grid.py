import itertools

import numpy as np
import pytest

from meanflow.sweeps._grid import Grid, cut, group_widths, lengths, make_groups


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


def test_chunks_hold_every_cell_once_in_one_length_per_group():
    grid = Grid({"width": (10, 100, 110), "kind": ("x", "y"), "delta": (0.0, 1.0, 2.0), "seed": (0, 1)})
    groups = make_groups(grid, grid.places()["kind"], 0.15)
    assert [g.size for g in groups] == [10, 10, 110, 110]  # two sizes, two programs each
    for chunk in (None, 1, 4, 5, 100):
        chunks = cut(groups, lengths(groups, chunk, 400))
        assert sorted(c for piece in chunks for c in piece.cells) == list(range(grid.size))
        assert len({piece.name for piece in chunks}) == len(chunks)
        for number in range(len(groups)):
            (length,) = {piece.length for piece in chunks if piece.group == number}
            assert all(len(p.cells) <= length <= (chunk or 10**6) for p in chunks if p.group == number)
    assert [{grid.at(c)["kind"] for c in g.cells} for g in groups] == [{"x"}, {"y"}] * 2


@pytest.mark.parametrize("devices", [1, 2, 4])
def test_chunks_leave_no_device_idle(devices):
    grid = Grid({"width": (300,), "seed": tuple(range(22))})
    groups = make_groups(grid, [0] * 22)
    chunks = cut(groups, lengths(groups, None, 400, devices))  # one cell of 300 fits on a device
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
