"""The reference holds every public name, each with a docstring and an example that runs."""

import importlib
import pathlib
import re
import subprocess
import sys

import pytest

import meanflow

ROOT = pathlib.Path(__file__).parent.parent.parent
sys.path.insert(0, str(ROOT / "docs"))
check, names = (importlib.import_module(name) for name in ("check", "names"))
sys.path.remove(str(ROOT / "docs"))

PAGES = {room: ROOT / "docs" / "reference" / f"{room.split('.')[-1]}.md" for room in names.ROOMS}
PAGES["report"] = PAGES["plots"]


def test_every_room_is_listed():
    packages = {p.parent.name for p in names.PACKAGE.glob("*/__init__.py")} - {"cli"}  # called from the shell
    assert packages == {room for room in names.ROOMS if "." not in room}
    for room, page in PAGES.items():
        assert f"<!-- reference: meanflow.{room} -->" in page.read_text(), page.name


def test_every_public_name_has_a_docstring_and_an_example():
    assert list(check.undocumented()) == []


def test_names_read_from_the_sources_are_those_of_the_package():
    for room in names.ROOMS:
        package = importlib.import_module(f"meanflow.{room}")
        for public in names.exported(f"meanflow.{room}"):
            assert getattr(package, public.name) is not None
    listed = {public.name for public in names.exported("meanflow")} | {"sweep", "phase_diagram"}
    public = [name for name in dir(meanflow) if not name.startswith("_")]
    assert {
        n for n in public if getattr(getattr(meanflow, n), "__module__", "").startswith("meanflow")
    } <= listed


def test_site_builds_without_warnings_and_stands_alone(tmp_path):
    pytest.importorskip("zensical", reason="the docs extra is not installed")
    # a copy of what the site is made of, so that runs side by side do not share a folder
    for part in ("docs", "meanflow", "papers", "notebooks"):
        (tmp_path / part).symlink_to(ROOT / part)
    for part in ("mkdocs.yml", "README.md"):
        (tmp_path / part).write_text((ROOT / part).read_text())
    for command in (["docs/pages.py", "out/pages"], ["-m", "zensical", "build", "--strict"]):
        done = subprocess.run([sys.executable, *command], cwd=tmp_path, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
    site = tmp_path / "out" / "site"
    assert len(list(site.rglob("*.html"))) > 30
    assert "<math" in (site / "learn" / "equation.html").read_text()
    for page in site.rglob("*.html"):
        loaded = re.findall(
            r"<(?:script|img|link|iframe)\b[^>]*?\b(?:src|href)=\"(https?:[^\"]*)\"", page.read_text()
        )
        assert not loaded, f"{page.name} loads {loaded}"
    reference = "".join(p.read_text() for p in (site / "reference").glob("*.html"))
    assert "&amp;lt;" not in reference  # formulas are not escaped twice
    for room in names.ROOMS:
        for public in names.exported(f"meanflow.{room}"):
            if not public.is_module:
                assert f'id="{public.path}"' in reference, public.path
