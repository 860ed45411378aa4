"""Count what a reader of the library meets: lines, public names, wide signatures, comments, functions behind a call.

Usage: python scripts/count.py [--calls]     --calls also runs a few small jobs and counts the functions they enter
"""

import ast
import collections
import io
import pathlib
import sys
import tempfile
import tokenize
from collections.abc import Callable, Iterator

ROOT = pathlib.Path(__file__).parent.parent
sys.path[:0] = [str(ROOT / "docs")]
import names  # noqa: E402  (docs/names.py knows what is public)

WIDE = 8  # arguments; a function with more is listed
OURS = (str(ROOT / "meanflow"), str(ROOT / "papers" / "meanflow_papers"))


def library() -> list[pathlib.Path]:
    """Return the files of the library."""
    return sorted((ROOT / "meanflow").rglob("*.py"))


def room_of(path: pathlib.Path) -> str:
    """Return the folder of a file below the package, or "foundation" for files beside the folders."""
    parts = path.relative_to(ROOT / "meanflow").parts
    return parts[0] if len(parts) > 1 else "foundation"


def line_counts(text: str) -> collections.Counter[str]:
    """Count all lines, lines of code (no blank lines, comments or docstrings) and whole-line comments."""
    code, comments = set(), set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        kind = token.type
        if kind == tokenize.COMMENT:
            if not token.line[: token.start[1]].strip():
                comments.add(token.start[0])
        elif kind not in (
            tokenize.NL,
            tokenize.NEWLINE,
            tokenize.INDENT,
            tokenize.DEDENT,
            tokenize.ENDMARKER,
        ):
            code.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(ast.parse(text)):
        # a text that stands alone is documentation
        if (
            isinstance(node, ast.Expr)
            and isinstance(node.value, ast.Constant)
            and isinstance(node.value.value, str)
        ):
            code -= set(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    return collections.Counter(lines=text.count("\n"), code=len(code), comments=len(comments))


def wide_functions(path: pathlib.Path) -> Iterator[tuple[int, str]]:
    """Yield functions with more than ``WIDE`` arguments (self and cls do not count), as (arguments, name)."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.FunctionDef):
            taken = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
            count = sum(a.arg not in ("self", "cls") for a in taken) + bool(node.args.vararg)
            if count > WIDE:
                yield count, f"{path.relative_to(ROOT)}:{node.name}"


def module_name(path: pathlib.Path) -> str:
    """Return the dotted name of a file's module."""
    dotted = ".".join(path.relative_to(ROOT).with_suffix("").parts)
    return dotted.removesuffix(".__init__")


def public_names() -> set[str]:
    """Return every name that a user can reach without an underscore: rooms, exported names, names of public modules."""
    found = {f"meanflow.{room}" for room in names.ROOMS}
    for package in ("meanflow", *(f"meanflow.{room}" for room in names.ROOMS)):
        for name in names.exported(package):
            home = f"{package}.{name.name}"
            # the root offers the names most used a second time
            found.add(home if package != "meanflow" or name.is_module else f"root {name.name}")
    unique = {n for n in found if not n.startswith("root ")}
    last = {n.rpartition(".")[2] for n in unique}
    return unique | {n for n in found if n.startswith("root ") and n.removeprefix("root ") not in last}


def accidental_names() -> list[str]:
    """List functions and classes without an underscore, in modules without one, that nothing exports."""
    exported = set()
    for package in ("meanflow", *(f"meanflow.{room}" for room in names.ROOMS)):
        for name in names.exported(package):
            exported.add(name.path)
            if name.is_module:
                exported |= {f"{name.path}.{one}" for one in names.definitions(name.path)}
    found = []
    for path in library():
        module = module_name(path)
        if not any(part.startswith("_") for part in module.split(".")):
            found += [
                f"{module}.{one}" for one in names.definitions(module) if f"{module}.{one}" not in exported
            ]
    return found


def entered(job: Callable[[], object]) -> tuple[int, int]:
    """Run a job and return how many functions of this repository it entered, and in how many files."""
    seen = set()

    def watch(frame, event, _):  # noqa: ANN001, ANN202
        if event == "call" and frame.f_code.co_filename.startswith(OURS):
            seen.add((frame.f_code.co_filename, frame.f_code.co_qualname, frame.f_code.co_firstlineno))

    sys.setprofile(watch)
    try:
        job()
    finally:
        sys.setprofile(None)
    return len(seen), len({file for file, *_ in seen})


def jobs() -> dict[str, Callable[[], object]]:
    """Return small jobs, one for each main path through the library."""
    import jax
    import jax.numpy as jnp

    import meanflow as mf

    jax.config.update("jax_enable_x64", True)
    x = jax.random.normal(jax.random.key(0), (12, 2))
    data = mf.Dataset(x, jnp.abs(x[:, 0]))
    flow = mf.vanilla("tanh")
    cloud = flow.init(jax.random.key(1), 8, dim=2)
    line = mf.Dataset(jnp.linspace(-1.0, 1.0, 5), jnp.array([1.0, -1.0, 1.0, 0.0, 1.0]))
    params = {"w": jnp.ones((2, 4)), "v": jnp.ones((4, 3))}
    network = lambda p, u: jnp.tanh(u @ p["w"]) @ p["v"]
    folder = tempfile.mkdtemp()
    count = iter(range(100))

    def sweep() -> object:
        store = f"{folder}/{next(count)}"
        return mf.sweep(
            mf.lifted(), line, widths=[4, 8], deltas=[0.0, 1.0], seeds=2, steps=4, step=0.1, store=store
        )

    return {
        "solve": lambda: mf.solve(flow, cloud, data, 1.0),
        "descend": lambda: mf.descend(flow, cloud, data, 10, step=0.1),
        "sweep with store": sweep,
        "empirical_ntk": lambda: mf.kernels.empirical_ntk(network, params, x),
    }


def main() -> None:
    """Print all counts."""
    total: collections.Counter[str] = collections.Counter()
    rooms: dict[str, collections.Counter[str]] = collections.defaultdict(collections.Counter)
    for path in library():
        rooms[room_of(path)] += line_counts(path.read_text())
    for room, counts in sorted(rooms.items()):
        total += counts
        print(
            f"{room:12} {counts['lines']:6} lines {counts['code']:6} of code {counts['comments']:5} comments"
        )
    share = 100 * total["comments"] / total["code"]
    print(
        f"{'all':12} {total['lines']:6} lines {total['code']:6} of code, whole-line comments {share:.1f} % of code"
    )
    accidental = accidental_names()
    print(f"public names: {len(public_names())}; importable without being exported: {len(accidental)}")
    for name in accidental[:20]:
        print(f"  {name}")
    wide = sorted((found for path in library() for found in wide_functions(path)), reverse=True)
    print(f"functions with more than {WIDE} arguments: {len(wide)}")
    for count, name in wide:
        print(f"  {count} {name}")
    if "--calls" in sys.argv:
        for name, job in jobs().items():
            first, again = entered(job), entered(job)
            print(
                f"{name}: first call {first[0]} functions in {first[1]} files, next {again[0]} in {again[1]}"
            )


if __name__ == "__main__":
    main()
