"""What an experiment returns: its data and its named pass criteria."""

from dataclasses import dataclass, field
from typing import Any, TypeAlias

# Arrays, numbers and nested dictionaries of them, by name: what the criteria are computed from and drawings show.
Arrays: TypeAlias = dict[str, Any]


@dataclass(frozen=True)
class Criterion:
    """A measured value and the closed interval it must lie in (either end may be infinite).

    >>> Criterion("slope", -0.52, -0.6, -0.4).passed
    True
    """

    name: str
    value: float
    low: float = -float("inf")
    high: float = float("inf")

    @property
    def passed(self) -> bool:
        """True when low <= value <= high (never for NaN)."""
        return bool(self.low <= self.value <= self.high)


@dataclass(frozen=True)
class Outcome:
    """Result of one figure, table or theorem.

    Attributes:
        name: for example ``"001/figure-1"``.
        finding: what is true here, above all where it differs from the paper's claim, which the entry quotes.
        data: arrays to plot, by name.
        criteria: the checks; ``passed`` is their conjunction.
    """

    name: str
    finding: str
    data: Arrays = field(default_factory=dict)
    criteria: tuple[Criterion, ...] = ()

    @property
    def passed(self) -> bool:
        """True when every criterion passed."""
        return all(c.passed for c in self.criteria)

    def __str__(self) -> str:
        lines = [f"{self.name}: {'pass' if self.passed else 'FAIL'}"]
        for c in self.criteria:
            mark = "ok  " if c.passed else "FAIL"
            lines.append(f"  {mark} {c.name} = {c.value:.6g} in [{c.low:.6g}, {c.high:.6g}]")
        return "\n".join(lines)
