"""Kernels: the tangent kernel of any network, its spectrum, its limit at infinite width, and training under it.

Networks are functions ``apply(params, batch)``, or modules through ``from_module``. The map of the engine behind
``empirical_ntk`` is in ``_empirical``. Result classes are described where they are returned.
"""

import typing

from meanflow import _lazy

if typing.TYPE_CHECKING:
    from meanflow.kernels._batchnorm import batchnorm_ntk as batchnorm_ntk
    from meanflow.kernels._empirical.adapters import from_module as from_module
    from meanflow.kernels._empirical.kernel import empirical_ntk as empirical_ntk
    from meanflow.kernels._empirical.modules import Normalized as Normalized
    from meanflow.kernels._empirical.operator import ntk_operator as ntk_operator
    from meanflow.kernels._empirical.plan import Method as Method
    from meanflow.kernels._empirical.spectra import spectrum as spectrum
    from meanflow.kernels._infinite.mean_field import order_parameters as order_parameters
    from meanflow.kernels._infinite.width import infinite_width as infinite_width
    from meanflow.kernels._learning_curve import learning_curve as learning_curve
    from meanflow.kernels._recorder import KernelRecorder as KernelRecorder
    from meanflow.kernels._regime import kernel_flow as kernel_flow

# loaded with the first name that is used: a kernel needs no spectra and no training, and flax only its own modules
_LAZY = {
    "KernelRecorder": "_recorder",
    "Method": "_empirical.plan",
    "Normalized": "_empirical.modules",
    "batchnorm_ntk": "_batchnorm",
    "empirical_ntk": "_empirical.kernel",
    "from_module": "_empirical.adapters",
    "infinite_width": "_infinite.width",
    "kernel_flow": "_regime",
    "learning_curve": "_learning_curve",
    "ntk_operator": "_empirical.operator",
    "order_parameters": "_infinite.mean_field",
    "spectrum": "_empirical.spectra",
}

__getattr__, __dir__ = _lazy.attach(__name__, _LAZY)
