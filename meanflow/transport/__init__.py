"""Distances between distributions: exact Wasserstein, cheap bounds, and internal covariate shift."""

from meanflow.transport._covariate_shift import ics as ics
from meanflow.transport._exact import transport_plan as transport_plan
from meanflow.transport._exact import wasserstein as wasserstein
from meanflow.transport._sinkhorn import sinkhorn_divergence as sinkhorn_divergence
from meanflow.transport._sliced import sliced_wasserstein as sliced_wasserstein
