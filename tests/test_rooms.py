"""Rooms import one way: a module may import its own room and the rooms before it, never one behind it."""

import ast
import importlib.util
import json
import pathlib
import re
import subprocess
import sys
import tomllib

import pytest

import meanflow

ROOT = pathlib.Path(__file__).parent.parent
PACKAGE = ROOT / "meanflow"
spec = importlib.util.spec_from_file_location("names", ROOT / "docs" / "names.py")
names = importlib.util.module_from_spec(spec)
spec.loader.exec_module(names)
FOUNDATION = (
    "_properties",
    "_boundary",
    "_matrices",
    "_numerics",
    "_loops",
    "files",
    "_trees",
    "_identity",
    "_lazy",
    "_module",
    "_observable",
    "_reuse",
    "activations",
)
ROOMS = (
    *("measures", "geometry", "layers", "kernels", "flows", "solvers", "transport", "depth", "training"),
    *("univariate", "sweeps", "plots", "report", "cli"),
)
ORDER = {name: 0 for name in FOUNDATION} | {name: k + 1 for k, name in enumerate(ROOMS)}


def imported_rooms(path):
    """Rooms of this package that a file imports, wherever in the file; imports for the type checker count too."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module == "meanflow":
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("meanflow."):
            yield node.module.split(".")[1]
        elif isinstance(node, ast.Import):
            yield from (a.name.split(".")[1] for a in node.names if a.name.startswith("meanflow."))


@pytest.mark.parametrize("room", [*FOUNDATION, *ROOMS])
def test_imports_go_one_way(room):
    files = [PACKAGE / f"{room}.py"] if room in FOUNDATION else sorted((PACKAGE / room).rglob("*.py"))
    assert files
    late = {
        (path.name, name)
        for path in files
        if path.exists()
        for name in imported_rooms(path)
        if name not in ORDER or ORDER[name] > ORDER[room]
    }
    assert not late


def test_every_folder_is_a_room():
    assert {p.parent.name for p in PACKAGE.glob("*/__init__.py")} == set(ROOMS)


def test_import_loads_no_heavy_package():
    """Half a second of every notebook's start: diffrax, flax and the like load when they are first used."""
    heavy = ("diffrax", "optax", "flax", "ott", "xarray", "matplotlib", "sklearn", "optimistix")
    code = f"import sys, meanflow; print([name for name in {heavy} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_version_is_that_of_the_distribution():
    assert meanflow.__version__ == re.search(
        r"^version: (.*)$", (ROOT / "CITATION.cff").read_text(), re.M
    ).group(1)
    assert f"## {meanflow.__version__}" in (ROOT / "CHANGELOG.md").read_text()


@pytest.mark.parametrize("folder", [".", "papers", "benchmarks"])
def test_each_distribution_brings_its_license_and_its_types(folder):
    """A wheel holds what lies beside its own pyproject.toml, which no editable installation shows."""
    project = tomllib.loads((ROOT / folder / "pyproject.toml").read_text())
    (package,) = project["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]
    assert (ROOT / folder / package / "py.typed").is_file()
    assert project["project"]["license-files"] == ["LICENSE"]
    assert (ROOT / folder / "LICENSE").read_text() == (ROOT / "LICENSE").read_text()


def code_of(path):
    """The Python of a file: a module, the python blocks of a page, or the code cells of a notebook."""
    text = path.read_text()
    if path.suffix == ".md":
        return "\n".join(re.findall(r"^```python\n(.*?)^```", text, re.DOTALL | re.MULTILINE))
    if path.suffix == ".ipynb":
        cells = [cell for cell in json.loads(text)["cells"] if cell["cell_type"] == "code"]
        return "\n".join("".join(cell["source"]) for cell in cells)
    return text


def paths_used(code):
    """Dotted paths below ``meanflow`` that code imports, or reads from a module of it: ``mf.kernels.empirical_ntk``."""
    tree, bound = ast.parse(code), {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.split(".")[0] == "meanflow":
                    yield alias.name
                    bound[alias.asname or "meanflow"] = alias.name if alias.asname else "meanflow"
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "meanflow":
            for alias in node.names:
                bound[alias.asname or alias.name] = f"{node.module}.{alias.name}"
                yield f"{node.module}.{alias.name}"
    for node in ast.walk(tree):
        chain = []
        while isinstance(node, ast.Attribute):
            chain.insert(0, node.attr)
            node = node.value
        if chain and isinstance(node, ast.Name) and node.id in bound:
            yield ".".join((bound[node.id], *chain))


def groups():
    """What is written for users of the library: files by folder, pages and notebooks one by one."""
    found = {}
    packages = [*(ROOT / "papers" / "meanflow_papers").rglob("*.py"), *(ROOT / "scripts").glob("*.py")]
    benchmarks = (ROOT / "benchmarks" / "meanflow_benchmarks").glob("*.py")
    for path in [*packages, *(ROOT / "docs").rglob("*.py")]:
        found.setdefault(str(path.parent.relative_to(ROOT)), []).append(path)
    pages = (ROOT / "README.md", *(ROOT / "docs").rglob("*.md"), *(ROOT / "notebooks").glob("*.ipynb"))
    found |= {str(path.relative_to(ROOT)): [path] for path in (*benchmarks, *pages)}
    return dict(sorted(found.items()))


@pytest.mark.parametrize("group", groups())
def test_users_of_the_library_use_public_names_alone(group):
    private = {
        (path.name, used)
        for path in groups()[group]
        for used in paths_used(code_of(path))
        if not names.is_public(used)
    }
    assert not private


def test_what_is_loaded_once_stays():
    code = "import meanflow as mf; mf.solve; print('solve' in vars(mf), mf.solve is mf.solvers.solve)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["True", "True"]


def test_help_lists_what_users_call():
    public = {name for name in dir(meanflow) if not name.startswith("_")}
    assert {public.name for public in names.exported("meanflow")} <= public | {"Flow"}
    assert not public & {"typing", "cli"}
    missing = {name for name in public if not re.search(rf"\b{name}\b", meanflow.__doc__)}
    assert not missing


@pytest.mark.parametrize(
    ("package", "extra", "call"),
    [
        ("sklearn", "data", "mf.training.data.digits()"),
        ("ot", "transport", "mf.transport.wasserstein([[0.0, 0.0], [1.0, 0.0]], [[2.0, 0.0]])"),
        ("ott", "transport", "mf.transport.sinkhorn_divergence([[0.0]], [[1.0]])"),
    ],
)
def test_a_plain_install_names_the_extra_that_is_missing(package, extra, call):
    code = f"import sys; sys.modules[{package!r}] = None; import meanflow as mf\n"
    works = (
        "mf.transport.wasserstein([0.0, 1.0], [2.0]), mf.transport.wasserstein([[0.0, 1.0]], [[2.0, 1.0]])\n"
    )
    done = subprocess.run([sys.executable, "-c", code + works + call], capture_output=True, text=True)
    message = rf"^ModuleNotFoundError: .* needs {package}: pip install 'meanflow\[{extra}\]'$"
    assert done.returncode and re.search(message, done.stderr, re.MULTILINE)


def test_a_plain_install_has_few_dependencies():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert len(project["dependencies"]) <= 15
