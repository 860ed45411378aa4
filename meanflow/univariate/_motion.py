"""How univariate ReLU neurons move while the residual is frozen, for the sliding solver.

In raw coordinates (full, lifted, planar and radial flows) a neuron p = (a, -b), c in an activation region of constant
force G obeys, with a weight decay of strength lam and rates kp, kc of the layers,

    p' = -kp (c G + lam p),    c' = -kc (<G, p> + lam c).

Without decay this has a closed form, and decay only scales it (``RawMotion.move``). On the cylinder (the canonical
flow, and radial flows with a penalty) the motion is

    r' = -pace (<G, d> + lam sign r),    theta' = -pace r <G, t>,    d = (cos theta, sin theta), t = d'(theta),

which has no closed form. It is split into r with theta frozen and theta with r frozen, an error of second order in the
time. The turning is the same program again, for p = d, c = 1 and both rates equal to r (``CylinderMotion.move``).

``UnivariateMotion`` holds what both share; what happens at a kink is in ``_events``.
"""

import abc
from typing import NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from meanflow._numerics import safe_divide
from meanflow.flows._kinks import passage
from meanflow.flows._motion import Cap, FrozenMotion, Samples, Scalar
from meanflow.flows._problem import Problem
from meanflow.geometry._neurons import RatedSpace
from meanflow.measures._cloud import Affine, Polar
from meanflow.univariate import _events as events
from meanflow.univariate import _forces as forces
from meanflow.univariate._angles import angle_of, unit
from meanflow.univariate._spaces import Cylinder

Vector: TypeAlias = Float[Array, " m"]  # one number for each neuron


class Place(NamedTuple):
    """Where each neuron is, and the totals of the run: what is remembered from sub-step to sub-step.

    Attributes:
        u, v: on the cylinder the unit vector d(theta) of each neuron, which its angle would only give up to rounding;
            None in raw coordinates, where the particles hold the direction themselves.
        region: index of the activation region.
        ray: index of the ray, or -1.
        counts: the totals so far.
    """

    u: Vector | None
    v: Vector | None
    region: Int[Array, " m"]
    ray: Int[Array, " m"]
    counts: passage.Counts


class UnivariateMotion(FrozenMotion):
    """What raw coordinates and the cylinder share: sorted samples, regions, events.

    Attributes:
        x: (s,) the inputs in ascending order, which is that of ``y``, ``weights`` and ``offset`` too.
        decay: strength of the penalty on the clock of the run, a scalar; None for a flow without one.
        is_real: (m,) False for padding, whose events are not counted.
    """

    x: Samples
    decay: Scalar | None
    is_real: Bool[Array, " m"]

    def __init__(
        self, problem: Problem, output_scale: Scalar, force_scale: Scalar, decay_scale: Scalar
    ) -> None:
        # regions are numbered by the order of the samples; sorted once, every sub-step is O(m + s)
        data = problem.data.sorted()
        super().__init__(problem, data, output_scale, force_scale)
        penalty, weights = problem.chart.flow.penalty, problem.chart.base.weights
        decay = None if penalty is None else jnp.asarray(penalty.strength * decay_scale, weights.dtype)
        self.x, self.decay, self.is_real = data.x, decay, weights > 0

    @abc.abstractmethod
    def direction(self, particles: Affine | Polar, place: Place) -> tuple[Vector, Vector, Vector]:
        """Return (u, v, c): the direction p = (u, v) of each neuron and its outer weight."""

    def counts(self, state: Place) -> dict[str, jax.Array]:
        """Return the totals of events of real neurons, and how many slide now."""
        on = jnp.sum((state.ray >= 0) & self.is_real, dtype=jnp.int32)
        return passage.by_name(state.counts) | {"sliding": on}

    def place(self, u: Vector, v: Vector) -> Place:
        """Find the regions of neurons with direction (u, v); one exactly on a sample starts on its ray, undecided."""
        # A sample is active if x u > -v strictly, so equality is on the ray, and only the two rays that bound the
        # region can be equal: ray R - 1 clockwise and ray R (those below s face right, u > 0).
        x, total = self.x, 2 * self.x.shape[0]
        region = forces.find_regions(jnp.stack([u, v], axis=-1), x)
        lower = (region - 1) % total
        ray = jnp.full_like(region, -1)
        for boundary in (lower, region):
            sample = x[(-1 - boundary) % x.shape[0]]
            side = jnp.where(boundary < x.shape[0], 1, -1)
            on = (sample * u == -v) & (u * side > 0)
            ray = jnp.where(on, boundary, ray)
        return Place(None, None, region, ray, passage.no_events())

    def predict(self, particles: Affine | Polar, state: Place) -> Float[Array, " s"]:
        """Return the predictions f_j at the sorted samples."""
        # f_j = sum of <(x_j, 1), share (u, v)> over active neurons. The region is the remembered one, not that of the
        # rounded direction: a neuron on a ray contributes 0 at its sample from either side.
        u, v, c = self.direction(particles, state)
        share = self.shares * c
        f = forces.region_predictions(state.region, jnp.stack([share * u, share * v], axis=-1), self.x)
        return f - self.offset

    def pass_events(
        self,
        start: tuple[Vector, Vector, Vector],
        place: Place,
        frozen: tuple[events.Field, events.Tables],
        rates: tuple[Vector, Vector],
        time: Vector,
        cap: Cap,
        forward: bool,
    ) -> tuple[Vector, Vector, Vector, Place]:
        """Move neurons through all events of a sub-step; return (u, v, c) at its end, and where the neurons are then.

        Args:
            start: (u, v, c) at the start.
            place: regions and rays at the start.
            frozen: forces, as ``events.freeze`` returns them.
            rates: rates of the inner and of the outer layer.
            time: how long each neuron moves.
            cap, forward: see ``FrozenMotion.move``.
        """
        fresh = jnp.zeros_like(place.ray, bool)
        neurons = events.MovingNeurons(events.Moving(*start, time), place.region, place.ray, fresh)
        # a full turn meets 2 s rays; a sub-step with more events is too long, and reported as an overflow
        cap = 2 * self.x.shape[0] + 2 if cap is None else cap
        steps = passage.Steps(events.advance, events.carry, first=events.advance)
        task = passage.Task(neurons, passage.Rates(*rates, self.is_real), *frozen)
        end, counts = passage.run(steps, task, cap, forward=forward)
        u, v, c, left = end.moving
        counts = passage.marked(place.counts + counts, jnp.any((left > 0) & self.is_real))
        return u, v, c, Place(None, None, end.region, end.ray, counts)


