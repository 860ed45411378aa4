"""Distances between distributions: exact Wasserstein, cheap bounds, and internal covariate shift."""

from meanflow.transport import bounds as bounds
from meanflow.transport.covariate_shift import Sandwich as Sandwich
from meanflow.transport.covariate_shift import ics as ics
from meanflow.transport.covariate_shift import ics_trace as ics_trace
from meanflow.transport.covariate_shift import loss_shift as loss_shift
from meanflow.transport.covariate_shift import paired_distance as paired_distance
from meanflow.transport.covariate_shift import sandwich as sandwich
from meanflow.transport.critic import CriticDistance as CriticDistance
from meanflow.transport.critic import critic_distance as critic_distance
from meanflow.transport.exact import cylinder_distance as cylinder_distance
from meanflow.transport.exact import euclidean as euclidean
from meanflow.transport.exact import transport_plan as transport_plan
from meanflow.transport.exact import wasserstein as wasserstein
from meanflow.transport.sinkhorn import SinkhornDivergence as SinkhornDivergence
from meanflow.transport.sinkhorn import sinkhorn_divergence as sinkhorn_divergence
from meanflow.transport.sliced import marginal_wasserstein as marginal_wasserstein
from meanflow.transport.sliced import sliced_distances as sliced_distances
from meanflow.transport.sliced import sliced_wasserstein as sliced_wasserstein
from meanflow.transport.sliced import slicing_constant as slicing_constant
from meanflow.transport.statistics import Interval as Interval
from meanflow.transport.statistics import Moments as Moments
from meanflow.transport.statistics import bootstrap as bootstrap
from meanflow.transport.statistics import moments as moments
