"""The papers' figures, tables and theorems, one package a paper; each function returns an ``Outcome``.

One item is one place: a function that computes it, its criteria, its drawing and its entry in the catalogue stand
together in a module of the paper (000 ``ntk``, 001 ``manifold``, 002 ``decomposed``, 003 ``unitization``,
004 ``univariate``). ``meanflow reproduce`` runs them.
"""

from meanflow_papers.outcome import Criterion as Criterion
from meanflow_papers.outcome import Outcome as Outcome
