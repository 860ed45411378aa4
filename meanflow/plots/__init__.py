"""Plots: one function a figure kind. Each draws on the Axes it is given (or a new one) and returns it."""

from meanflow.plots.clouds import directions as directions
from meanflow.plots.clouds import plane as plane
from meanflow.plots.curves import energies as energies
from meanflow.plots.curves import fit as fit
from meanflow.plots.maps import heat_map as heat_map
