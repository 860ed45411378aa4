"""Training in the kernel regime: the network is linear in its parameters, so that training has a closed form.

With the loss (1/2) sum_j q_j (f_j - y_j)^2, weights q_j = 1/n unless given, and a fixed kernel K, the residual
rho = f - y at the training points obeys

    gradient flow       rho' = -K Q rho                     Q = diag(q)
    gradient descent    rho <- (I - eta K Q) rho            learning rate eta
    with momentum mu    rho <- rho - v, v <- mu v + eta K Q rho (v first; heavy ball, as in optax.sgd)

One eigendecomposition of Q^(1/2) K Q^(1/2) solves all of them for every time and every number of steps, so early
stopping costs O(n^2) a point. Time t of the flow is learning rate x steps. Predictions elsewhere follow from dual
coefficients beta: f(z) = f_0(z) + K(z, x) beta. Training the output weights of a network alone is exactly this, with
K = features features'. Networks with batch norm on the output do not train like this at any width: see ``kernel_flow``.
"""

from __future__ import annotations

from typing import Annotated

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, ArrayLike, Float, Real

from meanflow import _boundary
from meanflow._boundary import Positive, array, checked, choice, either, number, sequence, taking
from meanflow._matrices import kernel as kernel_kind
from meanflow.kernels import _spectral as spectral
from meanflow.kernels._gaussian import Gaussian, as_matrix, check_shapes
from meanflow.kernels._loss_flow import (
    Cross,
    DualFlow,
    Loss,
    LossFlow,
    Outputs,
    Times,
    cross_entropy,
)
from meanflow.kernels._spectral import Spectral


