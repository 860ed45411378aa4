"""Univariate: everything special about ReLU networks of one input, from models and exact forces to splines.

``_models`` builds the flows out of ``_features`` and the spaces in ``_spaces`` and ``_hyperbola``; ``_motion`` and
``_events`` move neurons through kinks for the sliding solver; ``_forces`` and ``_rays`` sum by activation
region; ``balance`` changes coordinates; ``knots`` and ``_observables`` look at the network as a function;
``_kernels`` and ``_splines`` are the limit of infinite width.
"""

from meanflow.univariate import balance as balance
from meanflow.univariate import knots as knots
from meanflow.univariate._kernels import wide_kernel as wide_kernel
from meanflow.univariate._models import canonical as canonical
from meanflow.univariate._models import full as full
from meanflow.univariate._models import lifted as lifted
from meanflow.univariate._models import planar as planar
from meanflow.univariate._models import radial as radial
from meanflow.univariate._rays import classify_rays as classify_rays
from meanflow.univariate._splines import spline_interpolant as spline_interpolant
