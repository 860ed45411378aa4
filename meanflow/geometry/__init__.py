"""Geometry: inverse metrics, the batch-norm manifold, lifts and projections."""

from meanflow.geometry._public import distance as distance
from meanflow.geometry._public import exp as exp
from meanflow.geometry._public import lift as lift
from meanflow.geometry._public import log as log
from meanflow.geometry._public import metric as metric
from meanflow.geometry._public import normalize as normalize
from meanflow.geometry._public import project as project
from meanflow.geometry._space import BatchNormManifold as BatchNormManifold
from meanflow.geometry._space import Space as Space
