"""Figures of experiments: which picture belongs to which ``Outcome``.

A drawing takes the outcome's data (with the arrays of ``experiments.pictures`` where the catalogue names one) and
returns a figure. Outcomes without a picture of their own are drawn as their criteria.
"""

from collections.abc import Callable
from typing import Any

from meanflow.plots.figures import bn_decomposed, bn_manifold, bn_ntk, unitization, univariate
from meanflow.plots.maps import criteria
from meanflow.plots.style import canvas, theme

DRAWINGS: dict[str, Callable[[dict[str, Any]], Any]] = {
    **bn_ntk.DRAWINGS,
    **bn_manifold.DRAWINGS,
    **bn_decomposed.DRAWINGS,
    **unitization.DRAWINGS,
    **univariate.DRAWINGS,
}


def draw(outcome: Any, name: str | None = None) -> Any:
    """The figure of an outcome.

    Args:
        outcome: ``experiments.Outcome``.
        name: entry of the catalogue; default the outcome's own name.
    """
    with theme():
        drawing = DRAWINGS.get(name or outcome.name)
        return drawing(outcome.data) if drawing else _checks(outcome)


def _checks(outcome: Any) -> Any:
    figure = canvas(6.6, 0.7 + 0.27 * max(len(outcome.criteria), 1))
    criteria(outcome.criteria, figure.add_subplot())
    return figure