class RawMotion(UnivariateMotion):
    """Exact motion of (a, b, c): p = (a, -b) and c move in closed form between events.

    Attributes:
        inner_rate, outer_rate: (m,) factors of the two layers, 0 where one is frozen.
    """

    inner_rate: Vector
    outer_rate: Vector

    def __init__(self, problem: Problem) -> None:
        flow, cloud = problem.chart.flow, problem.chart.base
        if not isinstance(flow.space, RatedSpace):
            raise ValueError(
                "solver='sliding' needs a space that says how fast each layer learns (RatedSpace), "
                f"got {type(flow.space).__name__}"
            )
        ratio, speed = flow.scaling.ratio(cloud), jnp.asarray(problem.speed, cloud.weights.dtype)
        super().__init__(problem, ratio, ratio * speed, speed)
        self.inner_rate, self.outer_rate = flow.space.rates(cloud)

    def direction(self, particles: Affine | Polar, place: Place) -> tuple[Vector, Vector, Vector]:
        """Return (a, -b, c)."""
        assert isinstance(particles, Affine)
        return particles.a, -particles.b, particles.c

    def begin(self, particles: Affine) -> Place:
        """Return the regions and rays of neurons that have not moved yet."""
        return self.place(particles.a, -particles.b)

    def move(
        self, particles: Affine, state: Place, covector: Samples, time: Scalar, cap: Cap, forward: bool
    ) -> tuple[Affine, Place]:
        """Move for ``time`` in a frozen field. Weight decay is exact too: it scales p and c, which moves no ray."""
        decay, rates = self.decay, (self.inner_rate, self.outer_rate)
        left = jnp.full_like(self.shares, time)
        if decay is not None:
            # Decay p' = -C G - lam p, c' = -<G, p> - lam c. With p = exp(-lam t) P, c = exp(-lam t) C it drops out:
            # P' = -C G, C' = -<G, P>. With c frozen only P = exp(lam t) p, and P' = -exp(lam t) c G: the same motion in
            # the time (exp(lam t) - 1)/lam; likewise with p frozen.
            stretched = safe_divide(jnp.expm1(decay * time), decay) + jnp.where(decay == 0, time, 0.0)
            left = jnp.where(rates[0] * rates[1] > 0, left, stretched)
        frozen = events.freeze(self.x, covector)
        start = self.direction(particles, state)
        u, v, c, state = self.pass_events(start, state, frozen, rates, left, cap, forward)
        # back from (P, C); the factors are positive, so no region has changed
        if decay is not None:
            inner, outer = (jnp.exp(-decay * rate * time) for rate in rates)
            u, v, c = inner * u, inner * v, outer * c
        return Affine(u, -v, c), state


