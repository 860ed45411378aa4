"""The gallery: one page in Markdown and one self-contained HTML file about the reproduced figures and tables."""

import base64
import html
import json
import re
from importlib import resources
from pathlib import Path

from meanflow_papers.entry import VERDICTS
from meanflow_papers.record import Check, Record, Summary

MARKS = {
    "passed": "all of our criteria hold",
    "explained": "our criteria hold, but for explained ones",
    "failed": "a criterion of ours FAILS",
    "error": "ERROR",
    "needs data": "not run, needs local data",
    "out of scope": "not run, out of scope",
}
READING = (
    "Two things are kept apart. The claim is what the paper says, quoted word by word with its place (formulas without "
    "the commands of TeX), and one of these words says where it stands: {words}. The criteria are ours: they test what "
    "we found, so that all of them hold where a claim is refuted and the finding is right."
)
HEADINGS = ("name", "what", "the paper's claim", "our criteria", "processor seconds")


def write_gallery(summary: Summary, folder: str | Path) -> tuple[Path, Path]:
    """Writes ``gallery.md`` (figures beside it) and ``gallery.html`` (figures inside) and returns both paths.

    Args:
        summary: what ``reproduce`` returned, or ``summary.json`` read back.
        folder: holds the figures the summary names.
    """
    folder = Path(folder)
    text, page = folder / "gallery.md", folder / "gallery.html"
    text.write_text(markdown(summary))
    template = resources.files("meanflow_papers").joinpath("gallery.html").read_text()
    page.write_text(template.replace("{{body}}", _body(summary, folder)))
    return text, page


def headline(summary: Summary) -> str:
    """One sentence about the whole: how many ran, how many criteria passed, where claims stand."""
    records = summary["experiments"]
    checks = [c for r in records for c in r["criteria"]]
    verdicts: dict[str, int] = {}
    for record in records:
        if _ran(record):
            verdicts[record["verdict"]] = verdicts.get(record["verdict"], 0) + 1
    ran = sum(map(_ran, records))
    kinds = ", ".join(f"{n} {v}" for v, n in verdicts.items())
    passed = sum(c["passed"] for c in checks)
    minutes = f"{summary['cpu_seconds'] / 60:.0f} processor minutes"
    return (
        f"{ran} of {len(records)} entries ran at {summary['size']} size, in {minutes}: {passed} of our "
        f"{len(checks)} criteria hold. Claims of the papers, in the entries that ran: {kinds}. {_versions(records)}"
    )


def reading() -> str:
    """How to read the page: what the words about claims mean, and what the criteria test."""
    return READING.format(words="; ".join(f"*{word}*, {meaning}" for word, meaning in VERDICTS.items()))


def _ran(r: Record) -> bool:
    return bool(r["criteria"] or r["figures"])


def _stands(r: Record) -> str:
    """Where the claim stands; nothing is said of an entry that was not run."""
    return r["verdict"] if _ran(r) else "–"


def _versions(records: list[Record]) -> str:
    found = records[0]["versions"] if records else {}
    return ", ".join(f"{name} {version}" for name, version in found.items())


def interval(low: float | None, high: float | None) -> str:
    """The allowed interval in words; None is an open end."""
    if low is None:
        return "any" if high is None else f"≤ {high:.4g}"
    if high is None:
        return f"≥ {low:.4g}"
    return f"= {low:.4g}" if low == high else f"{low:.4g} .. {high:.4g}"


def value(number: float | None) -> str:
    """A measured value; None stands for what JSON cannot hold."""
    return "not finite" if number is None else f"{number:.4g}"


def outcome_of(check: Check) -> str:
    """holds, FAILS, or the explained failure with its reason."""
    if check["passed"]:
        return "holds"
    return f"fails, explained: {check['explanation']}" if check["explanation"] else "FAILS"


def markdown(summary: Summary) -> str:
    """The page as Markdown."""
    lines = ["# Gallery", "", headline(summary), "", reading(), ""]
    lines += [f"| {' | '.join(HEADINGS)} |", "|---|---|---|---|---|"]
    for r in summary["experiments"]:
        link = f"[{r['name']}](#{_anchor(r['name'])})"
        lines.append(f"| {link} | {_cell(r['title'])} | {_stands(r)} | {_score(r)} | {_spent(r)} |")
    for paper, title in summary["papers"].items():
        records = [r for r in summary["experiments"] if r["paper"] == paper]
        if records:
            lines += ["", f"## {paper}: {title}"]
        for r in records:
            lines += ["", f'<a id="{_anchor(r["name"])}"></a>', f"### {r['name']}: {_raised(r['title'])}", ""]
            image = next((f for f in r["figures"] if f.endswith(".png")), None)
            lines += [f"![{r['name']}]({image})", ""] if image else []
            lines += [f"- **{label}:** {_raised(text)}" for label, text in _facts(r)]
            if r["criteria"]:
                lines += ["", "| criterion | measured | allowed | |", "|---|---|---|---|"]
            for c in r["criteria"]:
                cells = (c["name"], value(c["value"]), interval(c["low"], c["high"]), outcome_of(c))
                lines.append("| " + " | ".join(_cell(u) for u in cells) + " |")
    return "\n".join(lines) + "\n"


