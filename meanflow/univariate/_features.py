"""The feature of a univariate ReLU network, in reduced and in raw coordinates.

``Univariate`` holds what both share, ``Reduced`` is the feature of ``Polar`` neurons (r, theta) and ``Raw`` that of
``Affine`` neurons (a, b, c); ``_models`` joins them with spaces. The penalties ``total_variation`` and ``weight_decay``
are here too, since the exact motion of a model is known only for its own penalty.

Every neuron is amplitude * relu(<(x, 1), p>): p = d(theta), amplitude r in reduced coordinates; p = (a, -b),
amplitude (m/alpha) c in full ones. Inside a region the neuron is linear in x with slope vector q = amplitude * p,
so the potential of the neuron has the differential J_q' G with G the force of ``_forces``.
"""

import abc
from typing import ClassVar

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PyTree

from meanflow import _boundary
from meanflow._numerics import wrap_angle
from meanflow._observable import Observable
from meanflow.flows._features import Feature, Pull
from meanflow.flows._motion import FrozenMotion
from meanflow.flows._problem import Problem
from meanflow.geometry._neurons import LayerRates
from meanflow.geometry._space import Invariant, Space
from meanflow.measures._cloud import Affine, Cloud, Polar
from meanflow.measures._dataset import Dataset
from meanflow.measures._scaling import Scaling
from meanflow.univariate import _forces as force
from meanflow.univariate import _observables as observables
from meanflow.univariate._angles import angle_of, unit
from meanflow.univariate._motion import CylinderMotion, RawMotion
from meanflow.univariate._spaces import Cylinder, Lifted
from meanflow.univariate.balance import balance

FORCES = ("auto", "dense", "fast")
# Kernels are made from arrays of activations, samples x neurons, up to this many entries: 64 MB each in float32.
LARGEST_PATTERN = 2**24
# Predictions alone are made from such an array up to this many entries. To sort the inputs instead takes 0.3 s longer
# to compile, and saves 1 ms a call at 50 000 entries and 9 to 30 ms at this limit (float64, one core).
LARGEST_GRID = 2**20
# Up to (samples, samples x neurons) the dense forces are faster. On processors this is measured (benchmarks
# ``univariate`` and ``sweeps``). On accelerators it follows from the compiled programs (``accelerators.forces``), not
# from times: the fast forces are about 20 small kernels on a GPU, and on a TPU each neuron's lookups in the tables take
# as long as some 30 000 comparisons.
ANY = 2**62
CROSSOVER = {
    "cpu": ((40, 2**22), (ANY, 2**15)),
    "cuda": ((256, ANY), (ANY, 2**27)),
    "rocm": ((256, ANY), (ANY, 2**27)),
    "tpu": ((2**15, ANY),),
}
DENSE = {"cpu": force.PRODUCTS, "cuda": force.SUMS, "rocm": force.SUMS, "tpu": force.SUMS}


