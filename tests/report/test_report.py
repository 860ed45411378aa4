"""The page: right numbers, no network, and a slider that moves the pictures."""

import html
import json
import pathlib
import re
import shutil
import subprocess

import jax.numpy as jnp
import numpy as np
import pytest
import xarray

import meanflow as mf
from meanflow.report import write_report
from meanflow.report._page import _digest, contents

X = jnp.linspace(-1.0, 1.0, 5)
X6 = np.linspace(-1.0, 1.0, 6)
DATA = mf.Dataset(X, jnp.array([1.0, -1.0, 1.0, 0.0, 1.0]), "sum")


@pytest.fixture(scope="module")
def runs():
    return mf.sweep(
        mf.lifted(alpha="sqrt"),
        DATA,
        widths=(4, 5),
        deltas=(-np.inf, 0.0, np.inf),
        seeds=2,
        steps=20,
        every=5,
        step=0.05,
        observe={
            "neurons": "neurons",
            "kernel_drift": None,
            "dissipation": None,
            "displacement": None,
            "slope_variation": None,
        },
    )


@pytest.fixture(scope="module")
def page(runs, tmp_path_factory):
    return write_report(runs, tmp_path_factory.mktemp("report") / "page.html", title="a < b", samples=DATA)


def test_the_numbers_on_the_page_are_those_of_the_sweep(runs, page):
    text = page.read_text()
    shown = json.loads(re.search(r'<script id="data"[^>]*>(.*?)</script>', text, re.DOTALL).group(1))
    assert shown == contents(runs, "a < b", DATA)
    assert shown["columns"] == {"name": "delta", "values": ["-inf", "0", "inf"]}
    median = runs.energy.median("seed").values
    np.testing.assert_allclose(np.array(shown["energy"]), median, rtol=1e-4)
    f = shown["function"]["values"][1][2][3][0]
    np.testing.assert_allclose(f, runs.predictions.values[1, 2, 0, 3], rtol=1e-4, atol=1e-9)
    turn = runs.angle_displacement.isel(step=-1).median("seed")
    np.testing.assert_allclose(shown["maps"]["angle_displacement"]["values"], turn, rtol=1e-4)
    assert [n is None for n in shown["neurons"]["u"][0][0][0]] == [False] * 4 + [True]
    settings, short = dict(shown["provenance"]["all"]), dict(shown["provenance"]["short"])
    assert settings["settings.step"] == "0.05" and "versions.jax" in settings and "data_hash" in settings
    assert short["model"] == "Reduced" and short["step"] == "0.05" and len(short) < 12 < len(settings)
    assert shown["summary"] == "2 widths x 3 deltas x 2 seeds: 12 runs, 0 failed."


def test_the_page_stands_alone(page):
    text = page.read_text()
    assert "a &lt; b" in text and "{{" not in text.replace('{"', "")
    assert not re.search(r"(src|href)\s*=|https?://|@import|url\(", text)


def test_a_sweep_without_a_second_axis_or_predictions(tmp_path):
    plane = mf.Dataset(jnp.stack([X, X**2 + 0.1 * X], axis=1), DATA.y)
    runs = mf.sweep(
        mf.vanilla("tanh"), plane, widths=(3, 4), steps=2, step=0.1, observe=("angle_displacement",)
    )
    shown = contents(runs)
    assert shown["columns"]["name"] == "all" and len(shown["energy"]) == 2
    assert "predictions" in shown["function"]["reason"] and "neurons" in shown["neurons"]["reason"]


def recorded(fields, predictions, **dims):
    """A data set like those of ``sweep``: 1 width, 1 seed, with neurons and predictions of the shapes given."""
    steps = predictions.shape[0]
    lead = ("width", "seed", "step")
    values = {"energy": (lead, np.linspace(2.0, 1.0, steps)[None, None])}
    values["result"] = (("width", "seed"), np.zeros((1, 1), int))
    values["predictions"] = ((*lead, *dims), predictions[None, None])
    for name, field in fields.items():
        values[f"neurons_{name}"] = ((*lead, "particle"), field[None, None])
    return xarray.Dataset(values, {"width": [4], "seed": [0], "step": np.arange(steps), **dims})


def columns(name, b):
    return {f"{name}_{k}": b[..., k] for k in range(b.shape[-1])}


def random(*shape):
    return np.random.default_rng(0).normal(size=shape)


