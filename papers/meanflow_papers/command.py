"""The command ``meanflow reproduce``, registered as an entry point of the package."""

import json
import os
from dataclasses import replace
from pathlib import Path

import click

from meanflow.cli import guard
from meanflow_papers.catalogue import find
from meanflow_papers.entry import PAPERS, Entry

UNEXPLAINED = 1  # exit code


def _list(entries: list[Entry], full: bool, as_json: bool) -> None:
    """Print the entries by paper, with their expected minutes, or as JSON."""
    rows = [
        {
            "name": e.name,
            "status": e.status,
            "verdict": e.verdict,
            "minutes": e.minutes[full],
            "title": e.title,
            "reason": e.reason,
        }
        for e in entries
    ]
    if as_json:
        click.echo(json.dumps(rows))
        return
    paper = ""
    for e in entries:
        if e.paper != paper:
            paper = e.paper
            click.echo(f"\n{paper}  {PAPERS[paper]}")
        length = f"{e.minutes[full]:g} min" if e.status == "runnable" else e.status
        click.echo(f"  {e.name:<30} {length:>12}  {e.title}{f' [{e.reason}]' if e.reason else ''}")


def with_epochs(entry: Entry, epochs: int) -> Entry:
    """Return the entry with a budget of epochs at both sizes; an entry that counts no epochs stays as it is."""
    if "epochs" not in entry.arguments():
        return entry
    return replace(entry, small={**entry.small, "epochs": epochs}, full={**entry.full, "epochs": epochs})


@click.command()
@click.argument("names", nargs=-1, metavar="[NAME]...")
@click.option("--list", "listing", is_flag=True, help="Only list what there is.")
@click.option("--full", is_flag=True, help="Paper size; the default is small (minutes in all).")
@click.option("--force", is_flag=True, help="Run again what is finished.")
@click.option("--output", default="out/gallery", show_default=True, type=click.Path(file_okay=False))
@click.option("--format", "formats", multiple=True, type=click.Choice(["svg", "pdf"]), help="Besides PNG.")
@click.option(
    "--data",
    type=click.Path(file_okay=False),
    help="Folder with local data sets; default where `meanflow data` puts them.",
)
@click.option(
    "--epochs", type=click.IntRange(1), help="Budget: train so many epochs, in every entry that counts them."
)
@click.option(
    "--jobs", type=click.IntRange(0), help="Worker processes (0: none); default 2 where there are cores."
)
@click.option("--json", "as_json", is_flag=True, help="The list, or the summary, as JSON on standard output.")
@guard
def reproduce(
    names: tuple[str, ...],
    listing: bool,
    full: bool,
    force: bool,
    output: str,
    formats: tuple[str, ...],
    data: str | None,
    epochs: int | None,
    jobs: int | None,
    as_json: bool,
) -> None:
    """Reproduce figures, tables and theorems of the five papers by NAME: all, a name, or a glob.

    \b
    Examples:
      meanflow reproduce --list
      meanflow reproduce 001/figure-1 '004/*'
      meanflow reproduce all --output out/gallery
      meanflow reproduce all --full --format pdf
      meanflow reproduce 003/table-1 --epochs 4

    Writes figures, summary.json and a gallery page (Markdown and HTML). Finished names are skipped; an interrupted run
    goes on where it stopped. Exit code 1 if a criterion fails without a known reason, or an experiment breaks.
    """
    try:
        chosen = find(names or ("all",))
    except ValueError as problem:
        raise click.UsageError(str(problem)) from None
    if epochs is not None:
        chosen = [with_epochs(entry, epochs) for entry in chosen]
    if listing:
        _list(chosen, full, as_json)
        return
    if not names:
        raise click.UsageError("give a NAME, a glob such as '004/*', or all; --list prints the names")
    from meanflow_papers.reproduce import reproduce as run  # the list needs none of it

    count = min(2, os.cpu_count() or 1) if jobs is None else jobs
    if count == 0:
        import jax

        jax.config.update("jax_enable_x64", True)
    elif count > 1:  # several processes share a device
        os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    summary = run(
        chosen,
        output,
        full=full,
        force=force,
        formats=formats,
        data=data,
        jobs=count,
        tell=lambda line: click.echo(line, err=True),
    )
    if as_json:
        click.echo(json.dumps(summary))
    else:
        counts = ", ".join(f"{n} {status}" for status, n in summary["counts"].items())
        click.echo(f"{counts}; page in {Path(output) / 'gallery.html'}")
    selected = {e.name for e in chosen}
    if selected & set(summary["unexplained"]):
        raise SystemExit(UNEXPLAINED)