class Univariate(Feature):
    """The feature amplitude_i * relu(<(x_j, 1), p_i>) of scalar inputs x (n,).

    Attributes:
        forces: how forces are summed: ``"dense"`` in O(m n), ``"fast"`` in O(m log n + n), or ``"auto"``, the faster
            one for the given size on the platform that the program is compiled for. Both are exact.
    """

    forces: str = eqx.field(static=True)
    input_ndim: ClassVar[int | None] = 1
    has_direction: ClassVar[bool] = True

    def has_kinks(self) -> bool:
        """Say yes: the neurons are ReLU neurons."""
        return True

    @abc.abstractmethod
    def direction(self, cloud: Cloud) -> Float[Array, "m 2"]:
        """Return p_i, the direction that decides at which samples neuron i is active."""

    @abc.abstractmethod
    def outer_weight(self, cloud: Cloud) -> Float[Array, " m"]:
        """Return the factor in front of relu(<(x, 1), p>)."""

    @abc.abstractmethod
    def affine(self, cloud: Cloud) -> Affine:
        """Return neurons (a, b, c) with the same function c relu(a x - b); |(a, b)| is the model's own choice."""

    def observables(self, data: Dataset) -> dict[str, Observable]:
        """Return predictions on a grid and statistics of the knots."""
        return observables.univariate_observables(data)

    def slopes(self, cloud: Cloud) -> Float[Array, "m 2"]:
        """Return q_i = amplitude_i p_i: where active, neuron i is <(x, 1), q_i>."""
        return self.outer_weight(cloud)[:, None] * self.direction(cloud)

    @abc.abstractmethod
    def pull(self, cloud: Cloud, force: Float[Array, "m 2"]) -> PyTree[jax.Array]:
        """Return J_q' G for the forces G: the covector of the potential at each neuron."""

    def check(self, cloud: Cloud, x: jax.Array) -> None:
        """Raise ValueError unless inputs are scalars and every coordinate is one number for each neuron."""
        super().check(cloud, x)
        _boundary.shape("x", x, (None,))
        for name, value in cloud.particles._asdict().items():
            _boundary.shape(f"particles.{name}", value, (cloud.size,))

    def __call__(self, cloud: Cloud, x: Float[Array, " n"]) -> Float[Array, "n m"]:
        """Return phi(w_i; x_j) for every input and neuron."""
        lifted = jnp.stack([x, jnp.ones_like(x)], axis=-1)
        active = force.is_active(self.direction(cloud), x)
        return jnp.where(active, lifted @ self.slopes(cloud).T, 0.0)

    def kernel(
        self,
        cloud: Cloud,
        x: Float[Array, " n"],
        z: Float[Array, " k"],
        space: Space,
        outputs: str = "full",
    ) -> Float[Array, "n k"] | None:
        """Return sum_i p_i 1_i(x) 1_i(z) <(x, 1), M_i (z, 1)>, where 1_i says whether neuron i is active.

        M_i = J_q C J_q', a 2 x 2 matrix for each neuron, is the motion of its slopes under a unit force. Where the
        arrays of activations would be large there is no such form: products with the kernel are faster.
        """
        if max(x.shape[0], z.shape[0]) * cloud.size > LARGEST_PATTERN:
            return None
        p = self.direction(cloud)
        active_x, active_z = (force.is_active(p, u).astype(cloud.weights.dtype) for u in (x, z))
        right, up = (cloud.weights[:, None] * column for column in self.responses(cloud, space))
        pattern = lambda weight: (active_x * weight[None, :]) @ active_z.T
        line_x, line_z = x[:, None], z[None, :]
        mixed = line_x * pattern(up[:, 0]) + line_z * pattern(right[:, 1])
        return line_x * line_z * pattern(right[:, 0]) + mixed + pattern(up[:, 1])

    def responses(self, cloud: Cloud, space: Space) -> list[Float[Array, "m 2"]]:
        """Return the two columns of M_i = J_q C J_q', how the slopes q_i of each neuron move under unit forces."""
        columns = []
        for axis in jnp.eye(2, dtype=cloud.weights.dtype):
            covector = self.pull(cloud, jnp.broadcast_to(axis[None, :], (cloud.size, 2)))
            moved = space.cometric(cloud, covector)
            columns.append(jax.jvp(lambda w: self.slopes(cloud.at(w)), (cloud.particles,), (moved,))[1])
        return columns

    def blocks(self, cloud: Cloud, x: Float[Array, " n"]) -> int:
        """Return 1: where arrays over samples and neurons would be large the forces are summed without them."""
        return 1

    def ways(self, samples: int, neurons: int, small: int = 0) -> dict[str, force.Way]:
        """Return how forces are summed on each platform, for a number of samples and of neurons.

        ``small`` is the number of entries, samples x neurons, up to which the dense way is taken in any case.
        """

        def is_dense(platform: str) -> bool:
            entries = samples * neurons
            faster = any(samples <= most and entries <= all_ for most, all_ in CROSSOVER[platform])
            return self.forces == "dense" or (self.forces == "auto" and (faster or entries <= small))

        return {platform: way if is_dense(platform) else force.REGIONS for platform, way in DENSE.items()}

    def linearize(
        self, cloud: Cloud, x: Float[Array, " n"], *, is_sorted: bool = False, small: int = 0
    ) -> tuple[Float[Array, " n"], Pull]:
        """Return the predictions and the map g -> J_q' G(g) to covectors; see ``Feature.linearize``.

        ``is_sorted`` and ``small`` are those of ``linearization`` and of ``ways``.
        """
        p, share = self.direction(cloud), cloud.weights * self.outer_weight(cloud)
        # a column at a time: the compiler then never stores the pairs
        slopes = jnp.stack([share * p[:, 0], share * p[:, 1]], axis=-1)
        ways = self.ways(x.shape[0], cloud.size, small)
        f, gather = force.linearization(p, slopes, x, ways, is_sorted=is_sorted)
        return f, lambda g: self.pull(cloud, gather(g).astype(slopes.dtype))

    def linearize_data(self, cloud: Cloud, data: Dataset) -> tuple[Float[Array, " n"], Pull]:
        """Return the same at the samples of a data set, which are not sorted again if the data set says they are."""
        return self.linearize(cloud, data.x, is_sorted=data.is_sorted)

    def arrange(self, cloud: Cloud, data: Dataset) -> Dataset:
        """Return the data sorted by x where the fast forces are used."""
        is_fast = force.REGIONS in self.ways(data.size, cloud.size).values()
        return data.sorted() if is_fast else data

    def predict(self, cloud: Cloud, x: Float[Array, " n"]) -> Float[Array, " n"]:
        """Return f(x_j), without sorting the inputs where there are few: that takes long to compile.

        Predictions alone are rare, of a grid at each save of a run for instance, and not worth it.
        """
        return self.linearize(cloud, x, small=LARGEST_GRID)[0]


