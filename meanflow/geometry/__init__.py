"""Geometry: inverse metrics, the batch-norm manifold, lifts and projections."""

from meanflow.geometry.lifts import lift as lift
from meanflow.geometry.lifts import project as project
from meanflow.geometry.omega import cometric_apply as cometric_apply
from meanflow.geometry.omega import direction as direction
from meanflow.geometry.omega import distance as distance
from meanflow.geometry.omega import exp as exp
from meanflow.geometry.omega import inner as inner
from meanflow.geometry.omega import log as log
from meanflow.geometry.omega import metric as metric
from meanflow.geometry.omega import normalize as normalize
from meanflow.geometry.omega import retract as retract
from meanflow.geometry.space import BatchNormManifold as BatchNormManifold
from meanflow.geometry.space import Space as Space
