"""Distances between distributions: exact Wasserstein, and what internal covariate shift makes of it."""

from meanflow.transport.wasserstein import cylinder_distance as cylinder_distance
from meanflow.transport.wasserstein import euclidean as euclidean
from meanflow.transport.wasserstein import transport_plan as transport_plan
from meanflow.transport.wasserstein import wasserstein as wasserstein