@pytest.mark.parametrize("outputs", [None, 3])
def test_neurons_of_two_dimensions_are_points_and_predictions_lie_over_targets(outputs):
    a, b = random(2, 4) if outputs is None else random(2, 4, outputs), random(2, 4, 2)
    f, y = (random(*lead, 7, *([outputs] if outputs else [])) for lead in ((2,), ()))
    dims = {"sample": np.arange(7)} | ({"output": np.arange(3)} if outputs else {})
    runs = recorded(columns("b", b) | (columns("a", a) if outputs else {"a": a}), f, **dims)
    shown = contents(runs, samples=(random(7, 2), y))
    size = np.linalg.norm(a, axis=-1) if outputs else np.abs(a)
    np.testing.assert_allclose(shown["neurons"]["u"][0][0], size * b[..., 0], rtol=1e-2)
    assert shown["neurons"]["labels"] == ["|a| b1", "|a| b2"] and shown["neurons"]["held"] is None
    assert shown["neurons"]["sign"][0][0] == np.sign(a[..., 0] if outputs else a).tolist()
    function = shown["function"]
    assert function["diagonal"]
    np.testing.assert_allclose(function["x"], np.atleast_2d(y.T), rtol=1e-4)
    np.testing.assert_allclose(np.array(function["values"][0][0])[1], np.atleast_2d(f[1].T), rtol=1e-4)


def test_neurons_of_many_dimensions_stand_in_their_two_leading_directions():
    """On neurons in a plane of a space of six dimensions, pictured distances are true ones and nothing is lost."""
    flat = random(3, 5, 2) * np.array([3.0, 1.0])
    plane, _ = np.linalg.qr(random(6, 2))
    whole = recorded({"a": np.ones((3, 5))} | columns("b", flat @ plane.T), random(3, 4), sample=np.arange(4))
    shown = contents(whole)["neurons"]
    seen = np.stack([np.array(shown[name][0][0]) for name in "uv"], -1)
    np.testing.assert_allclose(
        np.linalg.norm(seen[:, 1:] - seen[:, :-1], axis=-1),
        np.linalg.norm(flat[:, 1:] - flat[:, :-1], axis=-1),
        rtol=0.03,
    )
    assert shown["held"] == [[1]] and "leading direction 1" in shown["labels"][0]
    # neurons of another model: its coordinates but the amplitude
    other = recorded(
        {"a": random(3, 5), "t": random(3, 5)} | columns("b", flat), random(3, 4), sample=np.arange(4)
    )
    shown = contents(other)["neurons"]
    assert shown["labels"][0] == "leading direction 1 of (t, b)" and 0.66 < shown["held"][0][0] < 1
    alone = recorded({"t": random(3, 5)}, random(3, 4), sample=np.arange(4))
    assert "one coordinate" in contents(alone)["neurons"]["reason"]


def test_many_cells_are_quantiles_and_cells_without_numbers_say_why(runs):
    cells, steps = 40, 12
    energy = np.exp(random(cells, 3, 1, steps))
    result = np.zeros((cells, 3, 1), int)
    energy[0], result[0] = np.nan, -1
    energy[1], result[1] = np.nan, 1
    many = xarray.Dataset(
        {
            "energy": (("width", "delta", "seed", "step"), energy),
            "result": (("width", "delta", "seed"), result),
        },
        {"width": np.arange(cells), "delta": [-1.0, 0.0, 1.0], "seed": [0], "step": np.arange(steps)},
    )
    shown = contents(many)
    alive = energy[2:].reshape(-1, steps)
    np.testing.assert_allclose(shown["bands"][2], np.quantile(alive, 0.5, axis=0), rtol=1e-4)
    np.testing.assert_allclose(shown["bands"][4], np.quantile(alive, 0.95, axis=0), rtol=1e-4)
    assert [row[0] for row in shown["missing"][:3]] == ["not run", "failed", ""]
    assert shown["maps"]["energy"]["values"][0] == [None] * 3 and "3 not run yet" in shown["summary"]
    assert "bands" not in contents(runs)


