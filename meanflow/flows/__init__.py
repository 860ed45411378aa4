"""Flows: feature x geometry x loss, and what follows from them."""

from meanflow._observable import Observable as Observable
from meanflow.flows._features import Feature as Feature
from meanflow.flows._flow import Flow as Flow
from meanflow.flows._flow import dissipation as dissipation
from meanflow.flows._flow import energy as energy
from meanflow.flows._flow import first_variation as first_variation
from meanflow.flows._flow import make_flow as make_flow
from meanflow.flows._flow import predict as predict
from meanflow.flows._flow import tangent_kernel as tangent_kernel
from meanflow.flows._flow import velocity as velocity
from meanflow.flows._free_energy import free_energy as free_energy
from meanflow.flows._margins import max_margin as max_margin
from meanflow.flows._models import batchnorm as batchnorm
from meanflow.flows._models import batchnorm_manifold as batchnorm_manifold
from meanflow.flows._models import vanilla as vanilla
from meanflow.flows._observables import alignment as alignment
from meanflow.flows._optimality import certificate as certificate
from meanflow.flows._optimality import global_minimum as global_minimum
from meanflow.flows._population import GaussianPopulation as GaussianPopulation
from meanflow.flows._problem import Chart as Chart
