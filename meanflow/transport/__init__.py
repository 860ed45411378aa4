"""Distances between distributions: exact Wasserstein, cheap bounds, and internal covariate shift."""

from meanflow.transport import bounds as bounds
from meanflow.transport.critic import CriticDistance as CriticDistance
from meanflow.transport.critic import critic_distance as critic_distance
from meanflow.transport.ics import Sandwich as Sandwich
from meanflow.transport.ics import ics as ics
from meanflow.transport.ics import ics_trace as ics_trace
from meanflow.transport.ics import loss_shift as loss_shift
from meanflow.transport.ics import paired_distance as paired_distance
from meanflow.transport.ics import sandwich as sandwich
from meanflow.transport.moments import Interval as Interval
from meanflow.transport.moments import Moments as Moments
from meanflow.transport.moments import bootstrap as bootstrap
from meanflow.transport.moments import moments as moments
from meanflow.transport.sinkhorn import SinkhornDivergence as SinkhornDivergence
from meanflow.transport.sinkhorn import sinkhorn_divergence as sinkhorn_divergence
from meanflow.transport.sliced import marginal_wasserstein as marginal_wasserstein
from meanflow.transport.sliced import sliced_distances as sliced_distances
from meanflow.transport.sliced import sliced_wasserstein as sliced_wasserstein
from meanflow.transport.sliced import slicing_constant as slicing_constant
from meanflow.transport.wasserstein import cylinder_distance as cylinder_distance
from meanflow.transport.wasserstein import euclidean as euclidean
from meanflow.transport.wasserstein import transport_plan as transport_plan
from meanflow.transport.wasserstein import wasserstein as wasserstein
