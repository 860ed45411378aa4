"""One line of the catalogue: what a figure, table or theorem is, how to run it, and what is known of it.

An entry names the function that reproduces it and its arguments at two sizes: small (minutes in all, the claim still
tested) and full (the size of the paper, or of the independent check where the paper gives none). Functions are named,
not imported, so that reading the list costs nothing.
"""

import fnmatch
import importlib
import inspect
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

PAPERS = {
    "000": "Batch Normalization Alleviates the Spectral Bias in Coordinate Networks (supplement; BN NTK)",
    "001": "A Riemannian Mean Field Formulation for Two-layer Neural Networks with Batch Normalization",
    "002": "Batch Normalization Decomposed",
    "003": "An Internal Covariate Shift Bounding Algorithm for Deep Neural Networks by Unitizing Layers' Outputs",
    "004": "Gradient Dynamics of Shallow Univariate ReLU Networks",
}
STATUSES = ("runnable", "needs data", "out of scope")
VERDICTS = {
    "confirmed": "the claim holds as printed",
    "corrected": "the claim holds only in part, or with another constant or condition; the finding says which",
    "refuted": "the claim fails, by proof or measurement in its own setting",
    "not reproduced": "the claim does not show in our stand-in, which does not refute the published result",
    "not tested": "nothing was run here that could confirm or refute it",
}


@dataclass(frozen=True)
class Entry:
    """One figure, table or theorem.

    Attributes:
        name: paper and item, ``"001/figure-1"``.
        shows: one line of what is to be seen.
        function: ``"module:function"`` below ``meanflow.experiments``; empty when out of scope.
        small, full: its arguments at the two sizes.
        minutes: expected minutes on one core at the two sizes.
        verdict: where the paper's claim stands, a key of ``VERDICTS``.
        setup: what was run, in words.
        status: ``"runnable"``, ``"needs data"`` (a folder with local files) or ``"out of scope"``.
        reason: why it is not simply runnable.
        picture: ``"function"`` of ``experiments.pictures`` that adds arrays which only the drawing needs.
        explained: known failures of a criterion (glob of its name) with the reason; they are shown, not hidden.
        full_only: the same for criteria that the small size cannot test.
    """

    name: str
    shows: str
    function: str = ""
    small: dict[str, Any] = field(default_factory=dict)
    full: dict[str, Any] = field(default_factory=dict)
    minutes: tuple[float, float] = (0.1, 0.1)
    verdict: str = "confirmed"
    setup: str = ""
    status: str = "runnable"
    reason: str = ""
    picture: str = ""
    explained: dict[str, str] = field(default_factory=dict)
    full_only: dict[str, str] = field(default_factory=dict)

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
        """Number of the paper, the part before the slash."""
        return self.name.partition("/")[0]

    def load(self) -> Callable[..., Any]:
        """The function that reproduces the entry."""
        return _load(self.function)

    def arguments(self, full: bool = False) -> dict[str, Any]:
        """Every argument of the function at one size, defaults included."""
        signature = inspect.signature(self.load())
        given = signature.bind_partial(**(self.full if full else self.small))
        given.apply_defaults()
        rest = [p.name for p in signature.parameters.values() if p.kind is p.VAR_KEYWORD]
        return {k: v for k, v in given.arguments.items() if k not in rest}

    def explanation(self, criterion: str, full: bool = False) -> str:
        """Why a criterion may fail here, or an empty string."""
        known = self.explained if full else self.explained | self.full_only
        return next((why for glob, why in known.items() if fnmatch.fnmatchcase(criterion, glob)), "")


def _load(place: str) -> Callable[..., Any]:
    module, _, function = place.partition(":")
    return getattr(importlib.import_module(f"meanflow.experiments.{module}"), function)


CIFAR = "needs the CIFAR files in a local folder (--data FOLDER); nothing is downloaded"
DIAGRAM = "a diagram: nothing is measured in it"
