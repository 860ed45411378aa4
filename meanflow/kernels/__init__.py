"""Kernels: the tangent kernel of any network, its spectrum, its limit at infinite width, and training under it.

Networks are functions ``apply(params, batch)``, or modules through ``from_nnx``, ``from_linen``, ``from_equinox`` and
``from_haiku``. The map of the engine behind ``empirical_ntk`` is in ``_empirical``. Result classes are described where
they are returned.
"""

from meanflow.kernels._batchnorm import batchnorm_ntk as batchnorm_ntk
from meanflow.kernels._drift import kernel_drift as kernel_drift
from meanflow.kernels._empirical.kernel import empirical_ntk as empirical_ntk
from meanflow.kernels._empirical.kernel import ntk_by_group as ntk_by_group
from meanflow.kernels._empirical.modules import Normalized as Normalized
from meanflow.kernels._empirical.modules import from_equinox as from_equinox
from meanflow.kernels._empirical.modules import from_haiku as from_haiku
from meanflow.kernels._empirical.modules import from_linen as from_linen
from meanflow.kernels._empirical.nnx_modules import from_nnx as from_nnx
from meanflow.kernels._empirical.operator import ntk_operator as ntk_operator
from meanflow.kernels._empirical.plan import Method as Method
from meanflow.kernels._empirical.plan import ntk_plan as ntk_plan
from meanflow.kernels._empirical.spectra import spectrum as spectrum
from meanflow.kernels._expansion import taylor_expand as taylor_expand
from meanflow.kernels._gaussian import gp_posterior as gp_posterior
from meanflow.kernels._infinite.mean_field import infinite_ntk as infinite_ntk
from meanflow.kernels._infinite.mean_field import nngp as nngp
from meanflow.kernels._infinite.mean_field import order_parameters as order_parameters
from meanflow.kernels._infinite.wide import wide_inputs as wide_inputs
from meanflow.kernels._recorder import KernelRecorder as KernelRecorder
from meanflow.kernels._regime import kernel_flow as kernel_flow
