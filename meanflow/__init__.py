"""meanflow: how two-layer networks learn, as one flow equation.

A network is a cloud of particles w_i with weights p_i; it predicts f(x) = sum_i p_i phi(w_i; x) and learns by
w_i' = -C(w_i) grad V(w_i), where V is the first variation of the loss and C an inverse metric. Batch norm and
the balance of a ReLU neuron only change C.

Data and networks
    Dataset             inputs, targets and weights
    Cloud               particles with weights: a network
    Neurons             particles (a, b) of a two-layer network
    Polar, Affine       particles of a network with one input: (r, theta) and (a, b, c)

Models, all of them a Flow
    vanilla             a s(b . x) in flat coordinates
    batchnorm           with batch norm, in raw weights
    batchnorm_manifold  with batch norm, on its manifold
    canonical           ReLU with one input, neurons on a cylinder
    lifted              the same with the balance of each neuron as a label
    planar, radial      its limits, in which one layer learns
    full                the same in raw weights

What a model says
    predict             f(x)
    energy              the loss with its penalty
    velocity            how each particle moves
    dissipation         how fast the energy falls
    first_variation     V, whose gradient moves particles
    tangent_kernel      the kernel under which predictions move

Training
    solve               continuous time
    descend             discrete time: gradient descent, optimizers, batches
    fluctuations        mean, covariance and bias over initializations, from one run
    KernelStep          steps as a fraction of the largest stable one
    Adaptive            steps that follow an error estimate
    Batches             minibatches, or fresh samples
    Noise, Reaction     what moves beside the gradient
    Solution, RESULTS   what both return
    sweep               a grid over widths, balances, scales and seeds
    phase_diagram       how observables scale with the width

Programs and credit
    keep_programs       keep compiled programs for other processes
    clear_caches        forget compiled programs
    citation            what to cite for what was used

Further: activations (those known by name), files (whole or absent) and the rooms measures, geometry, layers, kernels,
flows, solvers, transport, depth, training, univariate, sweeps, plots and report, for instance
``mf.kernels.empirical_ntk``.
"""

import typing as _typing

from meanflow import _lazy
from meanflow._citation import citation as citation
from meanflow._reuse import clear_caches as clear_caches
from meanflow._reuse import keep_programs as keep_programs
from meanflow.flows import Flow as Flow
from meanflow.flows import batchnorm as batchnorm
from meanflow.flows import batchnorm_manifold as batchnorm_manifold
from meanflow.flows import dissipation as dissipation
from meanflow.flows import energy as energy
from meanflow.flows import first_variation as first_variation
from meanflow.flows import predict as predict
from meanflow.flows import tangent_kernel as tangent_kernel
from meanflow.flows import vanilla as vanilla
from meanflow.flows import velocity as velocity
from meanflow.measures import Affine as Affine
from meanflow.measures import Cloud as Cloud
from meanflow.measures import Dataset as Dataset
from meanflow.measures import Neurons as Neurons
from meanflow.measures import Polar as Polar
from meanflow.univariate import canonical as canonical
from meanflow.univariate import full as full
from meanflow.univariate import lifted as lifted
from meanflow.univariate import planar as planar
from meanflow.univariate import radial as radial

if _typing.TYPE_CHECKING:
    from meanflow import activations as activations
    from meanflow import depth as depth
    from meanflow import files as files
    from meanflow import geometry as geometry
    from meanflow import kernels as kernels
    from meanflow import layers as layers
    from meanflow import plots as plots
    from meanflow import report as report
    from meanflow import sweeps as sweeps
    from meanflow import training as training
    from meanflow import transport as transport
    from meanflow.solvers import RESULTS as RESULTS
    from meanflow.solvers import Adaptive as Adaptive
    from meanflow.solvers import Batches as Batches
    from meanflow.solvers import KernelStep as KernelStep
    from meanflow.solvers import Noise as Noise
    from meanflow.solvers import Reaction as Reaction
    from meanflow.solvers import Solution as Solution
    from meanflow.solvers import descend as descend
    from meanflow.solvers import fluctuations as fluctuations
    from meanflow.solvers import solve as solve
    from meanflow.sweeps._exponents import phase_diagram as phase_diagram
    from meanflow.sweeps._sweep import sweep as sweep

__version__ = "0.1.0"

# rooms load on first use: diffrax, optax, flax, ott, xarray and matplotlib are slow to import
_ROOMS = (
    "measures geometry layers kernels flows solvers transport depth training univariate sweeps plots report"
)
_LAZY = {
    **{room: room for room in _ROOMS.split()},
    "activations": "activations",
    "files": "files",
    "RESULTS": "solvers",
    "Adaptive": "solvers",
    "Batches": "solvers",
    "KernelStep": "solvers",
    "Noise": "solvers",
    "Reaction": "solvers",
    "Solution": "solvers",
    "descend": "solvers",
    "fluctuations": "solvers",
    "solve": "solvers",
    "sweep": "sweeps",
    "phase_diagram": "sweeps",
}

__getattr__, __dir__ = _lazy.attach(__name__, _LAZY)