def _facts(r: Record) -> list[tuple[str, str]]:
    facts = [
        ("The paper", r["claim"]),
        ("Its claim is", f"{r['verdict']}: {VERDICTS.get(r['verdict'], '')}" if _ran(r) else ""),
        ("What we found", r["finding"]),
        ("Set-up", r["setup"]),
        (
            "Criteria",
            f"{MARKS[r['status']]}{', ' + r['reason'] if r['reason'] else ''}"
            if r["criteria"] or not _ran(r)
            else "",
        ),
        ("Arguments", ", ".join(f"{k}={json.dumps(v)}" for k, v in r["arguments"].items())),
        ("Error", r["error"].strip().splitlines()[-1] if r["error"] else ""),
    ]
    return [(label, text) for label, text in facts if text]


def _score(r: Record) -> str:
    if not r["criteria"]:
        return MARKS[r["status"]] if r["status"] != "passed" else "none"
    note = {"explained": ", the rest explained", "failed": ", FAIL"}.get(r["status"], "")
    return f"{sum(c['passed'] for c in r['criteria'])} of {len(r['criteria'])} hold{note}"


def _spent(r: Record) -> str:
    return f"{r['cpu_seconds']:.0f}" if _ran(r) else ""


def _anchor(name: str) -> str:
    return "e-" + _plain(name)


def _plain(text: str) -> str:
    """Return text that can stand in an attribute of HTML: a record is a file, and a file must not bring code."""
    return re.sub(r"[^\w-]", "-", text)


def _cell(text: str) -> str:
    return _raised(text.replace("|", "\\|").replace("\n", " "))


def _raised(text: str) -> str:
    """Return text in which m^-1/2 and m^(1/2) are exponents, in HTML, which Markdown takes too."""
    return re.sub(
        r"\^(?:\(([^()]*)\)|\{([^{}]*)\}|([-+]?[\w.]+(?:/\w+)?))",
        lambda m: f"<sup>{m[1] or m[2] or m[3]}</sup>",
        text,
    )


def _body(summary: Summary, folder: Path) -> str:
    e = html.escape
    rows = "".join(
        f'<tr class="{_tone(r)}"><td><a href="#{_anchor(r["name"])}">{e(r["name"])}</a></td>'
        f"<td>{_rich(r['title'])}</td>"
        f'<td><span class="verdict {_tone(r, True)}">{e(_stands(r))}</span></td><td>{e(_score(r))}</td>'
        f"<td>{_spent(r)}</td></tr>"
        for r in summary["experiments"]
    )
    head = "<tr>" + "".join(f"<th>{heading}</th>" for heading in HEADINGS) + "</tr>"
    parts = [f"<p>{e(headline(summary))}</p><p>{_rich(reading())}</p><table>{head}{rows}</table>"]
    for paper, title in summary["papers"].items():
        records = [r for r in summary["experiments"] if r["paper"] == paper]
        if records:
            parts.append(f"<h2>{e(paper)}: {e(title)}</h2>")
        parts += [_card(r, folder) for r in records]
    return "\n".join(parts)


def _card(r: Record, folder: Path) -> str:
    e = html.escape
    image = next((f for f in r["figures"] if f.endswith(".png")), None)
    picture = ""
    if image and (folder / image).exists():
        raw = (folder / image).read_bytes()
        wide = int.from_bytes(raw[16:20], "big") * 96 // 150  # its width in inches, on a screen
        coded = base64.b64encode(raw).decode()
        picture = (
            f'<figure><img width="{wide}" alt="{e(r["title"])}" src="data:image/png;base64,{coded}"></figure>'
        )
    facts = "".join(f"<dt>{e(label)}</dt><dd>{_rich(text)}</dd>" for label, text in _facts(r))
    checks = "".join(
        f'<tr class="{"" if c["passed"] else "explained" if c["explanation"] else "bad"}"><td>{_rich(c["name"])}</td>'
        f'<td class="number">{value(c["value"])}</td><td class="number">{interval(c["low"], c["high"])}</td>'
        f"<td>{_rich(outcome_of(c))}</td></tr>"
        for c in r["criteria"]
    )
    head = "<tr><th>criterion</th><th>measured</th><th>allowed</th><th></th></tr>"
    table = f"<table>{head}{checks}</table>" if checks else ""
    return (
        f'<section id="{_anchor(r["name"])}"><h3>{e(r["name"])}: {_rich(r["title"])}</h3>{picture}'
        f"<dl>{facts}</dl>{table}</section>"
    )


def _rich(text: str) -> str:
    """Return text as HTML, escaped, with its *stressed* words, `code` and exponents; a lone asterisk stays."""
    marked = re.sub(r"\*(\w[\w ]*)\*", r"<em>\1</em>", html.escape(text))
    return _raised(re.sub(r"`([^`]*)`", r"<code>\1</code>", marked))


def _tone(r: Record, verdict: bool = False) -> str:
    if verdict:
        return _plain(r["verdict"]) if _ran(r) else ""
    return {"failed": "bad", "error": "bad", "explained": "explained"}.get(r["status"], "")
