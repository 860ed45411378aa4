"""``meanflow reproduce``: the catalogue is complete, runs are isolated and resumable, the pages stand alone."""

import importlib
import inspect
import json
import os
import pkgutil
import re
import shutil
import tempfile
import threading
import time
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from click.testing import CliRunner

from meanflow.cli import main
from meanflow.training._downloads import SOURCES
from meanflow_papers import Criterion, Outcome
from meanflow_papers.catalogue import CATALOGUE, PACKAGES, find
from meanflow_papers.command import with_epochs
from meanflow_papers.entry import DECLARED, VERDICTS, Entry, entry
from meanflow_papers.gallery import markdown, write_gallery
from meanflow_papers.record import Record
from meanflow_papers.reproduce import (
    Worker,
    _answers,
    _processor_seconds,
    finished,
    reproduce,
    run_entry,
    summarize,
)

CHEAP = ["002/linear-recenter", "004/figure-2"]


def invoke(*arguments):
    return CliRunner().invoke(main, ["reproduce", *arguments])


def test_catalogue_names_every_figure_and_table_of_the_papers():
    wanted = ["000/table-2", "000/E1", "000/E2", "000/E3"]
    wanted += [f"001/figure-{k}" for k in range(1, 4)]
    wanted += [f"002/figure-{k}" for k in range(2, 9)]
    wanted += ["003/figure-2", "003/figure-3", *(f"003/table-{k}" for k in range(1, 5))]
    wanted += [f"004/figure-{k}" for k in range(1, 10)]
    assert set(wanted) <= set(CATALOGUE)
    status = {name: CATALOGUE[name].status for name in wanted}
    assert {n for n, s in status.items() if s == "needs data"} == {f"003/table-{k}" for k in range(1, 4)}
    assert not any(s == "out of scope" for s in status.values())
    assert all(CATALOGUE[f"003/{name}-cifar"].status == "needs data" for name in ("table-4", "figure-3"))
    assert all(entry.reason for entry in CATALOGUE.values() if entry.status != "runnable")
    # no package brings these two
    assert not any("meanflow data" in CATALOGUE[f"003/table-{k}"].reason for k in (2, 3))


def test_catalogue_holds_every_experiment_and_only_arguments_that_exist():
    declared = [entry.compute for entry in CATALOGUE.values()]
    for package in PACKAGES:
        for module in pkgutil.iter_modules(package.__path__):
            loaded = importlib.import_module(f"{package.__name__}.{module.name}")
            for name, function in inspect.getmembers(loaded, inspect.isfunction):
                made_here = function.__module__ == loaded.__name__ and not name.startswith("_")
                if made_here and inspect.signature(function).return_annotation is Outcome:
                    assert function in declared, f"{loaded.__name__}.{name} is not in the catalogue"
    for item in CATALOGUE.values():
        assert set(item.small) <= set(item.arguments(False))
        assert set(item.full) <= set(item.arguments(True))
        assert (item.compute is None) == (item.status == "out of scope")


def test_each_entry_says_in_words_what_is_claimed_and_what_decides():
    for name, item in CATALOGUE.items():
        if item.compute is None:
            continue
        text = inspect.getdoc(item.compute)
        assert "\n\n" in text or "claim" in text, name
        assert item.setup and item.title, name


def test_a_name_is_declared_once():
    with pytest.raises(ValueError, match="two functions declare 004/figure-2"):
        entry("004/figure-2", title="")(_broken)
    assert DECLARED["004/figure-2"] is CATALOGUE["004/figure-2"]


def test_small_runs_fit_the_budget():
    """16 minutes on 2 cores; the expected times are for one core."""
    assert sum(e.minutes[0] for e in CATALOGUE.values() if e.status == "runnable") < 32


def test_names_are_globs():
    assert [e.name for e in find(["004/figure-[12]", "001/figure-3"])] == [
        "001/figure-3",
        "004/figure-1",
        "004/figure-2",
    ]
    assert len(find(["all"])) == len(CATALOGUE)
    assert invoke("005/*").exit_code == 2 and "005/*" in invoke("005/*").output
    assert invoke().exit_code == 2


