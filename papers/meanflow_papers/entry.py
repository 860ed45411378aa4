"""One entry of the catalogue: what a figure, table or theorem is, how to compute and draw it, and what is known of it.

A paper's module declares an entry where it computes it, by a decorator on the function:

    @entry("001/figure-1", title="speed of neurons by direction", verdict="corrected", draw=draw)
    def figure_1(width: int = 50) -> Outcome:
        ...

An entry has two sizes: small (all of them take minutes, and the claim is still tested) and full (the size of the
paper, or of the independent check where the paper gives none).
"""

import fnmatch
import inspect
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeAlias, TypeVar

from matplotlib.figure import Figure

from meanflow_papers.outcome import Arrays, Outcome

PAPERS = {
    "000": "Batch Normalization Alleviates the Spectral Bias in Coordinate Networks (supplement; BN NTK)",
    "001": "A Riemannian Mean Field Formulation for Two-layer Neural Networks with Batch Normalization",
    "002": "Batch Normalization Decomposed",
    "003": "An Internal Covariate Shift Bounding Algorithm for Deep Neural Networks by Unitizing Layers' Outputs",
    "004": "Gradient Dynamics of Shallow Univariate ReLU Networks",
}
STATUSES = ("runnable", "needs data", "out of scope")
# A verdict is about the quoted sentence; criteria are ours and test what was found, also where that refutes the claim.
VERDICTS = {
    "confirmed": "what is quoted holds as printed",
    "corrected": "it holds only in part, or with another constant, sign or condition; the finding says which",
    "refuted": "it fails, by proof or by measurement in the setting it speaks of",
    "not reproduced": "it does not show in our stand-in (other data, a smaller network), which does not refute it",
    "not tested": "nothing was run here that could confirm or refute it",
    "no claim": "the text we have prints no such claim; what was measured stands for itself",
}
CIFAR = "needs the files of CIFAR-10: `meanflow data cifar-10`, or a local folder (--data FOLDER)"
CIFAR_100 = (
    "needs the files of CIFAR-100 (train.bin, test.bin), which no package brings: --data FOLDER with your own"
)
MNIST = "needs the files of MNIST: `meanflow data mnist`, or a local folder (--data FOLDER)"
FASHION = "needs the files of Fashion-MNIST: `meanflow data fashion`, or a local folder (--data FOLDER)"
DIAGRAM = "a diagram: nothing is measured in it"

Quotes: TypeAlias = tuple[tuple[str, str], ...]  # (section and equation or figure, verbatim words)
Arguments: TypeAlias = dict[str, Any]  # keyword arguments by name, of a computing or a drawing function
Compute: TypeAlias = Callable[..., Outcome]
Draw: TypeAlias = Callable[[Arrays], Figure]
Picture: TypeAlias = Callable[[Outcome, Arguments], Arrays]
Computes = TypeVar("Computes", bound=Compute)


@dataclass(frozen=True)
class Entry:
    """One figure, table or theorem.

    Attributes:
        name: paper and item, ``"001/figure-1"``.
        title: one line that says what is to be seen.
        compute: the function that reproduces it; None when it is out of scope.
        draw: makes the figure from the outcome's data; None draws the criteria instead.
        picture: computes arrays that only the drawing needs, from the outcome and the arguments it was run with.
        small, full: arguments of ``compute`` at the two sizes.
        minutes: expected minutes on one core at the two sizes.
        verdict: where the quoted claims stand, a key of ``VERDICTS``.
        setup: what was run, in words.
        status: ``"runnable"``, ``"needs data"`` (a folder with local files) or ``"out of scope"``.
        reason: why it is not simply runnable.
        data: name of the data set it needs: "mnist", "fashion", "cifar-10" or "cifar-100".
        explained: known failures of a criterion (glob of its name) with the reason; they are shown, not hidden.
        full_only: the same for criteria that the small size cannot test.
        claims: what the paper says, in its own words, with the places; formulas without the commands of TeX.
    """

    name: str
    title: str
    compute: Compute | None = None
    draw: Draw | None = None
    picture: Picture | None = None
    small: Arguments = field(default_factory=dict)
    full: Arguments = field(default_factory=dict)
    minutes: tuple[float, float] = (0.1, 0.1)
    verdict: str = "confirmed"
    setup: str = ""
    status: str = "runnable"
    reason: str = ""
    data: str = ""
    explained: dict[str, str] = field(default_factory=dict)
    full_only: dict[str, str] = field(default_factory=dict)
    claims: Quotes = ()

    def __post_init__(self) -> None:
        for what, value, allowed in (
            ("status", self.status, STATUSES),
            ("verdict", self.verdict, tuple(VERDICTS)),
            ("paper", self.paper, tuple(PAPERS)),
        ):
            if value not in allowed:
                raise ValueError(f"{what} of {self.name} must be one of {allowed}, got {value!r}")

    @property
    def paper(self) -> str:
        """Number of the paper, the part of the name before the slash."""
        return self.name.partition("/")[0]

    @property
    def claim(self) -> str:
        """The quotes as one text, each with its place."""
        return "; ".join(f"“{words}” ({place})" for place, words in self.claims)

    def arguments(self, full: bool = False) -> Arguments:
        """Return every argument of the computing function at one size, defaults included."""
        if self.compute is None:
            return {}
        signature = inspect.signature(self.compute)
        given = signature.bind_partial(**(self.full if full else self.small))
        given.apply_defaults()
        rest = [p.name for p in signature.parameters.values() if p.kind is p.VAR_KEYWORD]
        return {k: v for k, v in given.arguments.items() if k not in rest}

    def explanation(self, criterion: str, full: bool = False) -> str:
        """Return why the named criterion may fail at this size, or an empty string."""
        known = self.explained if full else self.explained | self.full_only
        return next((why for glob, why in known.items() if fnmatch.fnmatchcase(criterion, glob)), "")


# Filled by the decorators when a paper's package is imported; ``catalogue.CATALOGUE`` is the complete, ordered one.
DECLARED: dict[str, Entry] = {}


def entry(
    name: str,
    *,
    title: str,
    claims: Quotes = (),
    draw: Draw | None = None,
    picture: Picture | None = None,
    small: Arguments | None = None,
    full: Arguments | None = None,
    minutes: tuple[float, float] = (0.1, 0.1),
    verdict: str = "confirmed",
    setup: str = "",
    status: str = "runnable",
    reason: str = "",
    data: str = "",
    explained: dict[str, str] | None = None,
    full_only: dict[str, str] | None = None,
) -> Callable[[Computes], Computes]:
    """Declare the decorated function as the one that reproduces ``name``; the arguments are those of ``Entry``.

    The function itself is returned unchanged, so that it can be called, and sent to another process, as it is. Two
    entries may share one function.
    """

    def declare(compute: Computes) -> Computes:
        if name in DECLARED:
            raise ValueError(f"two functions declare {name}")
        DECLARED[name] = Entry(
            name,
            title,
            compute,
            draw,
            picture,
            small=small or {},
            full=full or {},
            minutes=minutes,
            verdict=verdict,
            setup=setup,
            status=status,
            reason=reason,
            data=data,
            explained=explained or {},
            full_only=full_only or {},
            claims=claims,
        )
        return compute

    return declare


def not_run(name: str, *, title: str, reason: str) -> None:
    """Declare an item of a paper that claims nothing and that nothing here computes, and why."""
    DECLARED[name] = Entry(name, title, status="out of scope", reason=reason, verdict="no claim")
