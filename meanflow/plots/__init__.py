"""Plots: one function a figure kind. Each draws on the Axes it is given (or a new one) and returns it.

``draw`` makes the figure of an experiment's ``Outcome`` from these.
"""

from meanflow.plots.batches import activity as activity
from meanflow.plots.batches import angles as angles
from meanflow.plots.batches import projection as projection
from meanflow.plots.batches import tree as tree
from meanflow.plots.clouds import attractors as attractors
from meanflow.plots.clouds import directions as directions
from meanflow.plots.clouds import field as field
from meanflow.plots.clouds import needles as needles
from meanflow.plots.clouds import plane as plane
from meanflow.plots.clouds import regions as regions
from meanflow.plots.curves import convergence as convergence
from meanflow.plots.curves import energies as energies
from meanflow.plots.curves import fit as fit
from meanflow.plots.curves import ics_trace as ics_trace
from meanflow.plots.curves import spectrum as spectrum
from meanflow.plots.curves import speeds as speeds
from meanflow.plots.curves import traces as traces
from meanflow.plots.figures import draw as draw
from meanflow.plots.maps import criteria as criteria
from meanflow.plots.maps import dots as dots
from meanflow.plots.maps import heat_map as heat_map
from meanflow.plots.style import save as save
from meanflow.plots.style import theme as theme