def test_entries_are_checked():
    with pytest.raises(ValueError, match="verdict"):
        Entry("001/x", "", verdict="true")
    with pytest.raises(ValueError, match="paper"):
        Entry("999/x", "")


def test_list():
    text = invoke("--list").output
    assert all(name in text for name in CATALOGUE)
    rows = json.loads(invoke("001/*", "--list", "--json").output)
    assert {row["name"] for row in rows} == {e.name for e in find(["001/*"])}
    assert all(row["verdict"] in VERDICTS for row in rows)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Two cheap names and two that cannot run (the data are hidden), end to end through the command."""
    path = tmp_path_factory.mktemp("gallery")
    names = [*CHEAP, "003/table-1", "003/figure-1"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MEANFLOW_DATA", str(tmp_path_factory.mktemp("nothing")))
        result = invoke(*names, "--output", str(path), "--jobs", "0", "--format", "svg", "--json")
    assert result.exit_code == 0, result.output
    return path


def _count_epochs(folder=None, epochs=3):
    return Outcome("001/x", f"{folder}", {"epochs": epochs}, ())


def test_data_are_found_where_they_are_fetched_or_where_the_user_says(tmp_path, monkeypatch):
    item = Entry("001/x", "", _count_epochs, status="needs data", reason="no data", data="mnist")
    monkeypatch.setenv("MEANFLOW_DATA", str(tmp_path / "cache"))
    assert run_entry(item, tmp_path)["status"] == "needs data"
    for name in SOURCES["mnist"].files:
        place = tmp_path / "cache" / "mnist" / name
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_bytes(b"")
    assert run_entry(item, tmp_path)["finding"] == str(tmp_path / "cache" / "mnist")
    assert run_entry(item, tmp_path, data=str(tmp_path))["finding"] == str(tmp_path)
    assert run_entry(item, tmp_path, data=str(tmp_path / "cache"))["finding"] == str(
        tmp_path / "cache" / "mnist"
    )


def test_a_budget_of_epochs_reaches_only_entries_that_count_them():
    item = Entry("001/x", "", _count_epochs, small={"folder": "f"})
    assert with_epochs(item, 7).arguments() == {"folder": "f", "epochs": 7}
    assert with_epochs(CATALOGUE["004/figure-2"], 7) is CATALOGUE["004/figure-2"]


def test_summary_is_complete_strict_json(folder):
    def strict(constant):
        raise AssertionError(f"{constant} is not JSON")

    summary = json.loads((folder / "summary.json").read_text(), parse_constant=strict)
    assert summary["size"] == "small" and summary["unexplained"] == []
    records = {r["name"]: r for r in summary["experiments"]}
    assert list(records) == ["002/linear-recenter", "003/figure-1", "003/table-1", "004/figure-2"]
    assert summary["counts"] == {"passed": 2, "needs data": 1, "out of scope": 1}
    record = records["004/figure-2"]
    assert record["claim"] and record["finding"] and record["seconds"] > 0 and "jax" in record["versions"]
    check = record["criteria"][0]
    assert set(check) == {"name", "value", "low", "high", "passed", "explanation"}
    assert check["low"] <= check["value"] <= check["high"] and check["passed"] is True
    open_ended = [c for c in record["criteria"] if c["low"] is None or c["high"] is None]
    assert open_ended, "infinite bounds are null"
    assert "CIFAR" in records["003/table-1"]["reason"]
    assert record["arguments"] == {} and records["002/linear-recenter"]["arguments"]["width"] == 300


def test_figures_and_arrays_are_written(folder):
    for name in CHEAP:
        stem = name.replace("/", "_")
        assert (folder / "figures" / f"{stem}.png").stat().st_size > 1000
        assert (folder / "figures" / f"{stem}.svg").exists()
    with np.load(folder / "data" / "004_figure-2.npz") as arrays:
        np.testing.assert_array_equal(arrays["delta"], [-100, -1, 0, 1, 100])


def test_pages_tell_claim_and_finding_and_load_nothing(folder):
    page, text = (folder / "gallery.html").read_text(), (folder / "gallery.md").read_text()
    for part in (page, text):
        for needed in (
            "radial motion will dominate",
            "planar flow",
            "corrected",
            "needs local data",
            "out of scope",
            *VERDICTS,
        ):
            assert needed in part, needed
    assert page.count('src="data:image/png;base64,') == len(CHEAP)
    assert not re.search(r"https?://|<script|<link|@import|url\(", page)
    assert "figures/004_figure-2.png" in text


def test_pages_keep_claims_and_criteria_apart():
    """A claim is refuted and all criteria hold; nothing is said of what was not run; code and exponents are marked."""
    blank = dict.fromkeys(Record.__annotations__, "") | {
        "criteria": [],
        "figures": [],
        "arguments": {},
        "versions": {},
    }
    check = {
        "name": "slope of m^-1/2",
        "value": 1.0,
        "low": 0.0,
        "high": 2.0,
        "passed": True,
        "explanation": "",
    }
    ran = blank | {"name": "004/x", "paper": "004", "title": "t", "verdict": "refuted", "status": "passed"}
    ran |= {"criteria": [check], "cpu_seconds": 61.2, "seconds": 500.0, "claim": "“a < b” (Section 1)"}
    not_run = ran | {"name": "004/y", "status": "needs data", "reason": "run `meanflow data`", "criteria": []}
    summary = {
        "size": "small",
        "papers": {"004": "paper"},
        "cpu_seconds": 61.2,
        "experiments": [ran, not_run],
    }
    text = markdown(summary)
    assert "| [004/x](#e-004-x) | t | refuted | 1 of 1 hold | 61 |" in text and "500" not in text
    assert "| [004/y](#e-004-y) | t | – | not run, needs local data |  |" in text and "1 refuted" in text
    assert "slope of m<sup>-1/2</sup>" in text
    with tempfile.TemporaryDirectory() as place:
        page = write_gallery(summary, place)[1].read_text()
    assert "“a &lt; b” (Section 1)" in page and "run <code>meanflow data</code>" in page
    assert all(word in page and meaning in page for word, meaning in VERDICTS.items())


def test_second_run_keeps_what_is_finished(folder):
    before = (folder / "results" / "004_figure-2.json").read_text()
    again = invoke("004/figure-2", "--output", str(folder), "--jobs", "0")
    assert again.exit_code == 0 and "kept" in again.output
    assert (folder / "results" / "004_figure-2.json").read_text() == before
    entry = CATALOGUE["004/figure-2"]
    assert finished(entry, folder, full=False) and not finished(entry, folder, full=True)
    assert finished(entry, folder, False, ("png", "svg")) and not finished(entry, folder, False, ("pdf",))
    (folder / "results" / "004_figure-2.json").write_text(before[: len(before) // 2])  # killed while writing
    assert finished(entry, folder, full=False) is None
    (folder / "results" / "004_figure-2.json").write_text(before)


@pytest.mark.parametrize("text", ["", "{", "[]", "null", '{"version": 2}', '{"version": 2, "size": "small"}'])
def test_a_damaged_record_is_left_out_and_run_again(folder, tmp_path, text):
    shutil.copytree(folder / "results", tmp_path / "results")
    (tmp_path / "results" / "004_figure-2.json").write_text(text)
    assert finished(CATALOGUE["004/figure-2"], tmp_path, full=False) is None
    assert "004/figure-2" not in [r["name"] for r in summarize(tmp_path, full=False)["experiments"]]


def test_a_record_brings_no_code_into_the_gallery(folder, tmp_path):
    summary = summarize(folder, full=False)
    trap = '"><script>alert(1)</script>'
    for record in summary["experiments"]:
        record |= {name: trap for name in ("name", "title", "verdict", "finding", "reason")}
    _, page = write_gallery(summary, tmp_path)
    assert "<script>alert" not in page.read_text() and "&lt;script&gt;alert" in page.read_text()


def _outcome(*checks):
    return lambda: Outcome("004/made-up", "a finding", {"x": np.arange(3)}, checks)


def _broken():
    raise RuntimeError("no luck")


@pytest.fixture
def made_up():
    """Entries 004/good, 004/bad, 004/broken and 004/known that run made-up experiments."""
    functions = {
        "good": _outcome(Criterion("fine", 1.0, 0, 2)),
        "bad": _outcome(Criterion("fine", 1.0, 0, 2), Criterion("off", float("nan"), 0, 2)),
        "known": _outcome(Criterion("off by much", 5.0, 0, 2)),
        "broken": _broken,
    }
    known = {"known": {"explained": {"off*": "a known reason"}}}
    return {
        name: Entry(f"004/{name}", name, compute, **known.get(name, {}))
        for name, compute in functions.items()
    }


def test_a_failure_loses_nothing_else_and_sets_the_exit_code(made_up, tmp_path):
    lines = []
    summary = reproduce(made_up.values(), tmp_path, jobs=0, tell=lines.append)
    status = {r["name"][4:]: r["status"] for r in summary["experiments"]}
    assert status == {"good": "passed", "bad": "failed", "known": "explained", "broken": "error"}
    assert sorted(summary["unexplained"]) == ["004/bad", "004/broken"]
    assert "1 of 2 hold, FAIL" in (tmp_path / "gallery.md").read_text()
    assert any("no luck" in line for line in lines) and len(lines) == 4
    page = (tmp_path / "gallery.html").read_text()
    assert "a known reason" in page and "no luck" in page and "not finite" in page
    again = reproduce(made_up.values(), tmp_path, jobs=0)
    assert again["counts"] == summary["counts"]


def test_errors_run_again_but_results_do_not(made_up, tmp_path):
    for name in ("broken", "bad"):
        run_entry(made_up[name], tmp_path)
    assert finished(made_up["broken"], tmp_path, False) is None
    assert finished(made_up["bad"], tmp_path, False)["status"] == "failed"


def test_full_only_explanations_do_not_excuse_a_full_run():
    entry = Entry("004/x", "", full_only={"slope*": "too small"}, explained={"share": "noise"})
    assert entry.explanation("slope, iid") == "too small" and entry.explanation("slope, iid", full=True) == ""
    assert entry.explanation("share", full=True) == "noise"


def test_missing_files_are_named(tmp_path):
    record = run_entry(CATALOGUE["003/table-1"], tmp_path, data=str(tmp_path))
    assert record["status"] == "needs data" and "data_batch_1" in record["reason"]


def test_a_process_that_dies_is_recorded(tmp_path):
    worker = Worker()
    worker.start()
    threading.Timer(0.2, worker.process.kill).start()  # long before it has imported jax
    record = worker.run(CATALOGUE["004/figure-2"], tmp_path, full=False)
    assert record["status"] == "error" and "exit code -9" in record["error"]
    assert finished(CATALOGUE["004/figure-2"], tmp_path, False) is None
    worker.stop()


def test_a_process_that_hangs_is_ended(tmp_path, monkeypatch):
    """A worker that does not compute: the time that passes counts, by a clock that runs fast."""
    monkeypatch.setattr("meanflow_papers.reproduce.PATIENCE", 0)
    monkeypatch.setattr("meanflow_papers.reproduce._processor_seconds", lambda pid: 7.0)
    worker = Worker()
    worker.start()
    real, asked, clock = worker.pipe, [], [0.0]

    def poll(seconds):
        asked.append(seconds)
        clock[0] += seconds

    monkeypatch.setattr("meanflow_papers.reproduce.time.monotonic", lambda: clock[0])
    worker.pipe = SimpleNamespace(send=real.send, recv=real.recv, poll=poll)
    record = worker.run(CATALOGUE["004/figure-2"], tmp_path, full=False)
    assert sum(asked) == 600.0 and not worker.process.is_alive()
    assert record["status"] == "error" and "no answer" in record["error"]


@pytest.mark.parametrize(("rate", "looks"), [(1.0, 60), (0.1, 600), (0.0, 60), (None, 60)])
def test_patience_counts_processor_time(monkeypatch, rate, looks):
    """At a tenth of a core a worker has ten times as long; one that stands still, or is not known, has not."""
    clock, asked = [0.0], []

    def poll(seconds):
        asked.append(seconds)
        clock[0] += seconds

    monkeypatch.setattr("meanflow_papers.reproduce.time.monotonic", lambda: clock[0])
    used = lambda pid: None if rate is None else rate * clock[0]
    monkeypatch.setattr("meanflow_papers.reproduce._processor_seconds", used)
    assert not _answers(SimpleNamespace(poll=poll), SimpleNamespace(pid=1), 600.0)
    assert len(asked) == pytest.approx(looks, abs=1)
    assert _answers(SimpleNamespace(poll=lambda seconds: True), SimpleNamespace(pid=1), 600.0)


@pytest.mark.skipif(
    _processor_seconds(os.getpid()) is None, reason="this system does not tell processor times"
)
def test_processor_time_of_a_process():
    """Against the clock of this process, which counts the same."""
    before = _processor_seconds(os.getpid()) - time.process_time()
    end = time.process_time() + 0.3
    while time.process_time() < end:
        pass
    assert _processor_seconds(os.getpid()) - time.process_time() == pytest.approx(before, abs=0.05)
    assert _processor_seconds(None) is None


@pytest.mark.slow
def test_worker_processes_run_the_catalogue(tmp_path):
    summary = reproduce(find(CHEAP), tmp_path, jobs=2)
    assert summary["counts"] == {"passed": 2}


@pytest.mark.slow
def test_cifar_from_local_files(tmp_path):
    """A folder in the format of CIFAR-10 with a few random images goes through to the figure, as to the table."""
    random = np.random.default_rng(0)
    for name in [*(f"data_batch_{k}.bin" for k in range(1, 6)), "test_batch.bin"]:
        rows = random.integers(0, 256, (40, 3073), dtype=np.uint8)
        rows[:, 0] %= 10
        (tmp_path / name).write_bytes(rows.tobytes())
    # one minibatch an epoch, two of the small blocks, and critics whose few steps check no more than that they run
    small = {"depth": 8, "blocks": (1, 2), "epochs": 4, "limit": 128, "inputs": 16, "rows": 16, "reach": 1}
    small |= {
        "critic": {"hidden": (), "filters": ((4, 2),), "steps": 20, "batch": 8},
        "presets": ("paper",),
    }
    entry = replace(CATALOGUE["003/figure-3-cifar"], small=small)
    record = run_entry(entry, tmp_path, data=str(tmp_path))
    assert record["figures"], record["error"]
    with np.load(tmp_path / "data" / "003_figure-3-cifar.npz") as arrays:
        exact, critic = (arrays[f"runs/BN, paper/{name}"] for name in ("exact", "critic"))
    assert exact.shape == critic.shape == (4, 2) and np.all(exact > 0)


def test_an_interrupt_ends_with_its_code_and_says_nothing_about_the_entry(tmp_path, monkeypatch):
    """Workers are ended, and what they were at work on is neither finished nor wrong."""

    def interrupted(*args, **kwargs):
        raise KeyboardInterrupt

    monkeypatch.setattr("meanflow_papers.reproduce.reproduce", interrupted)
    done = CliRunner().invoke(main, ["reproduce", "002/figure-1", "--output", str(tmp_path)])
    assert done.exit_code == 130 and "interrupted" in done.output and "Traceback" not in done.output
    worker, entries = Worker(), find(["002/figure-1"])
    worker.start()
    worker.stop()
    monkeypatch.setattr(worker, "_running", lambda: (worker.process, worker.pipe))
    with pytest.raises(KeyboardInterrupt):
        worker.run(entries[0], tmp_path)
    assert not list(tmp_path.rglob("*.json"))
