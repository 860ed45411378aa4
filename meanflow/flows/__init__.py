"""Flows: feature x geometry x loss, and what follows from them."""

from meanflow.flows.alignment import Alignment as Alignment
from meanflow.flows.features import Feature as Feature
from meanflow.flows.flow import Flow as Flow
from meanflow.flows.flow import dissipation as dissipation
from meanflow.flows.flow import energy as energy
from meanflow.flows.flow import first_variation as first_variation
from meanflow.flows.flow import make_flow as make_flow
from meanflow.flows.flow import predict as predict
from meanflow.flows.flow import tangent_kernel as tangent_kernel
from meanflow.flows.flow import velocity as velocity
from meanflow.flows.free_energy import free_energy as free_energy
from meanflow.flows.losses import softmax as softmax
from meanflow.flows.margins import max_margin as max_margin
from meanflow.flows.models import batchnorm as batchnorm
from meanflow.flows.models import batchnorm_manifold as batchnorm_manifold
from meanflow.flows.models import spherical as spherical
from meanflow.flows.models import vanilla as vanilla
from meanflow.flows.observables import FunctionObservable as FunctionObservable
from meanflow.flows.observables import Observable as Observable
from meanflow.flows.optimality import certificate as certificate
from meanflow.flows.optimality import separates as separates
from meanflow.flows.population import GaussianPopulation as GaussianPopulation
from meanflow.flows.problem import Chart as Chart
