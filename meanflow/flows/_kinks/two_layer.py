"""How neurons a s(b . x) with a piecewise linear activation s move while the residual is frozen, in any dimension.

In flat (a, b) the motion between kinks has a closed form, and weight decay that is equal on both layers only scales it.
"""

from collections.abc import Callable
from typing import ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from meanflow._numerics import safe_divide
from meanflow._reuse import kept
from meanflow.flows._features import TwoLayer, block_count
from meanflow.flows._kinks import contacts, passage, planes, turning
from meanflow.flows._kinks.contacts import Contacts, Forces, Tables
from meanflow.flows._motion import Cap, FrozenMotion, Samples, Scalar
from meanflow.flows._normalized import BatchNormed
from meanflow.flows._problem import Problem
from meanflow.geometry import _omega as omega
from meanflow.geometry._neurons import LayerRates
from meanflow.geometry._space import BatchNormManifold, Space, norms
from meanflow.measures._cloud import Neurons

MOST_SLOTS = 16  # hyperplanes on which one neuron can sit at once, if n and d are as large
TOGETHER = 32  # an event costs as much as a force evaluation, so even small clouds gather those that have one
MOST_PRODUCTS = 4096  # samples up to which the matrix of all their inner products is kept during a step
PROBES = (-3.0, -1.0, -0.5, -1e-3, 0.0, 1e-3, 0.5, 1.0, 3.0)


@kept()  # what it finds inside of a trace is known from outside: values could not be looked at in every one
def homogeneous_slopes(activation: Callable[[jax.Array], jax.Array]) -> tuple[float, float]:
    """Return the slopes of an activation below and above 0, or raise ValueError if it is not linear on both sides.

    >>> homogeneous_slopes(jax.nn.relu)
    (0.0, 1.0)
    """
    with jax.ensure_compile_time_eval():
        value = np.asarray(activation(jnp.asarray(PROBES)), np.float64)
    z = np.asarray(PROBES)
    below, above = -value[1], value[-2]
    if not np.allclose(value, np.where(z < 0, below, above) * z, rtol=1e-5, atol=1e-12):
        raise ValueError(
            "solver='sliding' needs an activation that is linear on both sides of 0, such as relu, leaky_relu or abs, "
            f"got {getattr(activation, '__name__', activation)}; use a diffrax solver for smooth activations"
        )
    return float(below) + 0.0, float(above) + 0.0  # no negative zero


@kept()
def quadratic_decay(penalty: Callable[[Neurons], jax.Array], dim: int) -> tuple[float, float]:
    """Return (ka, kb) for which a penalty is (ka a^2 + kb |b|^2)/2, or raise ValueError if it is none of these."""
    rng = np.random.default_rng(0)
    a, b = np.append(rng.standard_normal(6), [1.0, 0.0]), rng.standard_normal((8, dim))
    b[6:] = 0.0
    b[7, 0] = 1.0
    with jax.ensure_compile_time_eval():
        value = np.asarray(penalty(Neurons(jnp.asarray(a), jnp.asarray(b))), np.float64)
    outer, inner = 2 * value[6], 2 * value[7]
    if not np.allclose(value, 0.5 * (outer * a**2 + inner * np.sum(b**2, axis=1)), rtol=1e-4, atol=1e-6):
        raise ValueError(
            "solver='sliding' solves penalties (ka a^2 + kb |b|^2)/2, weight decay of each layer, "
            f"got {getattr(penalty, '__name__', penalty)}; use fixed steps with another solver"
        )
    return float(outer), float(inner)


class Place(NamedTuple):
    """Where each neuron is among the hyperplanes, and the totals of the run.

    Attributes:
        planes: the arrangement of hyperplanes.
        side: (m, n) on which side of each plane a neuron is; 0 if it sits on it.
        slots: (m, k) the planes it sits on; n marks an empty slot.
        z: (m, n) <x, b>, while a step is under way; None between steps.
        gram: (n, n) inner products of the samples while a step is under way, if there are not too many; else None.
        counts: the totals so far.
    """

    planes: planes.Planes
    side: Int[Array, "m n"]
    slots: Int[Array, "m k"]
    z: Float[Array, "m n"] | None
    gram: Float[Array, "n n"] | None
    counts: passage.Counts


