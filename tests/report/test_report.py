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

import meanflow as mf
from meanflow.flows._observables import ON_REQUEST
from meanflow.report import write_report
from meanflow.report._page import _digest, contents

X = jnp.linspace(-1.0, 1.0, 5)
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
            "neurons": ON_REQUEST["neurons"],
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
    np.testing.assert_allclose(shown["f"][1][2][3], runs.predictions.values[1, 2, 0, 3], rtol=1e-4, atol=1e-9)
    turn = runs.angle_displacement.isel(step=-1).median("seed")
    np.testing.assert_allclose(shown["maps"]["angle_displacement"]["values"], turn, rtol=1e-4)
    assert [n is None for n in shown["neurons"]["u"][0][0][0]] == [False] * 4 + [True]
    settings = dict(shown["provenance"])
    assert settings["settings.step"] == "0.05" and "versions.jax" in settings and "data_hash" in settings
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
    assert shown["columns"]["name"] == "all" and "f" not in shown and len(shown["energy"]) == 2


HARNESS = """
const draws = {}, listeners = {}, errors = [];
const context = (id) => new Proxy({}, {
  get: (t, k) => k in t ? t[k] : (...a) => { (draws[id] ||= []).push([String(k), ...a]); },
  set: (t, k, v) => { t[k] = v; return true; },
});
const make = (id) => ({
  id, textContent: "", value: "0", max: "0", width: 500, height: 400, children: [], context: context(id),
  getContext() { return this.context; }, add(o) { this.children.push(o); }, append(...o) { this.children.push(...o); },
  addEventListener(kind, f) { listeners[id + ":" + kind] = f; },
  getBoundingClientRect: () => ({ left: 0, top: 0, width: 500 }),
});
const nodes = {};
globalThis.document = { getElementById: (id) => nodes[id] ||= make(id), createElement: () => make("new") };
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
const first = slide(0), last = slide(4), again = slide(0);
listeners["play:click"](); globalThis.tick(); const played = nodes.now.textContent; listeners["play:click"]();
listeners["map:click"]({ clientX: 120, clientY: 340 }); const clicked = nodes.now.textContent;
console.log(JSON.stringify({ first, last, again, played, clicked, stopped: globalThis.tick === null }));
"""


@pytest.mark.skipif(shutil.which("node") is None, reason="needs node to run the script of the page")
def test_the_script_reacts_to_slider_clicks_and_play(page, tmp_path):
    harness = tmp_path / "harness.js"
    harness.write_text(HARNESS)
    done = subprocess.run(["node", str(harness), str(page)], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    seen = json.loads(done.stdout)
    assert seen["first"] == seen["again"] and seen["first"][1] != seen["last"][1]
    assert seen["first"][0].startswith("step = 0,") and seen["last"][0].startswith("step = 20,")
    assert seen["played"].startswith("step = 5,") and seen["stopped"]
    assert "width 4, delta -inf" in seen["clicked"]


TRAP = "window.onerror = (m) => { document.documentElement.dataset.error = m; };"
PROBE = """
document.documentElement.dataset.ran = "no";
window.pwned = () => { document.documentElement.dataset.ran = "yes"; };
window.addEventListener("load", () => {
  const look = () => ["function", "neurons"].map((id) => document.getElementById(id).toDataURL());
  const slider = document.getElementById("time"), before = look();
  slider.value = slider.max; slider.dispatchEvent(new Event("input"));
  const after = look();
  document.body.dataset.moved = String(before.every((b, k) => b !== after[k]));
  document.body.dataset.foreign = document.querySelectorAll("img, iframe, a, svg").length;
  document.body.dataset.scripts = document.querySelectorAll("script").length;
  document.body.dataset.heading = document.querySelector("h1").textContent;
  document.body.dataset.settings = document.querySelectorAll("#provenance dt").length;
});
"""


def opened(page, folder):
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
        *("--enable-logging=stderr", "--virtual-time-budget=3000", "--dump-dom"),
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
    assert said(shown, "moved") == "true" and said(shown, "heading") == "a < b"
    assert "CONSOLE" not in log  # where chromium writes what a page logs, errors above all


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
    assert said(shown, "moved") == "true" and int(said(shown, "settings")) > 1  # the page is not blank
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
    assert said(shown, "foreign") == "1" and said(shown, "ran") == "no" and said(shown, "moved") == "true"
    assert "Content Security Policy" in log
