"""Plots: one function a kind of picture. Each draws on the Axes it is given (or on new ones) and returns them.

These are the kinds that most users need. More are in the modules: ``clouds`` (directions and neurons), ``curves``
(speeds, spectra, covariate shift), ``batches`` (a batch inside a deep network), ``maps`` (tables of numbers) and
``style`` (colors, panels, legends).
"""

from meanflow.plots._animation import animate as animate
from meanflow.plots._clouds import plane as plane
from meanflow.plots._curves import energies as energies
from meanflow.plots._curves import fit as fit
from meanflow.plots._curves import traces as traces
from meanflow.plots._maps import heat_map as heat_map
