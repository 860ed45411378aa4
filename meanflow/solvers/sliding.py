"""The sliding solver: univariate ReLU flows through their kinks, as a diffrax solver.

The field of a ReLU network jumps where a neuron meets a sample; ordinary solvers chatter or stall there. Here the
residual is frozen for a sub-step and each neuron moves exactly, event by event, with the rule of ``sliding_events``.
The frozen field is linear in the residual, so sub-steps with mixtures of residuals can be composed as in Lie-group
methods (``STAGES``): third order where no neuron meets a ray. An event bends the residual as a function of time, which
costs O(h^2) each, so through kinks the order is 2, with a small constant. In full, lifted, planar and radial flows the
motion in a region is closed form. The canonical flow has none: it is split (r with theta frozen, theta with r frozen),
where the turning step is the same program with p = d(theta), c = 1 and both factors equal to r.
"""

from typing import Any, ClassVar, NamedTuple

import diffrax
import jax
import jax.numpy as jnp

from meanflow import _checks
from meanflow._numerics import safe_divide
from meanflow.flows.flow import Flow
from meanflow.flows.univariate import forces
from meanflow.flows.univariate.models import Univariate, total_variation, weight_decay
from meanflow.geometry import balance
from meanflow.geometry.balance import Layers, Lifted
from meanflow.geometry.space import Cylinder, Space
from meanflow.measures.cloud import Affine, Cloud, Polar
from meanflow.solvers import sliding_events as events

# The commutator-free method of order 3 with 3 stages and 2 sub-steps of Celledoni, Marthinsen and Owren (2003). A row
# per stage: weights of the covector at the start of the step and of the stage's own in the one that is frozen; the
# length in steps; 1 if the end is kept; 1 if the stage starts from the kept point, not from the start of the step.
# Stages 1 and 3, of lengths 1/3 and 2/3, make up the step; the second only feeds the third.
STAGES = (
    (0.0, 1.0, 1 / 3, 1, 0),
    (0.0, 1.0, 2 / 3, 0, 0),
    (-1 / 8, 9 / 8, 2 / 3, 0, 1),
)


class Planar(NamedTuple):
    """What is integrated, arrays (m,): direction p = (u, v) = (a, -b) and c; on the cylinder d(theta) and r."""

    u: jax.Array
    v: jax.Array
    c: jax.Array


class SlidingState(NamedTuple):
    """Region and ray (-1: none) of each neuron, event counts, and whether a step ran out of events."""

    region: jax.Array
    ray: jax.Array
    counts: events.Counts
    overflow: jax.Array


class _Motion(NamedTuple):
    """Numbers of one problem that stay fixed during the solve."""

    kp: jax.Array
    kc: jax.Array
    gain: jax.Array  # factor of the prediction, m/alpha or 1
    pace: jax.Array  # factor of the force: clock, and m/alpha in raw coordinates
    lam: jax.Array
    real: jax.Array


def _on_cylinder(flow: Flow) -> bool:
    """Whether (d, r) are integrated by splitting; else (p, c) are moved exactly."""
    if isinstance(flow.space, Cylinder):
        return True
    return flow.regulariser is not None and isinstance(flow.space, Lifted) and flow.space.limit == -jnp.inf


def _check(flow: Flow) -> None:
    if not isinstance(flow.feature, Univariate):
        raise ValueError(
            f"solver='sliding' needs a univariate ReLU flow, got the feature {type(flow.feature).__name__}"
        )
    if type(flow.space) not in (Cylinder, Lifted, Layers, Space):
        raise ValueError(
            f"solver='sliding' knows the spaces Cylinder, Lifted and Layers, got {type(flow.space).__name__}"
        )
    if flow.regulariser is None:
        return
    allowed = total_variation if _on_cylinder(flow) else weight_decay
    if flow.regulariser.function is not allowed:
        raise ValueError(
            "solver='sliding' solves the penalty variation= on canonical and radial flows and decay= on full ones, "
            f"got {getattr(flow.regulariser.function, '__name__', 'another regulariser')}"
        )


