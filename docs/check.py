"""Say what is wrong with the pages: broken links, missing figures, names without a page, examples without output.

The documentation's build and the tests both ask. Usage: python docs/check.py
"""

import pathlib
import re
import sys
from collections.abc import Iterator

import examples
import names

DOCS = pathlib.Path(__file__).parent
ROOT = DOCS.parent
LINK = re.compile(r"(!?)\[[^\]]*\]\(([^)\s]+)\)|src=\"([^\"]+)\"")


def pages() -> list[pathlib.Path]:
    """All pages of the site that are written by hand."""
    return [ROOT / "README.md", *sorted(DOCS.rglob("*.md"))]


def anchors(text: str) -> set[str]:
    """Anchors of a page's headings, as GitHub and the site's generator make them."""
    titles = re.findall(r"^#+ (.*)$", examples.BLOCK.sub("", text), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).strip().replace(" ", "-") for title in titles}


def links(page: pathlib.Path) -> Iterator[str]:
    """Links and pictures that lead nowhere."""
    for _, target, source in LINK.findall(examples.BLOCK.sub("", page.read_text())):
        link = target or source
        if link.startswith("https://"):
            continue
        path, _, anchor = link.partition("#")
        place = page.parent / path if path else page
        if not place.exists():
            yield f"{link} leads nowhere"
        elif anchor and anchor not in anchors(place.read_text()):
            yield f"{link} names no heading of {place.name}"


def figures(page: pathlib.Path) -> Iterator[str]:
    """Figures that an example saves and the page does not show."""
    text = page.read_text()
    for name in examples.SAVED.findall(text):
        if not (examples.IMAGES / name).exists():
            yield f"{name} is not stored: run python docs/examples.py {page.name}"
        elif f"images/{name})" not in text:
            yield f"{name} is saved by an example and not shown"


def outputs(page: pathlib.Path) -> Iterator[str]:
    """Examples that print, and show nothing of it."""
    for block, shown in examples.blocks(page.read_text()):
        if re.search(r"^(?:    )*print\(", block[2], re.MULTILINE) and shown is None:
            yield f"an example prints and shows no output: {block[2].splitlines()[0]} ..."


def undocumented() -> Iterator[str]:
    """Public names that have no docstring, or no example in it or on the page of their room."""
    for room in names.ROOMS:
        page = DOCS / "reference" / f"{'plots' if room == 'report' else room}.md"
        text = page.read_text() if page.exists() else ""
        if f"<!-- reference: meanflow.{room} -->" not in text:
            yield f"{room} has no page in the reference"
        used = "\n".join(block[2] for block, _ in examples.blocks(text))
        for public in names.exported(f"meanflow.{room}"):
            if public.is_module:
                texts = names.definitions(public.path)
                yield from (f"{public.path}.{n} has no docstring" for n, doc in texts.items() if not doc)
                continue
            home, _, name = public.path.rpartition(".")
            doc = names.definitions(home)[name]
            if not doc:
                yield f"{public.path} has no docstring"
            elif ">>>" not in doc and not re.search(rf"\b{public.name}\b", used):
                yield f"{public.path} has no example"


def problems() -> list[str]:
    """Everything that is wrong, one line each."""
    found = [
        f"{page.relative_to(ROOT)}: {text}"
        for page in pages()
        for look in (links, figures, outputs)
        for text in look(page)
    ]
    return found + list(undocumented())


if __name__ == "__main__":
    wrong = problems()
    print(*wrong, sep="\n", end="\n" if wrong else "")
    sys.exit(bool(wrong))