class KernelFlow(DualFlow):
    """Training under a fixed kernel, in closed form; ``kernel_flow`` makes one.

    All methods take ``times``: times of gradient flow, or numbers of steps if there is a ``learning_rate``. ``times``
    may have any shape, which is the leading shape of the result; infinity is the end of training. With a kernel
    (n, n, k, k) there are N = n k modes, else N = n, which all outputs share.

    All methods but ``coefficients`` have exact derivatives in the kernel, also where eigenvalues are equal (duplicate
    samples, several outputs), but no second ones. At infinite time they are those of changes that keep the rank of the
    kernel; of gradient descent, those at whole numbers of steps, and NaN at others, which are refused unless traced.

    Attributes:
        rates: eigenvalues of Q^(1/2) K Q^(1/2), largest first, (N,). In mode i the residual decays as exp(-rates[i] t),
            or as (1 - learning_rate rates[i])^steps.
        modes: its orthonormal eigenvectors in columns, (N, N).
        matrix: Q^(1/2) K Q^(1/2) itself, (N, N), of which training is a function.
        weights: q, (N,).
        residual: f(0) - y, (n,) or (n, k).
        learning_rate: of gradient descent; None for gradient flow.
        momentum: of gradient descent; None for none.
    """

    rates: Float[Array, " N"]
    modes: Float[Array, "N N"]
    matrix: Float[Array, "N N"]
    weights: Float[Array, " N"]
    residual: Float[Array, "n *k"]
    learning_rate: Float[Array, ""] | None = None
    momentum: Float[Array, ""] | None = None

    def _entries(
        self, function: Spectral, times: Real[ArrayLike, "..."], columns: Float[Array, "N c"]
    ) -> Float[Array, "*times N c"]:
        """Return a function of the matrix times ``columns``, along the modes."""
        t, constants = jnp.asarray(times, self.rates.dtype), (self.learning_rate, self.momentum)
        if self.learning_rate is not None and (known := _boundary.concrete(times)) is not None:
            # more steps than 31 squarings of the matrix of one step reach
            late = np.isfinite(known) & ((known != np.round(known)) | (known > _boundary.MOST))
            if late.any():
                raise ValueError(
                    f"times must be whole numbers of steps up to 2^31 - 1, got {known[late].flat[0]}"
                )
        return spectral.apply(function, self.matrix, (self.rates, self.modes), t, constants, columns)

    def _scaled_residual(self) -> Float[Array, "N c"]:
        return jnp.sqrt(self.weights)[:, None] * self.residual.reshape(self.rates.shape[0], -1)

    def _at_samples(
        self, function: Spectral, times: Real[ArrayLike, "..."], power: int
    ) -> Float[Array, "*times_n_k"]:
        """Return Q^(power/2) function(S) Q^(1/2) (f(0) - y), shape times.shape + y.shape."""
        scaled = self._from_modes(self._entries(function, times, self._scaled_residual()))
        root = jnp.sqrt(self.weights).reshape((1,) * (scaled.ndim - 2) + (-1, 1))
        return (scaled * root**power).reshape(jnp.shape(times) + self.target.shape)

    def _from_modes(self, entries: Float[Array, "*times N c"]) -> Float[Array, "*times N c"]:
        """Return sqrt(weights) x samples from entries along the modes, which are constants (see ``spectral.apply``)."""
        return jnp.einsum("ij,...jc->...ic", jax.lax.stop_gradient(self.modes), entries)

    def coefficients(self) -> Float[Array, "N *c"]:
        """Return the initial residual in each mode, (N,), or (N, k) if outputs share the modes.

        The squares sum to twice the loss.
        """
        found = self.modes.T @ self._scaled_residual()
        return found[:, 0] if found.shape[1] == 1 else found

    @checked
    def __call__(self, times: Times) -> Float[Array, "*times_n_k"]:
        """Return f at the training points, shape times.shape + y.shape."""
        target = self.target.reshape((1,) * jnp.ndim(times) + self.target.shape)
        return target + self._at_samples(spectral.DECAY, times, -1)

    @checked
    def loss(self, times: Times) -> Float[Array, "*times"]:
        """Return the loss, shape times.shape."""
        left = self._entries(spectral.DECAY, times, self._scaled_residual())
        return 0.5 * jnp.sum(left**2, axis=(-2, -1))

    @checked
    def dual(self, times: Times) -> Float[Array, "*times_n_k"]:
        """Return the dual coefficients beta, shape times.shape + y.shape: f(z) = f_0(z) + K(z, x) beta.

        Infinity is the end of training, where modes at rounding level stay untrained.
        """
        return -self._at_samples(spectral.GAIN, times, 1)

    @checked
    def ensemble(
        self,
        cross: Cross,
        prior: Annotated[
            tuple[Float[Array, "n n ..."], Float[Array, "S n ..."], Float[Array, "S S ..."]],
            sequence(array((None, None), (None,) * 4), least=3),
        ],
        times: Times,
    ) -> Gaussian:
        """Return mean and covariance at other points z over networks that start at random and are then trained.

        The start is Gaussian with mean zero, so the flow must have been made with start = 0, and with covariance P, the
        NNGP kernel. With A(t) = K(z, x) G(t), f_t(z) = f_0(z) - A (f_0(x) - y) gives

            mean = A y,   covariance = P(z, z) - A P(x, z) - (A P(x, z))' + A P(x, x) A'.

        Args:
            cross: K(z, x), (S, n), or (S, n, k, k).
            prior: P(x, x), P(z, x), P(z, z), each between points, or also between outputs.
            times: times or numbers of steps; infinity for the end of training.

        Returns:
            ``Gaussian``: mean times.shape + (S,) or (S, k), and covariance times.shape + (S, S).

        Bayesian inference is the case of a kernel P itself. With P(x, x) + noise I as ``kernel`` and as ``prior[0]``,
        infinite time gives the posterior of a Gaussian process, mean P(z, x) (P(x, x) + noise I)^-1 y.

        >>> prior = jnp.eye(1), jnp.array([[1.0], [0.0]]), jnp.eye(2)
        >>> noisy = prior[0] + jnp.eye(1)
        >>> flow = kernel_flow(noisy, jnp.zeros(1), jnp.ones(1))
        >>> mean, covariance = flow.ensemble(prior[1], (noisy, *prior[1:]), jnp.inf)
        >>> mean.round(6).tolist(), jnp.diagonal(covariance).round(6).tolist()
        ([0.5, 0.0], [0.5, 1.0])
        """
        points = cross.shape[0]
        self.check_cross("cross", cross)
        self.check_cross("prior[0]", prior[0], self.target.shape[0])
        self.check_cross("prior[1]", prior[1], points)
        _boundary.shape("prior[2]", prior[2], (points, points), (points, points, *self.target.shape[1:] * 2))
        if np.any(_boundary.concrete(self.residual + self.target)):
            raise ValueError("start must be 0 for an ensemble, the mean over random starts, got another one")
        size = self.rates.shape[0] // self.target.shape[0]
        at_x, between, at_z = (as_matrix(jnp.asarray(p), size if p.ndim == 2 else 1) for p in prior)
        root = jnp.sqrt(self.weights)
        factor = as_matrix(jnp.asarray(cross), size if cross.ndim == 2 else 1) * root[None, :]
        # A = K(z, x) Q^(1/2) gain(S) Q^(1/2), transposed
        turned = self._from_modes(self._entries(spectral.GAIN, times, factor.T))
        response = jnp.swapaxes(turned, -1, -2) * root.reshape((1,) * (turned.ndim - 1) + (-1,))
        shared = jnp.einsum("...sn,un->...su", response, between)
        spread = jnp.einsum("...sn,nm,...um->...su", response, at_x, response)
        start = jnp.zeros((cross.shape[0], *self.target.shape[1:]), self.rates.dtype)
        whole = at_z.reshape((1,) * (shared.ndim - 2) + at_z.shape)
        covariance = whole - shared - jnp.swapaxes(shared, -1, -2) + spread
        if (known := _boundary.concrete(covariance)) is not None:
            variances = np.diagonal(known, axis1=-2, axis2=-1)
            rounding = 1e6 * np.finfo(known.dtype).eps * np.abs(np.diagonal(at_z)).max(initial=0.0)
            if np.any(variances < -rounding):
                raise ValueError(
                    f"prior must be one covariance of samples and points, got a variance of {variances.min():.3g}"
                )
        return Gaussian(self.at(cross, start, times), covariance)


