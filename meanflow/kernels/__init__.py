"""Kernels: the tangent kernel of any network, its spectrum, its limit at infinite width, and training under it.

``empirical`` holds the engine (networks as functions, coupling of samples, plan, matrix, operator, spectra),
``batchnorm`` the kernel after batch norm, ``infinite`` order parameters and infinite width, ``regime`` training in
closed form, and ``drift`` how kernels change. Result classes are described where they are returned.
"""

from meanflow.kernels.batchnorm import batchnorm_ntk as batchnorm_ntk
from meanflow.kernels.drift import kernel_drift as kernel_drift
from meanflow.kernels.empirical.kernel import empirical_ntk as empirical_ntk
from meanflow.kernels.empirical.kernel import ntk_by_group as ntk_by_group
from meanflow.kernels.empirical.modules import Normalized as Normalized
from meanflow.kernels.empirical.modules import from_equinox as from_equinox
from meanflow.kernels.empirical.modules import from_haiku as from_haiku
from meanflow.kernels.empirical.modules import from_linen as from_linen
from meanflow.kernels.empirical.nnx_modules import from_nnx as from_nnx
from meanflow.kernels.empirical.operator import ntk_operator as ntk_operator
from meanflow.kernels.empirical.plan import ntk_plan as ntk_plan
from meanflow.kernels.empirical.spectra import spectrum as spectrum
from meanflow.kernels.expansion import taylor_expand as taylor_expand
from meanflow.kernels.gaussian import gp_posterior as gp_posterior
from meanflow.kernels.infinite.mean_field import infinite_ntk as infinite_ntk
from meanflow.kernels.infinite.mean_field import nngp as nngp
from meanflow.kernels.infinite.mean_field import order_parameters as order_parameters
from meanflow.kernels.infinite.wide import wide_inputs as wide_inputs
from meanflow.kernels.recorder import KernelRecorder as KernelRecorder
from meanflow.kernels.regime import kernel_flow as kernel_flow
