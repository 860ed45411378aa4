"""Every figure, table and tested theorem of the five papers, by name (``"001/figure-1"``)."""

import fnmatch
import re
from collections.abc import Iterable, Mapping

from meanflow_papers import decomposed, manifold, ntk, unitization, univariate
from meanflow_papers.entry import DECLARED, Entry

PACKAGES = (ntk, manifold, decomposed, unitization, univariate)  # importing them declares their entries


def _order(name: str) -> list[tuple[int, str]]:
    """Sort key that puts figure-9 before figure-10."""
    return [(int(part), "") if part.isdigit() else (0, part) for part in re.split(r"(\d+)", name)]


CATALOGUE: dict[str, Entry] = {name: DECLARED[name] for name in sorted(DECLARED, key=_order)}


def find(patterns: Iterable[str], entries: Mapping[str, Entry] | None = None) -> list[Entry]:
    """Return the entries whose names match any of the patterns, in the order of the catalogue.

    >>> [entry.name for entry in find(["001/figure-[12]"])]
    ['001/figure-1', '001/figure-2']

    Args:
        patterns: names, globs such as ``"004/*"``, or ``"all"``.
        entries: the catalogue to search; default all papers.

    Raises:
        ValueError: for a pattern that matches nothing.
    """
    known = CATALOGUE if entries is None else entries
    wanted: set[str] = set()
    for pattern in patterns:
        hits = list(known) if pattern == "all" else fnmatch.filter(known, pattern)
        if not hits:
            raise ValueError(
                f"NAME must be all, a glob such as '004/*', or a name that --list prints, got {pattern!r}"
            )
        wanted |= set(hits)
    return [entry for name, entry in known.items() if name in wanted]
