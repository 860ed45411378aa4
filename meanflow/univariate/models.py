"""Models of a univariate ReLU network: one feature in two coordinates, five inverse metrics.

Every neuron is amplitude * relu(<(x, 1), p>): p = d(theta), amplitude r in reduced coordinates; p = (a, -b),
amplitude (m/alpha) c in full ones. Inside a region the neuron is linear in x with slope vector q = amplitude * p,
so the potential of the neuron has the differential J_q' G with G the force of ``forces``.
"""

from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp

from meanflow import _checks
from meanflow.flows.features import Feature, Pull
from meanflow.flows.flow import Flow, make_flow
from meanflow.measures import laws
from meanflow.measures.cloud import Affine, Cloud, Polar, floating
from meanflow.measures.scaling import Scaling
from meanflow.univariate import forces as force
from meanflow.univariate.balance import Layers, Lifted, unit
from meanflow.univariate.cylinder import Cylinder
from meanflow.univariate.hyperbola import Hyperbola, fold, unfold

FORCES = ("auto", "dense", "fast")
# up to (samples, samples x neurons) the dense forces are faster (measured in benchmarks: univariate, sweeps)
CROSSOVER = ((40, 2**22), (2**62, 2**15))


class Univariate(Feature):
    """amplitude_i * relu(<(x_j, 1), p_i>) for scalar inputs x (n,).

    Attributes:
        forces: ``"dense"`` O(m n), ``"fast"`` O(m log n + n), or ``"auto"``, by size. Exact alike.
    """

    forces: str = eqx.field(static=True)

    def direction(self, cloud: Cloud) -> jax.Array:
        """p_i (m, 2), the direction that decides which samples are active."""
        raise NotImplementedError

    def amplitude(self, cloud: Cloud) -> jax.Array:
        """The factor (m,) of relu(<(x, 1), p>)."""
        raise NotImplementedError

    def slopes(self, cloud: Cloud) -> jax.Array:
        """q_i = amplitude_i p_i (m, 2): where active, phi(w_i; x) = <(x, 1), q_i>."""
        return self.amplitude(cloud)[:, None] * self.direction(cloud)

    def pull(self, cloud: Cloud, force: jax.Array) -> Any:
        """J_q' G of forces G (m, 2): the covector of the potential at each neuron."""
        return jax.vjp(lambda w: self.slopes(cloud.at(w)), cloud.particles)[1](force)[0]

    def check(self, cloud: Cloud, x: jax.Array) -> None:
        """Inputs are scalars, coordinates one number per neuron."""
        super().check(cloud, x)
        _checks.shape("x", x, (None,))
        for name, value in cloud.particles._asdict().items():
            _checks.shape(f"particles.{name}", value, (cloud.size,))

    def __call__(self, cloud: Cloud, x: jax.Array) -> jax.Array:
        """phi(w_i; x_j), shape (n, m)."""
        lifted = jnp.stack([x, jnp.ones_like(x)], axis=-1)
        active = force.is_active(self.direction(cloud), x)
        return jnp.where(active, lifted @ self.slopes(cloud).T, 0.0)

    def linearize(self, cloud: Cloud, x: jax.Array) -> tuple[jax.Array, Pull]:
        """Predictions (n,) and g -> J_q' G(g), the covectors of the potential; see ``Feature.linearize``."""
        count = x.shape[0]
        small = any(count <= samples and count * cloud.size <= entries for samples, entries in CROSSOVER)
        fast = self.forces == "fast" or (self.forces == "auto" and not small)
        path = force.sorted_linearization if fast else force.dense_linearization
        p, share = self.direction(cloud), cloud.weights * self.amplitude(cloud)
        # a column at a time: the compiler then never stores the pairs
        slopes = jnp.stack([share * p[:, 0], share * p[:, 1]], axis=-1)
        f, gather = path(p, slopes, x)
        return f, lambda g: self.pull(cloud, gather(g).astype(slopes.dtype))

    def predict(self, cloud: Cloud, x: jax.Array) -> jax.Array:
        """f(x_j), shape (n,)."""
        return self.linearize(cloud, x)[0]


class Reduced(Univariate):
    """r relu(<(x, 1), d(theta)>) for ``Polar`` neurons, eq. (4)."""

    def __init__(self, forces: str) -> None:
        _checks.one_of("forces", forces, FORCES)
        self.record, self.forces = Polar, forces

    def direction(self, cloud: Cloud) -> jax.Array:
        """d(theta)."""
        return unit(cloud.particles.theta)

    def amplitude(self, cloud: Cloud) -> jax.Array:
        """r."""
        return cloud.particles.r

    def chart(self, flow: Flow, cloud: Cloud) -> tuple[Flow, Cloud, Callable[[Any], Any]]:
        """Lifted flows step in (a, b, c), where no sine, cosine or arctangent is needed."""
        if type(flow.space) is not Lifted or flow.regulariser is not None:
            return super().chart(flow, cloud)
        ratio = flow.scaling.ratio(cloud)
        space = Hyperbola(flow.space)
        twin = Flow(Raw(self.forces, flow.scaling), space, flow.loss, flow.scaling)
        start = unfold(cloud, space.delta(cloud), ratio)
        return twin, cloud.at(start), lambda now: fold(cloud, start, now, ratio)


