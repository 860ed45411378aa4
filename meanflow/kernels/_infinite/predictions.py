"""Spectra of wide networks predicted from two numbers, and batch norm before every activation.

For orthogonal inputs the tangent kernel of a wide network is (L-1) N [(kappa_1 - kappa_2) I + kappa_2 11'], whose
spectrum is one large eigenvalue and an otherwise flat bulk. kappa_1 and kappa_2 follow from the order parameters.
"""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, ArrayLike, Float

from meanflow import _checks
from meanflow.activations import Activation
from meanflow.kernels._infinite.dual import dual_activation
from meanflow.kernels._infinite.mean_field import order_parameters


class Kappas(NamedTuple):
    """The kernel's entries in units of (L-1) N.

    Attributes:
        one: kappa_1, K_tt ~ (L-1) N kappa_1 for equal samples.
        two: kappa_2, K_st ~ (L-1) N kappa_2 for different samples.
    """

    one: Float[Array, ""]
    two: Float[Array, ""]


def kappas(
    *,
    depth: int,
    alpha_0: float,
    activation: str | Activation = "relu",
    weight_variance: float = 2.0,
    bias_variance: float = 0.0,
    p_tt: float = 1.0,
    p_st: float = 0.0,
    alphas: tuple[float, ...] | None = None,
) -> Kappas:
    """Return kappa_1 and kappa_2, (1/(L-1)) sum_{l=1..L} alpha_{l-1} p^{l-1} q^l with alpha_l = N_l/N.

    The sum has L terms and is divided by L-1 ("BN NTK" A.12, A.14).

    Args:
        alpha_0: N_0/N, which has no default: 1 for inputs as wide as the network, about 0 for coordinates.
        depth, activation, weight_variance, bias_variance: as in ``order_parameters``.
        p_tt: |x_t|^2/N_0.
        p_st: x_s.x_t/N_0. It can vanish for all pairs only if T <= N_0.
        alphas: (alpha_1, ..., alpha_{L-1}), default all 1.

    >>> [round(float(u), 4) for u in kappas(depth=4, alpha_0=1.0)]
    [1.3333, 0.3535]
    """
    _checks.whole("depth", depth, 2)
    gram = jnp.array([[p_tt, p_st], [p_st, p_tt]])
    order = order_parameters(
        gram,
        depth=depth,
        activation=activation,
        weight_variance=weight_variance,
        bias_variance=bias_variance,
    )
    alpha = jnp.asarray([alpha_0, *(alphas if alphas is not None else (1.0,) * (depth - 1))], gram.dtype)
    total = jnp.sum(alpha[:, None, None] * order.p * order.q, axis=0) / (depth - 1)
    return Kappas(total[0, 0], total[0, 1])


class SpectrumPrediction(NamedTuple):
    """A spectrum of one large eigenvalue and a flat bulk.

    Attributes:
        mean: mean of the eigenvalues.
        variance: variance of the eigenvalues.
        top: the largest one.
        bulk: the repeated one.
    """

    mean: Float[Array, ""]
    variance: Float[Array, ""]
    top: Float[Array, ""]
    bulk: Float[Array, ""]


def predict_spectrum(kappa: Kappas, *, depth: int, width: int, samples: int) -> SpectrumPrediction:
    """Return the spectrum of (L-1) N [(k1 - k2) I + k2 11'], exactly ("BN NTK" A.21-A.27).

    Args:
        kappa: (k1, k2).
        depth: L.
        width: N.
        samples: T, the size of the matrix.

    >>> predict_spectrum(Kappas(2.0, 1.0), depth=2, width=10, samples=3).top
    40.0
    """
    scale = (depth - 1) * width
    return SpectrumPrediction(
        scale * kappa.one,
        scale**2 * (samples - 1) * kappa.two**2,
        scale * (kappa.one + (samples - 1) * kappa.two),
        scale * (kappa.one - kappa.two),
    )


def predict_batchnorm_bulk(
    kappa: Kappas, *, depth: int, width: int, variance: Float[ArrayLike, ""]
) -> Float[Array, ""]:
    """Return the T-2 equal eigenvalues (L-1) N (k1 - k2)/sigma^2 under batch norm on the output; two more are 0.

    The matrix B K B is then a scaled projection, not the identity ("BN NTK" A.19-A.20), and for T comparable to N the
    real kernel's fluctuations are as large as its mean spectrum.

    Args:
        kappa: (k1, k2).
        depth: L.
        width: N.
        variance: sigma^2 of the outputs before batch norm.
    """
    return (depth - 1) * width * (kappa.one - kappa.two) / variance


class HiddenBatchNorm(NamedTuple):
    """K ~ N [diagonal I + common 11'] for batch norm before every activation.

    Attributes:
        diagonal: what equal samples have beyond the common part.
        common: what all pairs share.
    """

    diagonal: Float[Array, ""]
    common: Float[Array, ""]


def hidden_batchnorm(*, depth: int, activation: str | Activation = "relu") -> HiddenBatchNorm:
    """Return the kernel, per unit of width, of a network with batch norm before every activation.

    The output is linear and plain, the inputs are orthogonal, N_0 = N, and samples are many; then the kernel does not
    depend on the weight variance. The common part is (E phi)^2, so batch norm in front of the activations leaves the
    outlying eigenvalue, of order N T, in place.

    Args:
        depth: L >= 2, the number of weight matrices.
        activation: phi.

    >>> round(float(hidden_batchnorm(depth=3).diagonal), 4)
    1.5743
    """
    depth = _checks.whole("depth", depth, 2)
    dual = dual_activation(activation)
    one = jnp.ones(())
    square, slope = dual(one, one, one)  # E phi^2, E phi'^2 at unit variance
    common = dual(one, one, jnp.zeros(())).value  # independent: (E phi)^2
    variance = square - common
    total, q = square, jnp.ones(())
    for layer in range(depth - 1, 0, -1):
        inner = one if layer == 1 else variance
        q = q * slope / inner
        total = total + inner * q
    return HiddenBatchNorm(total - common, common)
