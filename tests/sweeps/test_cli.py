import json

import jax
import numpy as np
import pytest
from click.testing import CliRunner

import meanflow as mf
from meanflow.cli import main

CONFIG = """
[flow]
name = "lifted"
alpha = "sqrt"
[data]
name = "sine"
points = 6
[grid]
widths = [3, 4]
deltas = [-inf, 0, inf]
seeds = 2
[run]
steps = 4
every = 2
step = {kernel = 0.2, every = 2}
observe = ["angle_displacement"]
"""


@pytest.fixture
def config(tmp_path):
    path = tmp_path / "regimes.toml"
    path.write_text(CONFIG)
    return path


def call(*arguments, code=0):
    result = CliRunner().invoke(main, [str(a) for a in arguments])
    if result.exit_code != code:
        raise AssertionError(f"exit code {result.exit_code}: {result.output}{result.exception!r}")
    return result.output


def test_sweep_show_and_resume(config, tmp_path):
    store = tmp_path / "run"
    summary = json.loads(call("sweep", config, "--store", store, "--json").splitlines()[-1])
    assert summary["cells"] == 12 and summary["failed"] == 0 and summary["programs"] == 1
    stored = mf.sweeps.load(store)
    x = np.linspace(-1, 1, 6)
    direct = mf.sweep(
        mf.lifted("sqrt"),
        mf.Dataset(x, np.sin(2 * np.pi * x), "sum"),
        widths=(3, 4),
        deltas=(-np.inf, 0.0, np.inf),
        seeds=2,
        steps=4,
        every=2,
        step=mf.KernelStep(0.2, 2),
        observe=("angle_displacement",),
    )
    np.testing.assert_array_equal(stored.energy, direct.energy)
    table = call("show", store, "--variable", "angle_displacement")
    assert "delta -inf" in table and "median over seeds" in table
    numbers = json.loads(call("show", store, "--json"))
    assert numbers["energy"]["dims"] == ["width", "delta"]
    call("show", store, "--figure", tmp_path / "map.png")
    assert (tmp_path / "map.png").stat().st_size > 1000
    chunk = next((store / "chunks").glob("*.zarr"))
    import shutil

    shutil.rmtree(chunk)
    assert "12 runs" in call("resume", store)
    np.testing.assert_array_equal(mf.sweeps.load(store).energy, direct.energy)
    # another configuration in the same directory
    assert "settings" in call("sweep", config, "--store", store, "--set", "run.clock='gradient'", code=3)


def test_flags_alone_and_failed_cells():
    base = (
        "sweep",
        "--flow",
        "radial",
        "--data",
        "square",
        "--widths",
        "3",
        "--seeds",
        "1",
        "--steps",
        "200",
    )
    assert "1 runs" in call(*base, "--step", "0.01")
    assert json.loads(call(*base, "--step", "1e9", "--json", code=1).splitlines()[-1])["failed"] == 1


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("flow.name='lifte'", "did you mean 'lifted'"),
        ("grid.width=[3]", "did you mean 'widths'"),
        ("run.clok='lazy'", "did you mean 'clock'"),
        ("data.name='cosine'", "data.name must be one of"),
        ("run.precision='float16'", "run.precision must be one of"),
        ("run.step={kappa=0.1}", "no key 'kappa'"),
        ("grid.widths=[3,3]", "distinct"),
        ("run.every=3", "every must divide steps"),
        ("sweeep.x=1", "no key 'sweeep'"),
        ("nonsense", "TABLE.KEY=VALUE"),
    ],
)
def test_bad_configurations_are_explained(config, change, message):
    assert message in call("sweep", config, "--set", change, code=2)


def test_unreadable_files_and_stores(tmp_path):
    assert "cannot be read" in call("sweep", tmp_path / "none.toml", code=2)
    (tmp_path / "bad.toml").write_text("[flow")
    assert "not valid TOML" in call("sweep", tmp_path / "bad.toml", code=2)
    assert "no config.json" in call("show", tmp_path, code=3)
    assert "no config.json" in call("resume", tmp_path, code=3)
    assert "give a CONFIG file" in call("sweep", code=2)


def test_info_and_help():
    found = json.loads(call("info", "--json"))
    assert found["versions"]["jax"] == jax.__version__ and len(found["devices"]) == jax.device_count()
    for command in ((), ("sweep",), ("resume",), ("show",), ("bench",), ("info",)):
        assert "Usage" in call(*command, "--help")
    assert "sweeps.grid_speed" in call("bench", "--list")


def test_benchmarks_take_arguments():
    small = ("deltas=3", "seeds=1", "steps=2", "samples=3", "widths=[4, 5]")
    flags = [part for setting in small for part in ("--set", setting)]
    text = call("bench", "sweeps.grid_speed", "--precision", "float64", "--json", *flags)
    numbers = json.loads(text)["sweeps.grid_speed"]
    assert numbers["programs"] == 1 and numbers["waste"] == pytest.approx(0.1)
    assert numbers["particle_steps"] * numbers["run"] == pytest.approx(9 * 3 * 2)
    assert numbers["speedup_loop"] == pytest.approx(numbers["loop"] / numbers["run"])
    assert "got 'lenght'" in call("bench", "sweeps", "--set", "lenght=3", code=2)
    assert "NAME must be one of" in call("bench", "sweep", code=2)
