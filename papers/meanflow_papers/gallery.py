"""The gallery: one page in Markdown and one self-contained HTML file about the reproduced figures and tables."""

import base64
import html
import json
import re
from importlib import resources
from pathlib import Path

from meanflow_papers.record import Check, Record, Summary

MARKS = {
    "passed": "pass",
    "explained": "pass, with explained failures",
    "failed": "FAIL",
    "error": "ERROR",
    "needs data": "needs local data",
    "out of scope": "out of scope",
}


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
        if record["criteria"]:
            verdicts[record["verdict"]] = verdicts.get(record["verdict"], 0) + 1
    ran = sum(bool(r["criteria"] or r["figures"]) for r in records)
    kinds = ", ".join(f"{n} {v}" for v, n in verdicts.items())
    passed = sum(c["passed"] for c in checks)
    minutes = f"{summary['cpu_seconds'] / 60:.0f} processor minutes"
    return (
        f"{ran} of {len(records)} entries ran at {summary['size']} size, in {minutes}: {passed} of {len(checks)} "
        f"criteria passed. Claims of the papers: {kinds}. {_versions(records)}"
    )


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
    """pass, FAIL, or the explained failure with its reason."""
    if check["passed"]:
        return "pass"
    return f"fails, explained: {check['explanation']}" if check["explanation"] else "FAIL"


def markdown(summary: Summary) -> str:
    """The page as Markdown."""
    lines = ["# Gallery", "", headline(summary), ""]
    lines += ["| name | what | claim | criteria | seconds |", "|---|---|---|---|---|"]
    for r in summary["experiments"]:
        link = f"[{r['name']}](#{_anchor(r['name'])})"
        lines.append(f"| {link} | {_cell(r['title'])} | {r['verdict']} | {_score(r)} | {r['seconds']:.0f} |")
    for paper, title in summary["papers"].items():
        records = [r for r in summary["experiments"] if r["paper"] == paper]
        if records:
            lines += ["", f"## {paper}: {title}"]
        for r in records:
            lines += ["", f'<a id="{_anchor(r["name"])}"></a>', f"### {r['name']}: {r['title']}", ""]
            image = next((f for f in r["figures"] if f.endswith(".png")), None)
            lines += [f"![{r['name']}]({image})", ""] if image else []
            lines += [f"- **{label}:** {text}" for label, text in _facts(r)]
            if r["criteria"]:
                lines += ["", "| criterion | measured | allowed | |", "|---|---|---|---|"]
            for c in r["criteria"]:
                cells = (c["name"], value(c["value"]), interval(c["low"], c["high"]), outcome_of(c))
                lines.append("| " + " | ".join(_cell(u) for u in cells) + " |")
    return "\n".join(lines) + "\n"


def _facts(r: Record) -> list[tuple[str, str]]:
    facts = [
        ("Paper's claim", r["claim"]),
        ("Where it stands", r["verdict"] if r["criteria"] else ""),
        ("What we found", r["finding"]),
        ("Set-up", r["setup"]),
        ("Result", f"{MARKS[r['status']]}{', ' + r['reason'] if r['reason'] else ''}"),
        ("Arguments", ", ".join(f"{k}={json.dumps(v)}" for k, v in r["arguments"].items())),
        ("Error", r["error"].strip().splitlines()[-1] if r["error"] else ""),
    ]
    return [(label, text) for label, text in facts if text]


def _score(r: Record) -> str:
    if not r["criteria"]:
        return MARKS[r["status"]] if r["status"] != "passed" else "none"
    score = f"{sum(c['passed'] for c in r['criteria'])}/{len(r['criteria'])}"
    return f"{score} {MARKS[r['status']]}"


def _anchor(name: str) -> str:
    return "e-" + _plain(name)


def _plain(text: str) -> str:
    """Return text that can stand in an attribute of HTML: a record is a file, and a file must not bring code."""
    return re.sub(r"[^\w-]", "-", text)


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


def _body(summary: Summary, folder: Path) -> str:
    e = html.escape
    rows = "".join(
        f'<tr class="{_tone(r)}"><td><a href="#{_anchor(r["name"])}">{e(r["name"])}</a></td><td>{e(r["title"])}</td>'
        f'<td><span class="verdict {_tone(r, True)}">{e(r["verdict"])}</span></td><td>{e(_score(r))}</td>'
        f"<td>{r['seconds']:.0f}</td></tr>"
        for r in summary["experiments"]
    )
    head = "<tr><th>name</th><th>what</th><th>claim</th><th>criteria</th><th>seconds</th></tr>"
    parts = [f"<p>{e(headline(summary))}</p><table>{head}{rows}</table>"]
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
    facts = "".join(f"<dt>{e(label)}</dt><dd>{_emphasized(e(text))}</dd>" for label, text in _facts(r))
    checks = "".join(
        f'<tr class="{"" if c["passed"] else "explained" if c["explanation"] else "bad"}"><td>{e(c["name"])}</td>'
        f'<td class="number">{value(c["value"])}</td><td class="number">{interval(c["low"], c["high"])}</td>'
        f"<td>{e(outcome_of(c))}</td></tr>"
        for c in r["criteria"]
    )
    head = "<tr><th>criterion</th><th>measured</th><th>allowed</th><th></th></tr>"
    table = f"<table>{head}{checks}</table>" if checks else ""
    return (
        f'<section id="{_anchor(r["name"])}"><h3>{e(r["name"])}: {e(r["title"])}</h3>{picture}'
        f"<dl>{facts}</dl>{table}</section>"
    )


def _emphasized(text: str) -> str:
    """Return escaped text with its *stressed* words as HTML; a lone asterisk stays."""
    return re.sub(r"\*(\w+)\*", r"<em>\1</em>", text)


def _tone(r: Record, verdict: bool = False) -> str:
    if verdict:
        return _plain(r["verdict"])
    return {"failed": "bad", "error": "bad", "explained": "explained"}.get(r["status"], "")
