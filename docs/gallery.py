"""Write the gallery page of the site, with small pictures, from a folder that ``meanflow reproduce`` has filled.

The page is stored, since it takes an hour or more to compute what it shows. Usage: scripts/gallery FOLDER
"""

import json
import pathlib
import shutil
import sys

from PIL import Image

from meanflow_papers import gallery
from meanflow_papers.catalogue import CATALOGUE
from meanflow_papers.record import Record, Summary

DOCS = pathlib.Path(__file__).parent
PICTURES = DOCS / "images" / "gallery"
WIDTH, COLORS = 560, 48  # pixels and colors of a stored picture: about 15 kB, and labels can still be read


def thumbnail(source: pathlib.Path, name: str) -> str:
    """Store a small copy of a picture and return the link to it."""
    target = PICTURES / f"{name.replace('/', '_')}.png"
    with Image.open(source) as picture:
        picture.thumbnail((WIDTH, 2 * WIDTH))
        picture.convert("RGB").quantize(COLORS).save(target, optimize=True)
    return f"images/gallery/{target.name}"


def card(record: Record, folder: pathlib.Path) -> list[str]:
    """Return the lines about one entry: picture, claim and where it stands, finding, and the code behind it."""
    lines = [f"### {record['name']}: {record['title']}", ""]
    picture = next((f for f in record["figures"] if f.endswith(".png")), None)
    if picture and (folder / picture).exists():
        lines += [f"![{record['title']}]({thumbnail(folder / picture, record['name'])})", ""]
    if record["claim"]:
        lines += [f"The paper: {record['claim']}. **{record['verdict'].capitalize()}.**", ""]
    if record["finding"]:
        lines += [f"Found: {record['finding']}", ""]
    compute = CATALOGUE[record["name"]].compute
    if compute is not None:
        held = sum(check["passed"] for check in record["criteria"])
        code = f"papers/{compute.__module__.replace('.', '/')}.py"
        lines += [f"{held} of {len(record['criteria'])} of our criteria hold; computed by `{code}`.", ""]
    return lines


def page(summary: Summary, folder: pathlib.Path) -> str:
    """Return the page; entries that were not run have no place in it."""
    lines = ["# Gallery of the papers' figures", "", gallery.headline(summary), "", gallery.reading(), ""]
    lines += ["Made by `scripts/gallery`; `meanflow reproduce NAME` computes an entry again.", ""]
    for paper, title in summary["papers"].items():
        lines += [f"## {title}", ""]
        for record in summary["experiments"]:
            if record["paper"] == paper and record["figures"]:
                lines += card(record, folder)
    return "\n".join(lines).rstrip() + "\n"


if __name__ == "__main__":
    results = pathlib.Path(sys.argv[1])
    shutil.rmtree(PICTURES, ignore_errors=True)
    PICTURES.mkdir(parents=True)
    (DOCS / "gallery.md").write_text(page(json.loads((results / "summary.json").read_text()), results))
