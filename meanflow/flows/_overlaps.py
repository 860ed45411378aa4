"""Summary statistics: a student that learns a teacher from Gaussian inputs, in the products of their weights alone.

For x ~ N(0, I) the loss of f(x) = sum_i p_i A_i s(b_i . x) against a teacher depends on the weights through
Q = b b', R = b B' and T = B B' only, the overlaps of K students and M teachers. With c the amplitudes of all K + M
neurons (those of the teacher with a minus sign), e = f - y, and D[(Q, R), v] the products of all of them,

    E = 1/2 sum_vw c_v c_w E[s(x_v) s(x_w)],    g_i = -C grad V(b_i) as a combination of students and teachers,
    dR_in = g_i . B_n dt,    dQ_ik = (g_i . b_k + g_k . b_i) dt + eta E[A_i e s'(x_i) A_k e s'(x_k) |x|^2 / d] dt.

The last term is that of one-pass descent with rate eta/d, one fresh sample a step. As |x|^2 is the generator of
scalings of x, E[F |x|^2]/d = E[F] + (derivative of E[F] as the covariance of all preactivations grows by 2 dt)/d.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from meanflow.flows._equation import Population
from meanflow.flows._features import TwoLayer
from meanflow.flows._losses import Loss
from meanflow.geometry._neurons import LayerRates
from meanflow.geometry._space import Space
from meanflow.measures import _scaling as scaling
from meanflow.measures._cloud import Cloud, Neurons

if TYPE_CHECKING:
    from meanflow.flows._flow import Flow

BLOCK = 2**22  # how many fourth moments are computed side by side


class Overlaps(Population):
    """A Gaussian population in the overlaps of students and teachers; made by ``GaussianPopulation.overlaps``.

    A cloud on which it is the data has ``Neurons(a, b)`` whose b (K, K + M) are the products (Q, R) of each student
    with all students and all teachers.

    Attributes:
        x, y, weights: empty, with K + M columns.
        teacher: (M,) or (M, k), minus weight times amplitude of each neuron of the teacher.
        gram: T, (M, M).
        feature: that of the teacher, whose activation the student has.
        rate: eta, or None for gradient flow.
        dim: d, or None for infinitely many dimensions.
        noise: variance of the noise on the targets that a step sees.
    """

    teacher: Array
    gram: Float[Array, "M M"]
    feature: TwoLayer
    rate: Array | None
    dim: Array | None
    noise: Array

    def __init__(
        self,
        students: int,
        teacher: Array,
        gram: Array,
        feature: TwoLayer,
        rate: Array | None,
        dim: Array | None,
        noise: Array,
    ) -> None:
        self.x = jnp.zeros((0, students + len(gram)), gram.dtype)
        self.y, self.weights = jnp.zeros((0, *teacher.shape[1:]), gram.dtype), jnp.zeros((0,), gram.dtype)
        self.teacher, self.gram, self.feature = teacher, gram, feature
        self.rate, self.dim, self.noise = rate, dim, noise

    def check(self, flow: Flow) -> None:
        """Raise ValueError unless the student is a plain two-layer network that the overlaps describe."""
        if flow.loss.function is not Loss("squared").function:
            raise ValueError("overlaps need flows with loss='squared', got another loss")
        plain = type(flow.feature) is TwoLayer and type(flow.space) in (Space, LayerRates)
        if not plain or flow.offset is not None or flow.penalty is not None:
            raise ValueError(
                "overlaps need flows made by meanflow.vanilla without centering, penalty and inner='sphere'"
            )
        flow.feature.check_overlap(self.feature)

    def _joint(self, cloud: Cloud) -> Array:
        """Return the products (K + M, K + M) of all neurons."""
        q, r = jnp.split(cloud.particles.b, [cloud.size], axis=1)
        return jnp.block([[q, r], [r.T, self.gram]])

    def _coefficients(self, flow: Flow, cloud: Cloud) -> Array:
        """Return c, (K + M, outputs)."""
        own = flow.feature.amplitudes(cloud)  # type: ignore[attr-defined]
        weights = cloud.weights.reshape((-1,) + (1,) * (own.ndim - 1))
        return _rows(jnp.concatenate([weights * own, self.teacher]))

    def risk(self, flow: Flow, cloud: Cloud) -> Float[Array, ""]:
        """Return E (f - y)^2 / 2 against the teacher without noise."""
        joint, c = self._joint(cloud), self._coefficients(flow, cloud)
        return 0.5 * jnp.sum((c @ c.T) * self._dual(jnp.diagonal(joint), jnp.diagonal(joint), joint).value)

    def potential(self, flow: Flow, cloud: Cloud, probe: Cloud) -> Float[Array, " K"]:
        """Return V at the students moved to ``probe``, whose b are products with the neurons of ``cloud``.

        It is right to first order in the way from ``cloud``, all that a velocity needs: the square of a moved student
        is 2 b . b_new - |b|^2 to that order.
        """
        if probe.size != cloud.size:
            raise ValueError(f"overlaps know V at their {cloud.size} students only, got {probe.size} probes")
        norms = jnp.diagonal(self._joint(cloud))
        moved = 2 * jnp.diagonal(probe.particles.b[:, : cloud.size]) - norms[: cloud.size]
        values = self._dual(moved, norms, probe.particles.b).value
        a = _rows(flow.feature.amplitudes(probe))  # type: ignore[attr-defined]
        return jnp.sum((a @ self._coefficients(flow, cloud).T) * values, axis=1)

    def velocity(self, flow: Flow, cloud: Cloud, tangent: Neurons) -> Neurons:
        """Return how outer weights and products move, if each student moves by minus a combination of neurons."""
        products = tangent.b @ self._joint(cloud)
        q, r = jnp.split(products, [cloud.size], axis=1)
        q = -(q + q.T)
        if self.rate is not None:
            # a step of gradient descent is one of length rate/d on the gradient clock
            q = q + self.rate * scaling.speed("gradient", flow.scaling, cloud) * self._spread(flow, cloud)
        return Neurons(-tangent.a, jnp.concatenate([q, -r], axis=1))

    def dissipation(self, flow: Flow, cloud: Cloud, covector: Neurons, tangent: Neurons) -> Float[Array, ""]:
        """Return -dE/dt, which the steps of one-pass descent make smaller than that of the flow."""
        along = self.velocity(flow, cloud, tangent)
        return -jax.jvp(lambda w: self.risk(flow, cloud.at(w)), (cloud.particles,), (along,))[1]

    def _spread(self, flow: Flow, cloud: Cloud) -> Array:
        """Return E[g_i . g_k |x|^2/d], (K, K), for the steps g_i = A_i e s'(x_i) of the students."""
        from meanflow.kernels._infinite.fourth import fourth_moments

        size, c = cloud.size, self._coefficients(flow, cloud)
        a = flow.feature.amplitudes(cloud)  # type: ignore[attr-defined]
        # the rates of the inner layer act on each student's step
        unit = jnp.ones_like(cloud.particles.b)
        inner = flow.space.cometric(cloud, Neurons(jnp.zeros_like(a), unit)).b[:, :1]
        a = inner * _rows(a)
        moments = fourth_moments(self.feature.activation)
        first, second = jnp.triu_indices(size)
        share = a @ c.T

        def spread(joint: Array) -> Array:
            pair = lambda ik: share[ik[0]] @ moments(joint, *ik) @ share[ik[1]]
            found = jax.lax.map(pair, (first, second), batch_size=max(1, BLOCK // (32 * joint.size)))
            whole = jnp.zeros((size, size), joint.dtype).at[first, second].set(found)
            norms = jnp.diagonal(joint)[:size]
            shaken = self.noise * (a @ a.T) * self._dual(norms, norms, joint[:size, :size]).slope
            return whole + jnp.triu(whole, 1).T + shaken

        joint = self._joint(cloud)
        if self.dim is None:
            return spread(joint)
        value, grows = jax.jvp(spread, (joint,), (2 * joint,))
        return value + grows / self.dim

    def _dual(self, left: Array, right: Array, products: Array):  # noqa: ANN202
        from meanflow.kernels._infinite.dual import dual_activation

        first, second = jnp.broadcast_arrays(left[:, None], right[None, :])
        return dual_activation(self.feature.activation)(first, second, products)


def _rows(a: Array) -> Array:
    """Return amplitudes (m,) or (m, k) with an axis of outputs."""
    return a.reshape(a.shape[0], -1)
