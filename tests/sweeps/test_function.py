"""Any function of a key over a grid, against the loop it replaces."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import xarray

import meanflow as mf
from meanflow.sweeps import sweep_function
from meanflow.sweeps._store import StoreError


def walk(key, sigma, kind):
    noise = jax.random.normal(key, (3,)) if kind == "normal" else jax.random.uniform(key, (3,))
    return {"path": jnp.cumsum(sigma * noise), "end": {"square": jnp.sum(noise) ** 2}}


GRID = {"axes": {"sigma": (0.5, 2.0), "kind": ("normal", "uniform")}, "seeds": (0, 5)}


def test_sweep_equals_loop():
    ds = sweep_function(walk, dims={"path": ["place"]}, key=7, execution=mf.sweeps.Execution(chunk=3), **GRID)
    assert ds.path.dims == ("sigma", "kind", "seed", "place") and ds.end_square.dims == (
        "sigma",
        "kind",
        "seed",
    )
    for sigma in GRID["axes"]["sigma"]:
        for kind in GRID["axes"]["kind"]:
            for seed in GRID["seeds"]:
                alone = walk(jax.random.fold_in(jax.random.key(7), seed), sigma, kind)
                cell = ds.sel(sigma=sigma, kind=kind, seed=seed)
                np.testing.assert_allclose(cell.path, alone["path"], rtol=1e-12)
                np.testing.assert_allclose(cell.end_square, alone["end"]["square"], rtol=1e-12)


def test_stored_resumed_and_refused(tmp_path):
    ds = sweep_function(walk, store=tmp_path / "run", **GRID)
    xarray.testing.assert_identical(mf.sweeps.load(tmp_path / "run"), ds)
    xarray.testing.assert_identical(sweep_function(walk, store=tmp_path / "run", **GRID), ds)
    with pytest.raises(StoreError, match="function"):
        sweep_function(lambda key, sigma, kind: sigma, store=tmp_path / "run", **GRID)


def draw(key, sigma):
    return sigma * jax.random.normal(key, (3,))


@pytest.mark.bad_input
@pytest.mark.parametrize(
    ("function", "change", "message"),
    [
        (3, {}, "function must be a function, got 3"),
        (lambda key: 1.0, {}, r"does not take \['sigma'\]"),
        (lambda key, sigma: {"sigma": sigma}, {}, "called like an axis"),
        (draw, {"dims": {"value": ["sigma"]}}, "called like an axis"),
        (draw, {"dims": {"value": ["k", "l"]}}, "must name 1 axes"),
        (draw, {"dims": {"vale": ["k"]}}, "among .'value'.*got 'vale'"),
        (draw, {"seeds": 0}, "seeds must be an integer >= 1"),
        (draw, {"key": "abc"}, "key must be an integer"),
    ],
)
@pytest.mark.bad_input
def test_bad_arguments(function, change, message):
    with pytest.raises((ValueError, TypeError), match=message):
        sweep_function(function, **{"axes": {"sigma": (1.0, 2.0)}} | change)
