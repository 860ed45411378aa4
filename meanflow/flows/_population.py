"""Gaussian inputs without samples: a student learns a teacher on the expected squared loss, in closed form."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Annotated

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from meanflow._boundary import Count, PRNGKey, Rate, checked, number
from meanflow.flows import _equation as equation
from meanflow.flows._equation import Population
from meanflow.flows._features import TwoLayer
from meanflow.flows._losses import Loss
from meanflow.flows._overlaps import Overlaps
from meanflow.measures._cloud import CLOUD, Cloud

if TYPE_CHECKING:
    from meanflow.flows._flow import Flow


class GaussianPopulation(Population):
    """Data x ~ N(0, I) with targets y = f_teacher(x): the loss E (f(x) - y)^2 / 2 without samples.

    Products of two neurons have the closed expectations E[phi(w; x) phi(v; x)] of dual activations (erf, ReLU, leaky
    ReLU, linear, sine, gaussian; smooth activations by quadrature), so that with the signed measure
    nu = student - teacher

        E = 1/2 sum_ik nu_i nu_k E[phi_i phi_k],    V(w) = sum_k nu_k E[phi(w; x) phi_k(x)].

    Neurons of the teacher are those of its own model: its output scale alpha, and its statistics under batch norm.
    Student and teacher share the activation alone; each may have batch norm or not, with any covariance of mean 0.

    Pass it as ``data``. ``sample`` draws from it: a ``sampler`` of ``descend``, or a data set.

    Attributes:
        x, y, weights: empty, with d columns: there are no samples.
        flow: the model of the teacher, two-layer with the activation of the student. A bias, an offset (a centered
            flow), a mean that is not 0 or a scale and shift under batch norm are refused, as they are of students.
        teacher: the teacher's neurons.

    >>> import jax, jax.numpy as jnp, meanflow as mf
    >>> flow = mf.vanilla("erf")
    >>> teacher = mf.Cloud(mf.Neurons(jnp.ones(2), jnp.eye(2)))
    >>> data = mf.flows.GaussianPopulation(flow, teacher)
    >>> float(abs(mf.energy(flow, teacher, data)))
    0.0
    >>> x, y = data.sample(jax.random.key(0), 5)
    >>> x.shape, y.shape
    ((5, 2), (5,))
    """

    flow: "Flow"
    teacher: Cloud

    def __init__(self, flow: "Flow", teacher: Cloud) -> None:
        from meanflow.flows._flow import FLOW  # flows know of populations too

        FLOW("flow", flow)
        CLOUD("teacher", teacher)
        b = getattr(teacher.particles, "b", None)
        if b is None or b.ndim != 2:
            raise ValueError(f"teacher must hold Neurons(a, b), got {type(teacher.particles).__name__}")
        dtype = teacher.weights.dtype
        self.x = jnp.zeros((0, b.shape[1]), dtype)
        self.y, self.weights = jnp.zeros((0, *teacher.particles.a.shape[1:]), dtype), jnp.zeros((0,), dtype)
        self.teacher = teacher
        self.flow = flow.bind(self)
        self._check_model(self.flow)
        self.flow.check(teacher, self.x)

    def moments(self) -> tuple[Array, Array]:  # type: ignore[override]
        """Return mean 0 and covariance I."""
        d, dtype = self.x.shape[1], self.x.dtype
        return jnp.zeros(d, dtype), jnp.eye(d, dtype=dtype)

    @checked
    def sample(self, key: PRNGKey, size: Count) -> tuple[Float[Array, "n d"], Float[Array, " n"]]:
        """Draw ``size`` inputs and their targets."""
        x = jax.random.normal(key, (size, self.x.shape[1]), self.x.dtype)
        return x, equation.predict(self.flow, self.teacher, x)

    @checked
    def overlaps(
        self,
        cloud: Cloud,
        *,
        rate: Rate = 0.0,
        dim: Annotated[float | Array, number(above=0, infinite=True)] = math.inf,
        noise: Rate = 0.0,
    ) -> tuple[Overlaps, Cloud]:
        """Return this population and a cloud of students in their overlaps Q, R, T, for runs of any input dimension.

        The new population is the ``data`` of ``solve`` and ``descend``, for the student's own flow, and the new cloud
        their start: ``Neurons(a, b)`` whose b (K, K + M) are the products of each student with all students, Q, and
        with all teachers, R. Such clouds can be made by hand as well. The state has (K + 1)(K + M) numbers whatever d,
        and a run is differentiable and can be mapped by ``jax.vmap``.

        By default runs are gradient flow on the population. With a ``rate`` eta, ``solve`` is the limit of one-pass
        descent in many dimensions: learning rate eta/d, one fresh sample a step, and time on the clock ``"gradient"``
        eta times the number of samples over d. ``descend`` with steps eta/d on that clock has the mean of every step
        itself. The energy of such a run may rise, and ``steady`` ends it where it does.

        Args:
            cloud: the students, plain two-layer neurons (a, b) with the activation of the teacher.
            rate: eta; needs the activation erf or relu. Cost O(K^2 (K + M)^2) for each velocity, against O(K (K + M))
                without.
            dim: d in the mean length |x|^2 of the inputs, which corrects the terms in eta^2 by O(1/d).
            noise: standard deviation of noise on the targets of one-pass descent. The energy does not count it.

        >>> import jax.numpy as jnp, meanflow as mf
        >>> flow = mf.vanilla("erf", alpha="one", outer=0.0)
        >>> data = mf.flows.GaussianPopulation(flow, mf.Cloud(mf.Neurons(jnp.ones(1), jnp.eye(1, 500))))
        >>> students = mf.Cloud(mf.Neurons(jnp.ones(2), 0.1 * jnp.eye(2, 500)))
        >>> law, start = data.overlaps(students, rate=0.5)
        >>> start.particles.b.round(2).tolist()  # Q and R
        [[0.01, 0.0, 0.1], [0.0, 0.01, 0.0]]
        >>> mf.solve(flow, start, law, 10.0, clock="gradient").energy.round(4).tolist()
        [0.0166]
        """
        from meanflow.kernels._infinite.fourth import fourth_moments

        feature, student = self.flow.feature, cloud.particles
        assert isinstance(feature, TwoLayer)  # overlaps of neurons are defined for these alone
        teacher = feature.directions(self.teacher)
        if getattr(student, "b", None) is None or student.b.shape[1:] != teacher.shape[1:]:
            raise ValueError(
                f"cloud must hold Neurons(a, b) with b (K, {teacher.shape[1]}), like the teacher's"
            )
        one_pass = not (isinstance(rate, float | int) and rate == 0)
        if one_pass:
            fourth_moments(feature.activation)  # refuses other activations
        amplitudes = feature.amplitudes(self.teacher)
        weights = self.teacher.weights.reshape((-1,) + (1,) * (amplitudes.ndim - 1))
        many = isinstance(dim, float) and math.isinf(dim)
        law = Overlaps(
            cloud.size,
            -weights * amplitudes,
            teacher @ teacher.T,
            feature,
            jnp.asarray(rate, teacher.dtype) if one_pass else None,
            None if many else jnp.asarray(dim, teacher.dtype),
            jnp.asarray(noise, teacher.dtype) ** 2,
        )
        return law, cloud.at(student._replace(b=student.b @ jnp.concatenate([student.b, teacher]).T))

    def risk(self, flow: "Flow", cloud: Cloud) -> Float[Array, ""]:
        """Return E (f - y)^2 / 2."""
        self.check(flow)
        p, q = cloud.weights, self.teacher.weights
        student, teacher = flow.feature, self.flow.feature
        own = p @ (student.overlap(cloud, student, cloud) @ p)
        cross = p @ (student.overlap(cloud, teacher, self.teacher) @ q)
        return 0.5 * (own - 2 * cross + q @ (teacher.overlap(self.teacher, teacher, self.teacher) @ q))

    def potential(self, flow: "Flow", cloud: Cloud, probe: Cloud) -> Float[Array, " k"]:
        """Return E[(f - y) phi(w; x)] at the particles of ``probe``."""
        self.check(flow)
        own = flow.feature.overlap(probe, flow.feature, cloud) @ cloud.weights
        return own - flow.feature.overlap(probe, self.flow.feature, self.teacher) @ self.teacher.weights

    def check(self, flow: "Flow") -> None:
        """Raise ValueError unless the expected loss of ``flow`` is known: see the attribute ``flow``."""
        if flow.loss.function is not Loss("squared").function:
            raise ValueError("a Gaussian population needs flows with loss='squared', got another loss")
        self._check_model(flow)

    def _check_model(self, flow: "Flow") -> None:
        if flow.offset is not None:
            raise ValueError("a Gaussian population needs flows that are not centered, got a centered one")
        flow.feature.check_overlap(self.flow.feature)