def _weights(weights: Real[ArrayLike, "..."] | None, y: Float[Array, "n *k"]) -> Float[Array, " n"]:
    """Return the weights q as an array, 1/n each by default."""
    if weights is None:
        return jnp.full(y.shape[:1], 1.0 / y.shape[0], y.dtype)
    _boundary.shape("weights", weights, (), y.shape[:1])
    weights = jnp.broadcast_to(jnp.asarray(weights, y.dtype), y.shape[:1])
    _boundary.bounds("weights", weights, above=0.0)
    return weights


@checked
def kernel_flow(
    kernel: Annotated[Float[ArrayLike, "n n ..."], kernel_kind],
    start: Outputs,
    y: Outputs,
    *,
    weights: Annotated[Real[ArrayLike, "..."], array((), (None,), above=0)] | None = None,
    learning_rate: Positive | None = None,
    momentum: Annotated[Real[ArrayLike, ""], number(low=0, below=1)] | None = None,
    loss: Annotated[str | Loss, either(choice("squared", "cross_entropy"), taking(2))] = "squared",
) -> KernelFlow | LossFlow:
    """Solve gradient flow, or gradient descent, under a fixed kernel by one eigendecomposition.

    This predicts wide plain networks. It does not predict networks with batch norm on the output at any width, not even
    with their own kernel, because that kernel depends on f, which moves by O(1).

    Args:
        kernel: K (n, n) at the training points, symmetric positive semi-definite, the same for each of k outputs; or
            (n, n, k, k), as ``empirical_ntk`` gives it.
        start: f(0), (n,) or (n, k).
        y: targets, (n,) or (n, k).
        weights: q_j > 0, default 1/n; a number stands for all.
        learning_rate: of gradient descent, whose time is the number of steps. None: gradient flow.
        momentum: of gradient descent (heavy ball), in [0, 1); needs a ``learning_rate``.
        loss: "squared", in closed form. "cross_entropy" of softmax(f) with the probabilities y (n, k), or any function
            (outputs, target) -> number of one sample, by an ODE solver; for gradient flow only.

    Returns:
        A ``KernelFlow``: called with times (or numbers of steps) it gives f at the training points, shape
        times.shape + y.shape; ``.at(cross, start, times)`` gives f elsewhere, ``.loss(times)`` the loss,
        ``.dual(times)`` the coefficients of kernel sections, and ``.ensemble(cross, prior, times)`` mean and covariance
        over random starts. For other losses than the squared one a ``LossFlow``, which has the first four.

    >>> import jax.numpy as jnp
    >>> flow = kernel_flow(jnp.eye(2), jnp.zeros(2), jnp.ones(2), weights=1.0)
    >>> round(float(flow(1.0)[0]), 4)  # 1 - exp(-1)
    0.6321
    >>> descent = kernel_flow(jnp.eye(2), jnp.zeros(2), jnp.ones(2), weights=1.0, learning_rate=0.5)
    >>> descent(jnp.arange(3))[:, 0].tolist()
    [0.0, 0.5, 0.75]
    """
    whole, first, target = jnp.asarray(kernel), jnp.asarray(start), jnp.asarray(y)
    check_shapes(whole, target)
    _boundary.shape("start", first, target.shape)
    matrix, q = as_matrix(whole), _weights(weights, target)
    if momentum is not None and learning_rate is None:
        raise ValueError("momentum needs a learning_rate: gradient flow has none")
    if loss != "squared":
        if learning_rate is not None:
            raise ValueError('learning_rate must be None unless loss="squared"')
        if loss == "cross_entropy" and target.ndim != 2:
            raise ValueError(
                f'y must be probabilities (n, k) for loss="cross_entropy", got shape {target.shape}'
            )
        known = _boundary.concrete(target) if loss == "cross_entropy" else None
        if known is not None and not (np.all(known >= 0) and np.allclose(known.sum(1), 1, rtol=0, atol=1e-4)):
            raise ValueError('y must be probabilities (n, k) for loss="cross_entropy", in rows that sum to 1')
        each = cross_entropy if isinstance(loss, str) else loss
        if getattr(jax.eval_shape(each, first[0], target[0]), "shape", None) != ():
            raise ValueError("loss must return one number for the outputs and the target of one sample")
        return LossFlow(target, matrix, first, q, each)
    q = jnp.repeat(q, matrix.shape[0] // target.shape[0])
    root = jnp.sqrt(q)
    scaled = root[:, None] * matrix * root[None, :]
    rates, modes = spectral.spectrum(scaled)
    # of the eigenvalues, those below 0 have been cut off: no more of them than rounding
    rounding = 1e3 * float(jnp.finfo(scaled.dtype).eps) * rates.shape[0] * rates[0]
    if np.any(_boundary.concrete(jnp.sum(rates) - jnp.trace(scaled) > rounding)):
        raise ValueError("kernel must be positive semi-definite, got eigenvalues below 0")
    number = lambda a: None if a is None else jnp.asarray(a, target.dtype)
    eta, mu = number(learning_rate), number(momentum)
    return KernelFlow(target, rates, modes, scaled, q, first - target, eta, mu)