HARNESS = """
const draws = {}, listeners = {}, errors = [];
const context = (id) => new Proxy({ ...measure }, {
  get: (t, k) => k in t ? t[k] : (...a) => { (draws[id] ||= []).push([String(k), ...a]); },
  set: (t, k, v) => { t[k] = v; return true; },
});
const measure = { measureText: (text) => ({ width: 8 * text.length }) };
const make = (id) => ({
  id, textContent: "", value: "0", max: "0", width: 500, height: 400, clientWidth: 500, style: {}, children: [],
  context: context(id),
  getContext() { return this.context; }, add(o) { this.children.push(o); }, append(...o) { this.children.push(...o); },
  addEventListener(kind, f) { listeners[id + ":" + kind] = f; },
  getBoundingClientRect: () => ({ left: 0, top: 0, width: 500 }),
});
const nodes = {};
globalThis.document = {
  getElementById: (id) => nodes[id] ||= make(id), createElement: () => make("new"), createTextNode: (text) => text,
};
globalThis.addEventListener = () => {};
globalThis.Option = function (a, b) { this.text = a; this.value = b; };
globalThis.setInterval = (f) => { globalThis.tick = f; return 1; };
globalThis.clearInterval = () => { globalThis.tick = null; };
const fs = require("fs");
const page = fs.readFileSync(process.argv[2], "utf8");
const scripts = [...page.matchAll(/<script[^>]*>([\\s\\S]*?)<\\/script>/g)].map((m) => m[1]);
document.getElementById("data").textContent = scripts[0];
eval(scripts[1]);
const look = () => JSON.stringify([draws["function"], draws["neurons"]]);
const take = () => { const seen = look(); draws["function"] = []; draws["neurons"] = []; return seen; };
take();
const slide = (v) => {
  nodes.time.value = String(v);
  listeners["time:input"]();
  return [nodes.now.textContent, take()];
};
const where = () => [nodes.row.value, nodes.column.value];
const first = slide(0), last = slide(4), again = slide(0);
listeners["play:click"](); globalThis.tick(); const played = nodes.now.textContent; listeners["play:click"]();
listeners["map:click"]({ clientX: 80, clientY: 150 }); const clicked = where();
nodes.column.value = "2"; listeners["column:change"](); const changed = where();
console.log(JSON.stringify({ first, last, again, played, clicked, changed, stopped: globalThis.tick === null }));
"""