class CylinderMotion(UnivariateMotion):
    """Motion of (r, theta) by splitting: r with theta frozen, theta with r frozen.

    Attributes:
        turns: (m,) 1 where theta moves (the canonical flow), 0 where it is frozen (radial flows).
    """

    turns: Vector

    def __init__(self, problem: Problem) -> None:
        flow, cloud = problem.chart.flow, problem.chart.base
        # radial flows have the pace (m/alpha)^2 and do not turn
        free = isinstance(flow.space, Cylinder)
        ratio, speed = flow.scaling.ratio(cloud), jnp.asarray(problem.speed, cloud.weights.dtype)
        pace = speed if free else speed * ratio**2
        super().__init__(problem, jnp.ones_like(ratio), pace, pace)
        self.turns = jnp.ones_like(cloud.weights) if free else jnp.zeros_like(cloud.weights)

    def direction(self, particles: Affine | Polar, place: Place) -> tuple[Vector, Vector, Vector]:
        """Return (cos theta, sin theta, r)."""
        assert isinstance(particles, Polar) and place.u is not None and place.v is not None
        return place.u, place.v, particles.r

    def begin(self, particles: Polar) -> Place:
        """Return the directions, regions and rays of neurons that have not moved yet."""
        d = unit(particles.theta)
        return self.place(d[:, 0], d[:, 1])._replace(u=d[:, 0], v=d[:, 1])

    def move(
        self, particles: Polar, state: Place, covector: Samples, time: Scalar, cap: Cap, forward: bool
    ) -> tuple[Polar, Place]:
        """Move r for half the time, theta for the whole with that r, then r by the force along the way.

        The turn takes place in the clock dt' = r dt, so freezing r at its middle value misplaces no event to second
        order. It runs with |p| = c and both rates r, so c'/c = -r <G, d>: log(c) is the exact time integral of the
        force through all its kinks. A trapezoid would be as good for r, but its derivatives only of first order.
        """
        frozen = events.freeze(self.x, covector)
        decay = jnp.zeros_like(time) if self.decay is None else self.decay

        def pull(u: Vector, v: Vector, place: Place) -> Vector:
            return frozen[0].pull(u, v, place.region, place.ray)

        # 1. r for half the time, with the force at the start
        u, v, r = self.direction(particles, state)
        first = pull(u, v, state)
        r = events.soft_drift(r, first, decay, time / 2)
        # 2. The turn. With |p| = c = 1 and both rates r the program of raw neurons has p' = -r c G, c' = -r <G, p>.
        # Then |p| = c stays (the balance is 0), and p / c turns with theta' = -r <G, t>.
        rate = self.turns * r
        whole = jnp.full_like(r, time)
        u, v, c, end = self.pass_events(
            (u, v, jnp.ones_like(r)), state, frozen, (rate, rate), whole, cap, forward
        )
        length = jnp.sqrt(u**2 + v**2)
        u, v = u / length, v / length
        # 3. r for the second half. Its force is 2 mean - first, so that both halves together feel the mean of <G, d>
        # along the way: (log c)' = -r <G, d> with r constant, hence mean = -log(c) / (r time).
        # Where c has hardly moved, log(c) is rounding, with a relative error eps / |log c|. The mean of the force at
        # both ends is then better, with an error of order (log c)^2: they are equal at |log c| = eps^(1/3).
        grown = jnp.log(c)
        moved = jnp.abs(grown) > jnp.finfo(c.dtype).eps ** (1 / 3)
        mean = jnp.where(moved, -grown / jnp.where(moved, rate * time, 1.0), (first + pull(u, v, end)) / 2)
        r = events.soft_drift(r, 2 * mean - first, decay, time / 2)
        # an angle that is frozen is kept to the last digit
        theta = jnp.where(self.turns > 0, angle_of(jnp.stack([u, v], axis=-1)), particles.theta)
        return Polar(r, theta), end._replace(u=u, v=v)