def _motion(flow: Flow, cloud: Cloud, speed: jax.Array) -> _Motion:
    one = jnp.ones_like(cloud.weights)
    ratio = flow.scaling.ratio(cloud)
    speed = jnp.asarray(speed, one.dtype)
    lam = jnp.zeros_like(ratio) if flow.regulariser is None else flow.regulariser.strength.astype(one.dtype)
    real = cloud.weights > 0
    if _on_cylinder(flow):
        # r' = -gain (<G, d> + lam sign r); theta turns only on the cylinder itself
        turns = one if isinstance(flow.space, Cylinder) else jnp.zeros_like(one)
        pace = speed if isinstance(flow.space, Cylinder) else speed * ratio**2
        return _Motion(turns, turns, jnp.ones_like(ratio), pace, lam * pace, real)
    if isinstance(flow.space, Lifted):
        kp, kc = balance.factors(flow.space.delta(cloud))
    elif isinstance(flow.space, Layers):
        kp, kc = (
            flow.space.inner_moves.astype(one.dtype) * one,
            flow.space.outer_moves.astype(one.dtype) * one,
        )
    else:
        kp = kc = one
    return _Motion(kp, kc, ratio, ratio * speed, lam * speed, real)


class Sliding(diffrax.AbstractSolver):
    """Solver for univariate ReLU flows that follows Filippov solutions exactly in each frozen field.

    Order 3 without events (2 on the cylinder, and with the penalty ``variation``), 2 with. Three force evaluations a
    step, O(m + s) each, and O(m) work per event. The balance delta is conserved to rounding.
    Works with constant steps and step rules that need no error estimate.

    Attributes:
        max_events: None (forward use): loop until every neuron is done, at most 2s + 2 events a step. An integer, for
            instance 8: a scan of that length through which reverse mode works, memory O(max_events m) a step. Running
            out of events is reported by ``failed``.

    >>> Sliding(max_events=8).max_events
    8
    """

    max_events: int | None = None

    term_structure: ClassVar = diffrax.AbstractTerm
    interpolation_cls: ClassVar = diffrax.LocalLinearInterpolation
    clip_to_saves: ClassVar[bool] = True

    def __check_init__(self) -> None:
        """Refuses a number of events below 1."""
        if self.max_events is not None:
            _checks.whole("max_events", self.max_events, 1)

    def order(self, terms: Any) -> int:
        """2, the order through crossings, captures and releases."""
        return 2

    def encode(self, flow: Flow, cloud: Cloud) -> Planar:
        """The integrated coordinates of a cloud."""
        _check(flow)
        if _on_cylinder(flow):
            d = balance.unit(cloud.particles.theta)
            return Planar(d[:, 0], d[:, 1], cloud.particles.r)
        if isinstance(cloud.particles, Affine):
            a, b, c = cloud.particles
            return Planar(a, -b, c)
        space: Any = flow.space
        p, c = balance.to_raw(cloud.particles, space.delta(cloud), flow.scaling.ratio(cloud))
        return Planar(p[:, 0], p[:, 1], c)

    def decode(self, flow: Flow, cloud: Cloud, y: Planar) -> Affine | Polar:
        """Back to the particles of the flow."""
        p = jnp.stack([y.u, y.v], axis=-1)
        if _on_cylinder(flow):
            return Polar(y.c, balance.angle_of(p))
        if isinstance(cloud.particles, Affine):
            return Affine(y.u, -y.v, y.c)
        return balance.to_polar(p, y.c, flow.scaling.ratio(cloud))

    def report(self, solver_state: SlidingState) -> dict[str, jax.Array]:
        """Totals of crossings, captures, releases, deaths and non-unique events of real neurons."""
        return dict(solver_state.counts._asdict())

    def failed(self, solver_state: SlidingState) -> jax.Array:
        """True if in some step a neuron had time left after the last allowed event."""
        return solver_state.overflow

    def init(self, terms: Any, t0: Any, t1: Any, y0: Planar, args: Any) -> SlidingState:
        """Regions by bisection; neurons exactly on a sample start on its ray, where the Filippov rule decides."""
        _check(args.flow)
        x = jnp.sort(args.data.x)
        total = 2 * x.shape[0]
        region = forces.find_regions(jnp.stack([y0.u, y0.v], axis=-1), x)
        lower = (region - 1) % total
        ray = jnp.full_like(region, -1)
        for boundary in (lower, region):
            sample = x[(-1 - boundary) % x.shape[0]]
            side = jnp.where(boundary < x.shape[0], 1, -1)
            on = (sample * y0.u == -y0.v) & (y0.u * side > 0)
            ray = jnp.where(on, boundary, ray)
        zero = jnp.zeros((), jnp.int32)
        return SlidingState(region, ray, events.Counts(*[zero] * 5), jnp.zeros((), bool))

    def func(self, terms: Any, t0: Any, y0: Planar, args: Any) -> Planar:
        """Part of diffrax's interface: the velocity."""
        return self.velocity(t0, y0, args)

    def velocity(self, t: Any, y0: Planar, args: Any) -> Planar:
        """Velocity of the integrated coordinates by the region each direction lies in (no sliding)."""
        motion = _motion(args.flow, args.cloud, args.speed)
        order = jnp.argsort(args.data.x)
        x = args.data.x[order]
        region = forces.find_regions(jnp.stack([y0.u, y0.v], axis=-1), x)
        field = events.freeze(x, self._covector(args, motion, order, y0, region))
        force_u, force_v = field.force_u[region], field.force_v[region]
        work = y0.u * force_u + y0.v * force_v
        if _on_cylinder(args.flow):
            turn = motion.kp * y0.c
            rate = work + motion.lam * jnp.sign(y0.c)
            return Planar(-turn * (force_u - work * y0.u), -turn * (force_v - work * y0.v), -rate)
        return Planar(
            -motion.kp * (y0.c * force_u + motion.lam * y0.u),
            -motion.kp * (y0.c * force_v + motion.lam * y0.v),
            -motion.kc * (work + motion.lam * y0.c),
        )

    def step(
        self,
        terms: Any,
        t0: Any,
        t1: Any,
        y0: Planar,
        args: Any,
        solver_state: SlidingState,
        made_jump: Any,
    ) -> tuple[Planar, None, dict[str, Any], SlidingState, Any]:
        """Three stages, two sub-steps; see ``STAGES``."""
        motion = _motion(args.flow, args.cloud, args.speed)
        move = self._split if _on_cylinder(args.flow) else self._exact
        order = jnp.argsort(args.data.x)
        x = args.data.x[order]
        time = jnp.asarray(t1 - t0, y0.c.dtype)

        def stage(carry: tuple, row: jax.Array) -> tuple[tuple, None]:
            (y, state), kept, opening = carry
            at_start, own, length, keeps, goes_on = row
            g = self._covector(args, motion, order, y, state.region)
            opening = jnp.where(keeps > 0, g, opening)
            field = events.freeze(x, at_start * opening + own * g)
            start, held = jax.tree.map(lambda u, v: jnp.where(goes_on > 0, u, v), kept, (y0, solver_state))
            y, end = move(start, held, field, motion, length * time)
            here = (y, end._replace(overflow=end.overflow | state.overflow))
            kept = jax.tree.map(lambda u, v: jnp.where(keeps > 0, u, v), here, kept)
            return (here, kept, opening), None

        here = (y0, solver_state)
        rows = jnp.asarray(STAGES, time.dtype)
        # one program for all stages: the events are what takes long to compile
        ((y1, final), _, _), _ = jax.lax.scan(stage, (here, here, jnp.zeros_like(x)), rows)
        return y1, None, {"y0": y0, "y1": y1}, final, diffrax.RESULTS.successful

    def _covector(
        self, args: Any, motion: _Motion, order: jax.Array, y: Planar, region: jax.Array
    ) -> jax.Array:
        """q_j l'(f_j) at y, for sorted samples, with the clock and the scale included."""
        data = args.data
        share = args.cloud.weights * motion.gain * y.c
        f = forces.region_predictions(region, jnp.stack([share * y.u, share * y.v], axis=-1), data.x[order])
        return motion.pace * data.weights[order] * args.flow.loss.slope(f, data.y[order])

    def _exact(
        self, y: Planar, state: SlidingState, field: events.Field, motion: _Motion, time: jax.Array
    ) -> tuple[Planar, SlidingState]:
        """(p, c) for ``time`` in a frozen field. Weight decay is exact too: it scales p and c, which moves no ray."""
        lam = motion.lam
        # p = exp(-lam t) P, c = exp(-lam t) C leaves P' = -C G; with one layer frozen the clock stretches instead
        stretched = safe_divide(jnp.expm1(lam * time), lam) + jnp.where(lam == 0, time, 0.0)
        left = jnp.where(motion.kp * motion.kc > 0, time, stretched)
        u, v, c, state = self._run(y, state, field, motion.kp, motion.kc, left, motion.real)
        inner, outer = jnp.exp(-lam * motion.kp * time), jnp.exp(-lam * motion.kc * time)
        return Planar(inner * u, inner * v, outer * c), state

    def _split(
        self, y: Planar, state: SlidingState, field: events.Field, motion: _Motion, time: jax.Array
    ) -> tuple[Planar, SlidingState]:
        """On the cylinder: r for half the time, theta for the whole with that r, then r by the force along the way.

        The turn takes place in the clock dt' = r dt, so freezing r at its middle value misplaces no event to second
        order. It runs with |p| = c and kp = kc = r, so c'/c = -r <G, d>: log(c) is the exact time integral of the
        force through all its kinks. A trapezoid would be as good for r, but its derivatives only of first order.
        """

        def pull(u: jax.Array, v: jax.Array, state: SlidingState) -> jax.Array:
            free = u * field.force_u[state.region] + v * field.force_v[state.region]
            return jnp.where(state.ray >= 0, field.along[jnp.maximum(state.ray, 0)], free)

        first = pull(y.u, y.v, state)
        r = events.soft_drift(y.c, first, motion.lam, time / 2)
        factor = motion.kp * r
        whole = jnp.full_like(r, time)
        u, v, c, state = self._run(
            y._replace(c=jnp.ones_like(r)), state, field, factor, factor, whole, motion.real
        )
        length = jnp.sqrt(u**2 + v**2)
        u, v = u / length, v / length
        # where c hardly moves its logarithm is all rounding, and the force so close to linear that its ends will do
        grown = jnp.log(c)
        moved = jnp.abs(grown) > jnp.finfo(c.dtype).eps ** (1 / 3)
        mean = jnp.where(
            moved, -grown / jnp.where(moved, factor * time, 1.0), (first + pull(u, v, state)) / 2
        )
        return Planar(u, v, events.soft_drift(r, 2 * mean - first, motion.lam, time / 2)), state

    def _run(
        self,
        y: Planar,
        state: SlidingState,
        field: events.Field,
        kp: jax.Array,
        kc: jax.Array,
        left: jax.Array,
        real: jax.Array,
    ) -> tuple[jax.Array, jax.Array, jax.Array, SlidingState]:
        old = jnp.zeros_like(state.ray, bool)
        start = events.Neurons(y.u, y.v, y.c, state.region, state.ray, old, left)
        end, counts, overflow = events.run(start, state.counts, field, kp, kc, real, self.max_events)
        state = SlidingState(end.region, end.ray, counts, state.overflow | overflow)
        return end.u, end.v, end.c, state