Layers = tuple[jax.Array, jax.Array]  # factors (outer, inner), (m,) each, of the weights of the two layers
Weights = tuple[Float[Array, " m"], Float[Array, "m d"], Float[Array, "m n"]]  # a, b and z = <x, b>


def _scaled(weights: Weights, factors: Layers) -> Weights:
    """Return (a, b, z) with the outer weights and the inner ones multiplied by factors (m,)."""
    (a, b, z), (outer, inner) = weights, factors
    return a * outer, b * inner[:, None], z * inner[:, None]


@jax.custom_jvp
def _heights(
    z: Float[Array, "m n"], b: Float[Array, "m d"], normal: Float[Array, "n d"]
) -> Float[Array, "m n"]:
    """Return z = <x, b> as it is known, with the derivatives of <x, b>; z = 0 is a constant."""
    return z


@_heights.defjvp
def _heights_jvp(
    primals: tuple[jax.Array, jax.Array, jax.Array], tangents: tuple[jax.Array, jax.Array, jax.Array]
) -> tuple[jax.Array, jax.Array]:
    (z, b, normal), (_, db, dnormal) = primals, tangents
    return z, jnp.where(z == 0, 0.0, db @ normal.T + b @ dnormal.T)


class TwoLayerMotion(FrozenMotion):
    """Exact motion of (a, b) between kinks, for activations that are linear on both sides of 0.

    Attributes:
        normal: (n, d) the samples, with a last column of ones if there is a bias.
        decay: (2,) strengths of the decay of the outer and the inner layer, on the clock of the run; None without.
        rates: the rates of the two layers, and which neurons are real.
        slopes: those of the activation below and above 0.
    """

    normal: Float[Array, "n d"]
    decay: Float[Array, "2"] | None
    rates: passage.Rates
    slopes: tuple[float, float]
    spaces: ClassVar[tuple[type[Space], ...]] = (Space, LayerRates)

    def __init__(self, problem: Problem, feature: TwoLayer) -> None:
        flow, cloud, data = problem.chart.flow, problem.chart.base, problem.data
        if type(flow.space) not in self.spaces:
            raise ValueError(
                f"solver='sliding' does not know how these neurons move on {type(flow.space).__name__}"
            )
        dtype = cloud.weights.dtype
        self.slopes = homogeneous_slopes(feature.activation)
        ratio, speed = flow.scaling.ratio(cloud), jnp.asarray(problem.speed, dtype)
        # velocities are m/alpha times those of the mean, on the clock of the run
        super().__init__(problem, data, ratio, ratio * speed)
        self.normal = feature.inputs(data.x)
        one = jnp.ones_like(cloud.weights)
        inner, outer = flow.space.rates(cloud) if isinstance(flow.space, LayerRates) else (one, one)
        self.rates = passage.Rates(inner, outer, cloud.weights > 0)
        self.decay = None
        if flow.penalty is not None:
            decays = quadratic_decay(flow.penalty.function, self.normal.shape[1])
            self.decay = jnp.asarray(decays, dtype) * flow.penalty.strength * speed

    def raw(self, particles: Neurons) -> Float[Array, "m d"]:
        """Return the inner weights that move."""
        return particles.b

    def particles(self, a: Float[Array, " m"], b: Float[Array, "m d"]) -> Neurons:
        """Return the particles of the model with these weights, the way back from ``raw``."""
        return Neurons(a, b)

    def begin(self, particles: Neurons) -> Place:
        """Return the sides of neurons that have not moved yet; one exactly on hyperplanes is decided there."""
        found = planes.arrange(self.normal)
        z = particles.b @ self.normal.T
        n, size = z.shape[1], min(*self.normal.shape, MOST_SLOTS)
        # b = 0 is on all planes: such a neuron rests, without active samples
        on = (z == 0) & found.live[None, :] & jnp.any(particles.b != 0, axis=1)[:, None]
        side = jnp.where(found.live[None, :] & ~on, jnp.where(z > 0, 1, -1), 0).astype(jnp.int8)

        # the planes of each neuron, one after the other; those beyond the last slot are dropped
        index = jnp.arange(n, dtype=jnp.int32)[None, :]
        slots = jnp.sort(jnp.where(on, index, n), axis=1)[:, :size]
        many = jnp.any((jnp.sum(on, axis=1) > size) & self.rates.is_real)
        return Place(found, side, slots, None, None, passage.marked(passage.no_events(), many))

    def unfold(self, particles: Neurons, state: Place) -> Place:
        """Compute <x, b> anew; the side of each plane is remembered, so rounding cannot change it."""
        z = self.raw(particles) @ self.normal.T
        sign = state.side.astype(z.dtype)
        n = z.shape[1]
        # all inner products at once where that is cheap beside <x, b> itself, and fits
        gram = self.normal @ self.normal.T if n <= z.shape[0] and n <= MOST_PRODUCTS else None
        return state._replace(z=sign * jnp.maximum(sign * z, 0.0), gram=gram)

    def fold(self, state: Place) -> Place:
        """Forget <x, b> and the inner products of the samples."""
        return state._replace(z=None, gram=None)

    def predict(self, particles: Neurons, state: Place) -> Float[Array, " n"]:
        """Return the predictions f_j."""
        assert state.z is not None
        share = self.shares * particles.a
        f = planes.predictions(
            share, particles.b, state.z, state.side, state.planes, self.slopes, self.normal
        )
        return f - self.offset

    def move(
        self, particles: Neurons, state: Place, covector: Samples, time: Scalar, cap: Cap, forward: bool
    ) -> tuple[Neurons, Place]:
        """Move for ``time`` in a frozen field.

        Cost: two products of the neurons with the samples, O(m n d), and O(n d) an event. Memory: z (m, n) and the
        sides, beside that O(block) for clouds that ``block_count`` divides. Keeping <x, g> (m, n) as well would make
        most events O(n); a run of 1000 neurons and 1000 samples in 800 dimensions gained 4 to 5 % by it.
        """
        assert state.z is not None
        weights, clock = (particles.a, self.raw(particles), state.z), jnp.full_like(particles.a, time)
        after: Layers | None = None
        if self.decay is not None:
            clock, before, after = self._fading(self.decay, time)
            weights = _scaled(weights, before)
        # decay is taken out of the motion, so that the closed forms stand as they are (see ``_fading``)
        forces, tables = planes.freeze(self.normal, state.planes, covector, self.slopes, state.gram)
        # all planes that neurons sit on are decided anew, since the forces have changed
        here = Contacts(state.side, state.slots, jnp.zeros(state.slots.shape, state.side.dtype))
        steps, task = self.way(weights, here, clock, forces, tables)
        end, counts = passage.run(
            steps,
            task,
            4 * self.y.shape[0] + 16 if cap is None else cap,
            forward=forward,
            together=TOGETHER,
            blocks=block_count(state.z.size, self.normal.shape[1]),
        )
        a, b = end.moving.a, end.moving.b
        z = _heights(end.z, b, self.normal)
        if after is not None:
            a, b, z = _scaled((a, b, z), after)
        # whoever still has time left ran out of events or of slots: the run is marked, never silently wrong
        side, slots, _ = end.contacts
        slides = jnp.sum(slots < self.y.shape[0], axis=1, dtype=jnp.int32)
        overflow = jnp.any((end.moving.left != 0) & self.rates.is_real)
        most = jnp.max(jnp.where(self.rates.is_real, slides, 0))
        counts = passage.marked(state.counts + counts, overflow, most)
        return self.particles(a, b), state._replace(side=side, slots=slots, z=z, counts=counts)

    def way(
        self, weights: Weights, here: Contacts, clock: Float[Array, " m"], forces: Forces, tables: Tables
    ) -> tuple[passage.Steps, passage.Task]:
        """Return the sub-step: closed forms between events, and most neurons carried to the end by ``glide``."""
        a, b, z = weights
        moving = planes.Moving(a, b, contacts.force_of(here.side, forces), clock)
        walkers = planes.Walkers(moving, jax.lax.stop_gradient(z), here, jnp.zeros(a.shape, bool))
        steps = passage.Steps(planes.advance, planes.carry, first=planes.glide)
        return steps, passage.Task(walkers, self.rates, forces, tables)

    def _fading(self, decay: Float[Array, "2"], time: Scalar) -> tuple[Float[Array, " m"], Layers, Layers]:
        """Return how decay with rates la and lb is taken out of the motion.

        It is the time for which neurons move without decay, and what their weights are multiplied by ahead of that
        motion and behind it.

        If la = lb = lam, a = exp(-lam t) A and b = exp(-lam t) B leave the motion of A and B as it is without decay.
        If one layer is frozen, the other moves on the stretched clock (exp((la + lb) t) - 1) / (la + lb). Both are
        exact. Otherwise half of the decay comes before the motion and half behind it, which is of order 2.
        """
        rates = self.rates
        fading = decay[0] * rates.outer, decay[1] * rates.inner
        frozen = rates.inner * rates.outer == 0
        exact = frozen | (fading[0] == fading[1])
        total = fading[0] + fading[1]
        stretched = safe_divide(jnp.expm1(total * time), total) + jnp.where(total == 0, time, 0.0)
        outer, inner = (jnp.exp(-rate * time) for rate in fading)
        before = lambda whole: jnp.where(exact, 1.0, jnp.sqrt(whole))
        after = lambda whole: jnp.where(exact, whole, jnp.sqrt(whole))
        clock = jnp.where(frozen, stretched, time)
        return clock, (before(outer), before(inner)), (after(outer), after(inner))

    def counts(self, state: Place) -> dict[str, jax.Array]:
        """Return the totals of events of real neurons, how many slide now, and on how many planes at most so far."""
        on = jnp.any(state.slots < self.y.shape[0], axis=1) & self.rates.is_real
        return passage.by_name(state.counts) | {
            "sliding": jnp.sum(on, dtype=jnp.int32),
            "planes": state.counts[passage.PLANES],
        }


