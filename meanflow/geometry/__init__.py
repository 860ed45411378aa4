"""Geometry: inverse metrics, the batch-norm manifold, lifts and projections."""

from meanflow.geometry.public import cometric_apply as cometric_apply
from meanflow.geometry.public import direction as direction
from meanflow.geometry.public import distance as distance
from meanflow.geometry.public import exp as exp
from meanflow.geometry.public import inner as inner
from meanflow.geometry.public import lift as lift
from meanflow.geometry.public import log as log
from meanflow.geometry.public import metric as metric
from meanflow.geometry.public import normalize as normalize
from meanflow.geometry.public import project as project
from meanflow.geometry.public import retract as retract
from meanflow.geometry.space import BatchNormManifold as BatchNormManifold
from meanflow.geometry.space import Space as Space