@pytest.mark.skipif(shutil.which("node") is None, reason="needs node to run the script of the page")
def test_the_script_reacts_to_slider_clicks_and_play(page, tmp_path):
    harness = tmp_path / "harness.js"
    harness.write_text(HARNESS)
    done = subprocess.run(["node", str(harness), str(page)], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    seen = json.loads(done.stdout)
    assert seen["first"] == seen["again"] and seen["first"][1] != seen["last"][1]
    assert seen["first"][0] == "step = 0" and seen["last"][0] == "step = 20"
    assert seen["played"] == "step = 5" and seen["stopped"]
    assert seen["clicked"] == ["0", "0"] and seen["changed"] == ["0", "2"]


TRAP = "window.onerror = (m) => { document.documentElement.dataset.error = m; };"
PROBE = """
document.documentElement.dataset.ran = "no";
window.pwned = () => { document.documentElement.dataset.ran = "yes"; };
window.addEventListener("load", () => {
  const look = () => ["function", "neurons"].map((id) => document.getElementById(id).toDataURL());
  const slider = document.getElementById("time"), before = look();
  slider.value = "0"; slider.dispatchEvent(new Event("input"));
  const after = look();
  document.body.dataset.wide = document.documentElement.scrollWidth - document.documentElement.clientWidth;
  document.body.dataset.moved = before.map((b, k) => b !== after[k]).join();
  document.body.dataset.foreign = document.querySelectorAll("img, iframe, a, svg").length;
  document.body.dataset.scripts = document.querySelectorAll("script").length;
  document.body.dataset.heading = document.querySelector("h1").textContent;
  document.body.dataset.settings = document.querySelectorAll("#provenance dt").length;
});
"""


def opened(page, folder, width=1400):
    """What chromium shows and logs of a page to which the two scripts above are added, as its policy must allow."""
    text = page.read_text()
    for script, before in ((TRAP, "<title>"), (PROBE, "</head>")):
        text = text.replace(before, f"<script>{script}</script>{before}", 1)
        text = text.replace("script-src ", f"script-src {_digest(script)} ", 1)
    probed = folder / "probed.html"
    probed.write_text(text)
    quiet = ("background-networking", "component-update", "sync", "gpu", "quic")
    command = [
        *(
            "chromium",
            "--headless",
            "--no-sandbox",
            "--no-first-run",
            f"--user-data-dir={folder / 'profile'}",
        ),
        *(f"--disable-{name}" for name in quiet),
        *(
            "--enable-logging=stderr",
            "--virtual-time-budget=3000",
            f"--window-size={width},900",
            "--dump-dom",
        ),
    ]
    done = subprocess.run([*command, probed.as_uri()], capture_output=True, text=True, timeout=120)
    assert "data-error" not in done.stdout.split("<script", 1)[0], done.stdout[:500]
    return done.stdout, done.stderr


def said(shown, name):
    found = re.search(f'data-{name}="([^"]*)"', shown)
    return html.unescape(found.group(1)) if found else None


browser = pytest.mark.skipif(shutil.which("chromium") is None, reason="needs chromium to open the page")


@browser
def test_the_slider_moves_the_picture_in_a_browser(page, tmp_path):
    shown, log = opened(page, pathlib.Path(tmp_path))
    assert said(shown, "moved") == "true,true" and said(shown, "heading") == "a < b"
    assert "CONSOLE" not in log  # where chromium writes what a page logs, errors above all


@browser
def test_many_energies_and_huge_constants_are_drawn_on_a_phone(tmp_path):
    """200 000 energies do not fit into one call, and 4e15 has no neighbours at a distance of .2: both hung the page."""
    predictions = np.full((2, 6), 4e15)
    huge = recorded(
        {"a": np.array([[1e15], [2e15]]), "b_0": np.ones((2, 1)), "b_1": np.ones((2, 1))}, predictions, x=X6
    )
    grid = huge.isel(width=[0] * 500).assign_coords(width=np.arange(500))
    long = grid.isel(step=[0, 1] * 200).assign_coords(step=np.arange(400))
    assert long.energy.size == 200_000
    page = write_report(long, tmp_path / "page.html", title="a" * 80)
    shown, log = opened(page, pathlib.Path(tmp_path), width=390)
    assert said(shown, "moved") == "false,true" and "CONSOLE" not in log
    assert said(shown, "wide") == "0"  # nothing sticks out


HOSTILE = [
    "{{data}}<img src=x onerror=pwned()>",
    "{{script}}</title></script><script>pwned()</script>",
    "<!--<script>pwned()",
    "]]><svg onload=pwned()>' onmouseover='pwned()\" onfocus=\"pwned()",
    "\u2028pwned()//\\u003cscript\\u003e${pwned()}`",
]


def hostile_runs(runs, words):
    """The sweep with these words as the name of an axis, its labels, titles and units of observables, and settings."""
    renamed = runs.rename(delta=words).assign_coords({words: [f"{words}{k}" for k in range(3)]})
    for name in renamed.data_vars:
        renamed[name].attrs.update(long_name=words, units=words)
    return renamed.assign_attrs({words: words, "run": json.dumps({"settings": {words: words}})})


@pytest.mark.parametrize("words", HOSTILE)
def test_names_and_titles_are_data_on_the_page(runs, words, tmp_path):
    path = write_report(hostile_runs(runs, words), tmp_path / "page.html", title=words, samples=DATA)
    text = path.read_text()
    data = re.search(r'<script id="data"[^>]*>(.*?)</script>', text, re.DOTALL).group(1)
    assert not set("<>&") & set(data)
    shown = json.loads(data)
    assert shown["title"] == words and shown["columns"]["name"] == words
    assert shown["maps"]["angle_displacement"]["title"] == words
    bare = text.replace(data, "")
    assert bare.count("<script") == 2 and "<img" not in bare and "<svg" not in bare


@browser
def test_hostile_names_run_no_script_in_a_browser(runs, tmp_path):
    words = "".join(HOSTILE)
    page = write_report(hostile_runs(runs, words), tmp_path / "page.html", title=words, samples=DATA)
    shown, log = opened(page, pathlib.Path(tmp_path))
    assert said(shown, "ran") == "no" and said(shown, "foreign") == "0" and said(shown, "scripts") == "4"
    assert said(shown, "moved") == "true,true" and int(said(shown, "settings")) > 1  # the page is not blank
    assert said(shown, "heading") == words
    assert "CONSOLE" not in log


@browser
def test_the_policy_of_the_page_stops_what_is_added_to_it(page, tmp_path):
    """Were a name ever to become an element, it would still not run."""
    spoiled = tmp_path / "page.html"
    spoiled.write_text(
        page.read_text().replace("</h1>", "</h1><img src=x onerror=pwned()><script>pwned()</script>")
    )
    shown, log = opened(spoiled, pathlib.Path(tmp_path))
    assert (
        said(shown, "foreign") == "1" and said(shown, "ran") == "no" and said(shown, "moved") == "true,true"
    )
    assert "Content Security Policy" in log