class Reduced(Univariate):
    """The feature r relu(<(x, 1), d(theta)>) of ``Polar`` neurons, eq. (4)."""

    amplitude: ClassVar[str | None] = "r"
    angles: ClassVar[tuple[str, ...]] = ("theta",)

    def __init__(self, forces: str) -> None:
        _boundary.one_of("forces", forces, FORCES)
        self.record, self.forces = Polar, forces

    def direction(self, cloud: Cloud) -> Float[Array, "m 2"]:
        """Return d(theta) = (cos theta, sin theta)."""
        return unit(cloud.particles.theta)

    def outer_weight(self, cloud: Cloud) -> Float[Array, " m"]:
        """Return r."""
        return cloud.particles.r

    def affine(self, cloud: Cloud) -> Affine:
        """Return (cos theta, -sin theta, r)."""
        r, theta = cloud.particles
        return Affine(jnp.cos(theta), -jnp.sin(theta), r)

    def pull(self, cloud: Cloud, force: Float[Array, "m 2"]) -> Polar:
        """Return (<d, G>, r <t, G>) with d = d(theta), t = d'(theta), by coordinates, which a compiler fuses better."""
        r, theta = cloud.particles
        cos, sin = jnp.cos(theta), jnp.sin(theta)
        turn = r * (cos * force[:, 1] - sin * force[:, 0])
        return Polar(cos * force[:, 0] + sin * force[:, 1], turn)

    def turn(self, cloud: Cloud, start: Cloud) -> Float[Array, " m"]:
        """Return the change of theta, the short way round."""
        return wrap_angle(cloud.particles.theta - start.particles.theta)

    def motion(self, problem: Problem) -> FrozenMotion:
        """Return the motion on the cylinder; lifted flows without a penalty are stepped in raw coordinates instead."""
        flow = problem.chart.flow
        radial = isinstance(flow.space, Lifted) and flow.space.limit == -jnp.inf
        if not radial and type(flow.space) is not Cylinder:
            raise ValueError(
                "solver='sliding' solves penalty= on canonical, radial and full flows, "
                f"got a flow on {type(flow.space).__name__}"
            )
        _check_penalty(problem, total_variation)
        return CylinderMotion(problem)


class Raw(Univariate):
    """The feature (m/alpha) c relu(a x - b) of ``Affine`` neurons, eq. (1)."""

    scaling: Scaling
    amplitude: ClassVar[str | None] = "c"

    def __init__(self, forces: str, scaling: Scaling) -> None:
        _boundary.one_of("forces", forces, FORCES)
        self.record, self.forces, self.scaling = Affine, forces, scaling

    def direction(self, cloud: Cloud) -> Float[Array, "m 2"]:
        """Return (a, -b)."""
        return jnp.stack([cloud.particles.a, -cloud.particles.b], axis=-1)

    def outer_weight(self, cloud: Cloud) -> Float[Array, " m"]:
        """Return (m/alpha) c."""
        return self.scaling.ratio(cloud) * cloud.particles.c

    def affine(self, cloud: Cloud) -> Affine:
        """Return (a, b, (m/alpha) c)."""
        a, b, c = cloud.particles
        return Affine(a, b, self.scaling.ratio(cloud) * c)

    def turn(self, cloud: Cloud, start: Cloud) -> Float[Array, " m"]:
        """Return the change of the angle of (a, -b), the short way round."""
        return wrap_angle(angle_of(self.direction(cloud)) - angle_of(self.direction(start)))

    def invariant(self, space: Space) -> Invariant | None:
        """Return the balance c^2 - a^2 - b^2, which is conserved where both layers learn."""
        if not isinstance(space, LayerRates):
            return None

        def law(cloud: Cloud) -> tuple[jax.Array, jax.Array]:
            a, b, c = cloud.particles
            learns = space.inner_rate * space.outer_rate  # 0 where a frozen layer breaks the law
            return jnp.where(learns == 0, 0.0, balance(cloud.particles)), a**2 + b**2 + c**2

        return law

    def motion(self, problem: Problem) -> FrozenMotion:
        """Return the exact motion of (a, b, c)."""
        _check_penalty(problem, weight_decay)
        return RawMotion(problem)

    def pull(self, cloud: Cloud, force: Float[Array, "m 2"]) -> Affine:
        """Return (m/alpha) (c G_1, -c G_2, a G_1 - b G_2), by coordinates, which a compiler fuses better."""
        a, b, c = cloud.particles
        ratio = self.scaling.ratio(cloud)
        return Affine(
            ratio * c * force[:, 0], -ratio * c * force[:, 1], ratio * (a * force[:, 0] - b * force[:, 1])
        )


def total_variation(particles: Polar) -> Float[Array, " m"]:
    """Return |r|: summed over neurons, it bounds the weighted total variation of f' (eqs. 16, 17)."""
    return jnp.abs(particles.r)


def weight_decay(particles: Affine) -> Float[Array, " m"]:
    """Return (a^2 + b^2 + c^2)/2, which is at least |c| |(a, b)|, with equality at balance 0."""
    a, b, c = particles
    return 0.5 * (a**2 + b**2 + c**2)


def _check_penalty(problem: Problem, solved: object) -> None:
    """Raise ValueError for a penalty other than ``solved``: its frozen motion is not known."""
    penalty = problem.chart.flow.penalty
    if penalty is not None and penalty.function is not solved:
        raise ValueError(
            f"solver='sliding' solves penalty= on canonical, radial and full flows, got {penalty.function}"
        )