class NormalizedMotion(TwoLayerMotion):
    """Motion of neurons under batch norm, by local integration between kinks; raw, or on the manifold.

    On the manifold a neuron bb with label c moves as the raw one b = c bb/|bb| does.

    Attributes:
        covariance: (d, d) covariance.
        norms: (m,) the labels on the manifold, None for raw neurons.
    """

    covariance: Float[Array, "d d"]
    norms: Float[Array, " m"] | None
    spaces: ClassVar[tuple[type[Space], ...]] = (Space, BatchNormManifold)

    def __init__(self, problem: Problem, feature: BatchNormed) -> None:
        if problem.chart.flow.penalty is not None:
            raise ValueError(
                "solver='sliding' solves flows under batch norm without a penalty, "
                f"got {problem.chart.flow.penalty.function}; use fixed steps with another solver"
            )
        super().__init__(problem, feature)
        self.covariance = feature.statistics()[1]
        self.norms = None if feature.raw else norms(problem.chart.base)

    def raw(self, particles: Neurons) -> Float[Array, "m d"]:
        """Return the raw inner weights."""
        if self.norms is None:
            return particles.b
        return self.norms[:, None] * omega.direction(particles.b)

    def particles(self, a: Float[Array, " m"], b: Float[Array, "m d"]) -> Neurons:
        """Return raw neurons, or those on the manifold."""
        return Neurons(a, b if self.norms is None else omega.normalize(b, self.covariance))

    def predict(self, particles: Neurons, state: Place) -> Float[Array, " n"]:
        """Return the predictions f_j: normalizing divides what a neuron counts by |b|_S."""
        b = self.raw(particles)
        return super().predict(Neurons(particles.a / omega.sigma_norm(b, self.covariance)[:, 0], b), state)

    def way(
        self, weights: Weights, here: Contacts, clock: Float[Array, " m"], forces: Forces, tables: Tables
    ) -> tuple[passage.Steps, passage.Task]:
        """Return the sub-step: from event to event in steps of order 4."""
        a, b, z = weights
        moving = turning.Moving(a, b, contacts.force_of(here.side, forces), clock)
        turners = turning.Turners(moving, jax.lax.stop_gradient(z), here, jnp.zeros_like(here.came))
        steps = passage.Steps(turning.advance, turning.carry)
        return steps, passage.Task(turners, self.rates, turning.Field(forces, self.covariance), tables)
