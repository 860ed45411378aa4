"""Univariate ReLU networks: models, fast exact forces, rays and attractors, function space."""

from meanflow.flows.univariate import forces as forces
from meanflow.flows.univariate import knots as knots
from meanflow.flows.univariate import sparse as sparse
from meanflow.flows.univariate.models import canonical as canonical
from meanflow.flows.univariate.models import full as full
from meanflow.flows.univariate.models import lifted as lifted
from meanflow.flows.univariate.models import planar as planar
from meanflow.flows.univariate.models import radial as radial
from meanflow.flows.univariate.rays import RayTable as RayTable
from meanflow.flows.univariate.rays import attracting_angles as attracting_angles
from meanflow.flows.univariate.rays import classify_rays as classify_rays
from meanflow.flows.univariate.rays import dead_arc as dead_arc
from meanflow.flows.univariate.rays import region_covariances as region_covariances
from meanflow.flows.univariate.rays import residual_ode as residual_ode
