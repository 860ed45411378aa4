"""Plots: one function a kind of picture. Each draws on the Axes it is given (or on new ones) and returns them.

``style`` has the colors and the look that all of them share.
"""

from meanflow.plots import style as style
from meanflow.plots._animation import animate as animate
from meanflow.plots._clouds import directions as directions
from meanflow.plots._clouds import knots as knots
from meanflow.plots._clouds import plane as plane
from meanflow.plots._curves import fit as fit
from meanflow.plots._curves import traces as traces
from meanflow.plots._maps import heat_map as heat_map
