"""Spectra of wide networks predicted from two numbers, and batch norm before every activation.

For orthogonal inputs the tangent kernel of a wide network is (L-1) N [(kappa_1 - kappa_2) I + kappa_2 11'], whose
spectrum is one large eigenvalue and an otherwise flat bulk. kappa_1 and kappa_2 follow from the order parameters.
"""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, ArrayLike, Float

from meanflow import kernels


class Kappas(NamedTuple):
    """The kernel's entries in units of (L-1) N.

    Attributes:
        one: kappa_1, K_tt ~ (L-1) N kappa_1 for equal samples.
        two: kappa_2, K_st ~ (L-1) N kappa_2 for different samples.
    """

    one: Float[Array, ""]
    two: Float[Array, ""]


def kappas(*, depth: int, alpha_0: float, activation: str = "relu", weight_variance: float = 2.0) -> Kappas:
    """Return kappa_1 and kappa_2, (1/(L-1)) sum_{l=1..L} alpha_{l-1} p^{l-1} q^l with alpha_l = N_l/N = 1 for l > 0.

    The sum has L terms and is divided by L-1 ("BN NTK" A.12, A.14). Inputs are orthogonal with |x_t|^2 = N_0.

    Args:
        depth, activation, weight_variance: as in ``kernels.order_parameters``; depth >= 2.
        alpha_0: N_0/N, which has no default: 1 for inputs as wide as the network, about 0 for coordinates.

    >>> [round(float(u), 4) for u in kappas(depth=4, alpha_0=1.0)]
    [1.3333, 0.3535]
    """
    order = kernels.order_parameters(
        jnp.eye(2), depth=depth, activation=activation, weight_variance=weight_variance
    )
    alpha = jnp.asarray([alpha_0] + [1.0] * (depth - 1), order.p.dtype)
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


def hidden_batchnorm(*, depth: int, activation: str = "relu") -> HiddenBatchNorm:
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
    # one hidden layer at unit variance: p^1 is E phi^2 of a sample with itself and (E phi)^2 of two independent ones,
    # and q^1 is E phi'^2
    order = kernels.order_parameters(jnp.eye(2), depth=2, activation=activation, weight_variance=1.0)
    square, common, slope = order.p[1, 0, 0], order.p[1, 0, 1], order.q[0, 0, 0]
    # batch norm divides a gradient by the standard deviation of the layer below: 1 for the inputs, else that of phi
    inner = [square - common] * (depth - 2) + [jnp.ones(())]
    total, q = square, jnp.ones(())
    for variance in inner:
        q = q * slope / variance
        total = total + variance * q
    return HiddenBatchNorm(total - common, common)
