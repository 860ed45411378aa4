"""Every figure, table and tested theorem of the five papers, by name (``"001/figure-1"``)."""

import fnmatch
from collections.abc import Iterable

from meanflow.experiments.catalogue import bn_decomposed, bn_manifold, bn_ntk, unitization, univariate
from meanflow.experiments.catalogue.entry import PAPERS as PAPERS
from meanflow.experiments.catalogue.entry import VERDICTS as VERDICTS
from meanflow.experiments.catalogue.entry import Entry as Entry

CATALOGUE: dict[str, Entry] = {
    entry.name: entry
    for paper in (bn_ntk, bn_manifold, bn_decomposed, unitization, univariate)
    for entry in paper.ENTRIES
}


def find(patterns: Iterable[str], entries: dict[str, Entry] | None = None) -> list[Entry]:
    """Entries whose names match any of the patterns, in the order of the list; ``"all"`` and globs are allowed.

    >>> [entry.name for entry in find(["001/figure-[12]"])]
    ['001/figure-1', '001/figure-2']

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