class Raw(Univariate):
    """(m/alpha) c relu(a x - b) for ``Affine`` neurons, eq. (1)."""

    scaling: Scaling

    def __init__(self, forces: str, scaling: Scaling) -> None:
        _checks.one_of("forces", forces, FORCES)
        self.record, self.forces, self.scaling = Affine, forces, scaling

    def direction(self, cloud: Cloud) -> jax.Array:
        """(a, -b)."""
        return jnp.stack([cloud.particles.a, -cloud.particles.b], axis=-1)

    def amplitude(self, cloud: Cloud) -> jax.Array:
        """(m/alpha) c."""
        return self.scaling.ratio(cloud) * cloud.particles.c

    def pull(self, cloud: Cloud, force: jax.Array) -> Affine:
        """(m/alpha) (c G_1, -c G_2, a G_1 - b G_2), coordinate by coordinate, which a compiler fuses better."""
        a, b, c = cloud.particles
        ratio = self.scaling.ratio(cloud)
        return Affine(
            ratio * c * force[:, 0], -ratio * c * force[:, 1], ratio * (a * force[:, 0] - b * force[:, 1])
        )


def total_variation(particles: Polar) -> jax.Array:
    """|r|: summed over neurons, a bound on the weighted total variation of f' (eqs. 16, 17)."""
    return jnp.abs(particles.r)


def weight_decay(particles: Affine) -> jax.Array:
    """(a^2 + b^2 + c^2)/2, weight decay; >= |c| n, with equality at delta = 0."""
    a, b, c = particles
    return 0.5 * (a**2 + b**2 + c**2)


def _polar_laws(dim: int | None) -> dict[str, laws.Law]:
    return {"r": laws.uniform(), "theta": laws.angle()}


def _affine_laws(dim: int | None) -> dict[str, laws.Law]:
    return {"a": laws.uniform(), "b": laws.uniform(), "c": laws.uniform()}


def _reduced(space: Any, loss: Any, alpha: Any, penalty: Any, forces: str) -> Flow:
    extra = {} if penalty is None else {"regulariser": total_variation, "strength": penalty}
    return make_flow(Reduced(forces), space, loss, alpha=alpha, laws=_polar_laws, **extra)


def canonical(loss: Any = "squared", *, variation: Any = None, forces: str = "auto") -> Flow:
    """f = mean_i r_i relu(<(x, 1), d(theta_i)>) on the cylinder dr^2 + dtheta^2, eqs. (4), (7), (11).

    In mean-field time r' = -<G, d>, theta' = -r <G, t>.

    Args:
        loss: ``"squared"``, ``"logistic"``, ``"huber"`` or an elementwise callable (f, y) -> loss.
        variation: strength lam >= 0 of the penalty lam * mean |r_i| of eq. (16), or None.
        forces: ``"auto"``, ``"dense"`` or ``"fast"``.

    >>> import jax, meanflow as mf
    >>> flow = canonical()
    >>> cloud = flow.init(jax.random.key(0), 50)
    >>> flow.feature.predict(cloud, jnp.linspace(-1, 1, 5)).shape
    (5,)
    """
    return _reduced(Cylinder(), loss, "m", variation, forces)


def lifted(alpha: Any = "m", loss: Any = "squared", *, variation: Any = None, forces: str = "auto") -> Flow:
    """The flow of (a, b, c) seen in (r, theta), with labels delta = c^2 - n^2 (+-inf allowed), Proposition 4.

    r' = -P_rr <G, d>, theta' = -P_tt r <G, t>, with ``meanflow.univariate.balance.Lifted``. delta -> -inf is the kernel
    regime (only r moves), delta -> +inf the adaptive one (the planar flow).
    """
    return _reduced(Lifted(Scaling(alpha)), loss, alpha, variation, forces)


def planar(alpha: Any = "m", loss: Any = "squared", *, variation: Any = None, forces: str = "auto") -> Flow:
    """The limit delta = +inf: |c| = 1, only (a, b) learn. (u, v)' = -(m/alpha)^2 sign(r) G, constant in a region."""
    return _reduced(Lifted(Scaling(alpha), float("inf")), loss, alpha, variation, forces)


def radial(alpha: Any = "m", loss: Any = "squared", *, variation: Any = None, forces: str = "auto") -> Flow:
    """The limit delta = -inf: n = 1, only c learns. r' = -(m/alpha)^2 <G, d>, theta' = 0: a linear ODE."""
    return _reduced(Lifted(Scaling(alpha), float("-inf")), loss, alpha, variation, forces)


def full(
    alpha: Any = "m",
    loss: Any = "squared",
    *,
    inner: Any = True,
    outer: Any = True,
    decay: Any = None,
    forces: str = "auto",
) -> Flow:
    """f = (1/alpha) sum_i c_i relu(a_i x - b_i) with plain gradient flow in (a, b, c), eqs. (1), (2).

    Args:
        alpha: ``"m"``, ``"sqrt"``, ``"one"`` or a number.
        loss: as in ``canonical``.
        inner, outer: whether (a, b) and c are trained; (True, False) is planar, (False, True) radial. May be
            arrays of 0 and 1, one per neuron or traced, so that one compiled program covers all three.
        decay: strength lam of weight decay lam * mean (a^2 + b^2 + c^2)/2; then delta' = -2 lam delta.
        forces: as in ``canonical``.
    """
    scaling = Scaling(alpha)
    space = Layers(*(floating(jnp.asarray(u, jnp.result_type(float))) for u in (inner, outer)))
    extra = {} if decay is None else {"regulariser": weight_decay, "strength": decay}
    return make_flow(Raw(forces, scaling), space, loss, alpha=alpha, laws=_affine_laws, **extra)
