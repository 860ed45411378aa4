"""What is kept of a run on disk, as JSON: one record an entry, and the summary of a folder."""

from typing import TypedDict


class Check(TypedDict):
    """A criterion as JSON; None stands for a number that is not finite."""

    name: str
    value: float | None
    low: float | None
    high: float | None
    passed: bool
    explanation: str


class Record(TypedDict):
    """What ``results/NAME.json`` holds about one entry.

    ``status`` is "passed", "explained", "failed", "error", "needs data" or "out of scope"; ``version`` is that of
    this layout.
    """

    version: int
    name: str
    paper: str
    title: str
    setup: str
    verdict: str
    size: str
    status: str
    reason: str
    claim: str
    finding: str
    criteria: list[Check]
    arguments: dict[str, object]
    seed: object
    seconds: float
    cpu_seconds: float
    figures: list[str]
    error: str
    versions: dict[str, str]
    finished: str


class Summary(TypedDict):
    """What ``summary.json`` holds: every record of one size in a folder, in the order of the catalogue."""

    version: int
    size: str
    papers: dict[str, str]
    counts: dict[str, int]
    cpu_seconds: float
    wall_seconds: float
    unexplained: list[str]
    experiments: list[Record]
