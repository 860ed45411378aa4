"""The Eulerian view: the continuity equation on a flat cylinder (height, angle), by finite volumes.

Where a neuron is a point (h, th) of R x circle, the measure has a density that obeys

    d_t rho = d_h(rho d_h V) + d_th(rho d_th V) + tau (d_h^2 + d_th^2) rho,
    V(h, th) = h F(th) + lam reg,    F(th) = sum_j q_j l'(f(x_j), y_j) phi(th, x_j).

The space of a flow says which particle a point of the cylinder is (``Space.cylinder``), and its feature is linear in
the height. That is so for batch norm with inputs in the plane (h = a, b = T(cos th, sin th), the equation of the
mean-field paper on batch norm), and for the canonical flow of univariate ReLU networks (h = r, th = theta, (11) of the
paper on univariate networks).

At a temperature tau > 0 it descends the free energy E + tau int rho log rho. The scheme is conservative and positive:
upwind fluxes of limited (minmod) piecewise-linear reconstructions, or with diffusion the exponentially fitted fluxes of
Scharfetter and Gummel, whose equilibrium is exp(-V/tau) on the grid and which let the free energy of the grid fall;
Heun steps (strong-stability preserving) below the CFL bound. It knows nothing of particles, so it checks them, and it
gives densities at m = infinity. It is of second order where density and speeds are smooth; under ReLU, speeds jump at
the samples' kinks and mass gathers there in one cell, so that distances between measures are of first order.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, NamedTuple, Self

import diffrax
import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, ArrayLike, Float, Real

from meanflow import _boundary
from meanflow._boundary import Length, Positive, Rate, array, checked, count, either, instance
from meanflow._loops import iterate_until, land
from meanflow._reuse import compiled
from meanflow.flows import _equation as equation
from meanflow.flows._flow import Flow
from meanflow.geometry._space import Space
from meanflow.measures._cloud import Cloud
from meanflow.measures._dataset import Dataset
from meanflow.solvers._adaptive import save_times
from meanflow.solvers._stepper import runge_kutta

MAX_STEPS = 10**6
"""Most steps of one run: the time that a Courant step covers falls without bound as the speeds grow."""

CFL = 0.4  # positivity needs sum of Courant numbers <= 1/2


@checked
class Density(eqx.Module):
    """Masses of the cells of [-bound, bound] x circle.

    Attributes:
        mass: (rows, columns), nonnegative, sum 1; rows are cells in the height, columns cells in the angle.
        bound: half-width of the interval of heights.
    """

    mass: Annotated[jax.Array, array((None, None), low=0)]
    bound: Annotated[jax.Array, array((), above=0)]

    def __check_init__(self) -> None:
        """Refuse masses whose sum is not 1."""
        known = _boundary.concrete(self.mass)
        if known is not None and abs(known.sum(dtype=float) - 1) > 1e-4:
            raise ValueError(f"mass must sum to 1, got a sum of {known.sum(dtype=float):g}")

    def at(self, mass: jax.Array) -> Self:
        """Return the same grid with other masses."""
        return eqx.tree_at(lambda d: d.mass, self, mass)

    @property
    def spacing(self) -> tuple[jax.Array, float]:
        """Cell sizes (dh, dth)."""
        rows, columns = self.mass.shape
        return 2 * self.bound / rows, 2 * jnp.pi / columns

    def centres(self) -> tuple[jax.Array, jax.Array]:
        """Return the cell centres: height (rows,) and angle (columns,)."""
        rows, columns = self.mass.shape
        dh, dth = self.spacing
        return -self.bound + dh * (jnp.arange(rows) + 0.5), dth * (jnp.arange(columns) + 0.5)

    def cloud(self, space: Space) -> Cloud:
        """Return the quadrature cloud of the cells in a flow's (bound) space, so that functions of clouds apply."""
        height, angle = (u.ravel() for u in jnp.meshgrid(*self.centres(), indexing="ij"))
        weights = self.mass.ravel() / jnp.sum(self.mass)
        return Cloud(space.cylinder(height, angle), weights, width=jnp.inf)


class DensitySolution(NamedTuple):
    """Densities on the grid and their energies at save times.

    Attributes:
        ts: (k,) save times.
        mass: (k, rows, columns) masses of the cells.
        energy: (k,) energies E.
        free_energy: (k,) E + tau int rho log rho; the energies again at temperature 0.
        fisher: (k,) Fisher information int rho |grad log rho|^2, the rate at which diffusion alone lowers int rho log
            rho for tau = 1; infinite where a cell with mass is next to an empty one.
        steps: number of steps.
        final: density at the end.
        reached: whether the run came to its end with finite numbers; outside of tracing it raises if not.
    """

    ts: Float[Array, " k"]
    mass: Float[Array, "k rows columns"]
    energy: Float[Array, " k"]
    free_energy: Float[Array, " k"]
    fisher: Float[Array, " k"]
    steps: jax.Array
    final: Density
    reached: jax.Array


class _DensityProblem(eqx.Module):
    """What field, step rule and observer receive: a bound flow, its data and the grid of the density."""

    flow: Flow
    grid: Density
    data: Dataset
    temperature: jax.Array | None = None


def _courant(problem: _DensityProblem, mass: jax.Array) -> jax.Array:
    """Return the step CFL / max(|v_h|/dh + |v_th|/dth + 2 tau (1/dh^2 + 1/dth^2))."""
    speed_h, speed_th = _face_speeds(problem, mass)
    dh, dth = problem.grid.spacing
    worst = jnp.max(jnp.abs(speed_h)) / dh + jnp.max(jnp.abs(speed_th)) / dth
    tau = 0.0 if problem.temperature is None else problem.temperature
    return CFL / (worst + 2 * tau * (dh**-2 + dth**-2))


@checked
def uniform_density(
    rows: Annotated[int, count(2)], columns: Annotated[int, count(3)], bound: Length, half_width: Length = 1.0
) -> Density:
    """Return a height ~ U(-half_width, half_width) with a uniform angle, on [-bound, bound] x circle (exact masses)."""
    if not 0 < half_width <= bound:
        raise ValueError(f"half_width must lie in (0, bound = {bound}], got {half_width}")
    edges = jnp.linspace(-bound, bound, rows + 1)
    clipped = jnp.clip(edges, -half_width, half_width)
    share = jnp.diff(clipped) / (2 * half_width)
    return Density(jnp.outer(share, jnp.full(columns, 1.0 / columns)), jnp.asarray(bound, share.dtype))


@checked
def evolve(
    flow: Flow,
    density: Annotated[Density, instance(Density, hint="see uniform_density")],
    data: Dataset,
    t1: Positive,
    ts: Annotated[int | Real[ArrayLike, " k"] | Sequence, either(count(2), array((None,)))] | None = None,
    *,
    temperature: Rate = 0.0,
) -> DensitySolution:
    """Solve the continuity equation of a flow on a cylinder in mean-field time up to ``t1``.

    The flow is ``batchnorm_manifold`` with inputs in the plane (neurons of raw norm 1), or ``univariate.canonical``.

    A ``temperature`` adds diffusion: the limit of infinitely many noisy particles, in which ``free_energy`` falls.

    The walls at +-bound are closed: choose ``bound`` beyond the support (for the squared loss under batch norm
    |a'| <= sqrt(2 E(0)) (|s(0)| + Lip s)). Cost per step O(n columns + rows columns). Second order where the density is
    smooth.

    Raises:
        ValueError: if the speeds at the start are such that ``t1`` takes more than ``MAX_STEPS`` steps.
        RuntimeError: if that many steps, or numbers that are finite, do not suffice after all.
    """
    _boundary.shape("y", data.y, (None,))
    flow = flow.bind(data)
    if flow.scaling.kind != "m" or flow.centered:
        raise ValueError("flow must have alpha='m' and must not be centered for the Eulerian view")
    _check_feature(flow, density, data)
    t1 = jnp.asarray(t1, density.mass.dtype)
    times = None if ts is None else save_times(ts, jnp.zeros_like(t1), t1, t1.dtype)
    still = isinstance(temperature, float | int) and temperature == 0
    tau = None if still else jnp.asarray(temperature, density.mass.dtype)
    problem = _DensityProblem(flow, density, data, tau)
    expected = _boundary.concrete(t1 / _courant(problem, density.mass))
    if expected is not None and not expected <= MAX_STEPS:
        raise ValueError(
            f"t1 must be reached in at most {MAX_STEPS} steps, got t1 = {t1}, which takes about {expected:.2g} at the "
            "speed of the start; take a coarser grid, smaller outputs or a smaller t1"
        )
    solution = _evolve(problem, t1, times)
    end = _boundary.concrete(solution.reached)
    if end is not None and not end:
        raise RuntimeError(
            f"t1 = {t1} was not reached in {int(solution.steps)} steps, or the density is not finite there: the "
            "neurons run away, or the grid is too fine"
        )
    return solution


@compiled
def _evolve(problem: _DensityProblem, t1: jax.Array, ts: jax.Array | None) -> DensitySolution:
    Now = tuple[jax.Array, jax.Array, jax.Array]  # time, masses, number of steps

    def step(now: Now, stop: jax.Array) -> Now:
        time, mass, steps = now
        time, size = land(time, _courant(problem, mass), stop)
        mass, _ = runge_kutta(diffrax.Heun(), lambda u: (_rate(u, problem), None), mass, size)
        return time, mass, steps + 1

    def more(now: Now, stop: jax.Array) -> jax.Array:
        time, mass, steps = now
        return (time < stop) & (steps < MAX_STEPS) & jnp.all(jnp.isfinite(mass))

    def look(now: Now, stop: jax.Array) -> tuple[jax.Array, ...]:
        mass = now[1]
        cloud = problem.grid.at(mass).cloud(problem.flow.space)
        energy = equation.energy(problem.flow, cloud, problem.data)
        fisher = _fisher(mass, problem.grid)
        if problem.temperature is None:
            return now[0], mass, energy, energy, fisher
        dh, dth = problem.grid.spacing
        filled = jnp.where(mass > 0, mass, 1.0)
        entropy = jnp.sum(jnp.where(mass > 0, mass * jnp.log(filled / (dh * dth)), 0.0))
        return now[0], mass, energy, energy + problem.temperature * entropy, fisher

    start = (jnp.zeros_like(t1), problem.grid.mass, jnp.asarray(0))
    stops = t1[None] if ts is None else jnp.append(ts, t1)
    (end, mass, steps), seen = iterate_until(
        step, start, more, stops, look, limit=MAX_STEPS, kind="checkpointed"
    )
    times, masses, energies, free, fisher = seen if ts is None else jax.tree.map(lambda u: u[:-1], seen)
    reached = (end >= t1) & jnp.all(jnp.isfinite(mass))
    return DensitySolution(times, masses, energies, free, fisher, steps, problem.grid.at(mass), reached)


def _fisher(mass: jax.Array, grid: Density) -> jax.Array:
    """Return int rho |grad log rho|^2 as the sum over faces of (difference of rho) (difference of log rho)."""
    dh, dth = grid.spacing

    def faces(low: jax.Array, high: jax.Array, width: jax.Array | float) -> jax.Array:
        same = low == high  # also two empty cells, whose logarithms have no difference
        gap = jnp.where(same, 0.0, jnp.log(jnp.where(same, 1.0, high)) - jnp.log(jnp.where(same, 1.0, low)))
        return jnp.sum((high - low) * gap) / width**2

    return faces(mass[:-1], mass[1:], dh) + faces(mass, jnp.roll(mass, -1, 1), dth)


def _check_feature(flow: Flow, density: Density, data: Dataset) -> None:
    """Raise ValueError unless the flow's feature takes the particles of the grid and is linear in the height."""
    angle = density.centres()[1]
    at = lambda height: Cloud(flow.space.cylinder(jnp.full_like(angle, height), angle))
    flow.feature.check(at(1.0), data.x)
    one, two = (_boundary.concrete(flow.feature(at(height), data.x)) for height in (1.0, 2.0))
    if one is not None and two is not None and not np.allclose(2 * one, two, rtol=1e-3, atol=1e-6):
        raise ValueError(
            f"flow must have a feature that is linear in the height of the cylinder, got {type(flow.feature).__name__}"
        )


def _face_speeds(problem: _DensityProblem, mass: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return v_h = -d_h V at the faces above, v_th = -d_th V at the faces right of each cell, (rows, columns)."""
    flow, data, particles = problem.flow, problem.data, problem.flow.space.cylinder
    h, th = problem.grid.centres()
    dh, dth = problem.grid.spacing
    unit = jnp.ones_like(th)

    def features(angle: jax.Array) -> jax.Array:
        return flow.feature(Cloud(particles(unit, angle)), data.x)

    moment = h @ mass  # sum of heights over each column: f is linear in them
    f = features(th) @ moment
    g = data.weights * flow.loss.slope(f, data.y)
    force = g @ features(th)
    slope = jax.jvp(lambda angle: g @ features(angle), (th + dth / 2,), (unit,))[1]
    up = jnp.broadcast_to(force[None, :], mass.shape)
    right = h[:, None] * slope[None, :]
    if flow.penalty is not None:
        lam, function = flow.penalty.strength, flow.penalty.function

        def penalty(height: jax.Array, angle: jax.Array) -> jax.Array:
            return lam * function(particles(height.ravel(), angle.ravel())).reshape(mass.shape)

        height, angle = jnp.meshgrid(h, th, indexing="ij")
        one = jnp.ones_like(height)
        up = up + jax.jvp(lambda u: penalty(u, angle), (height + dh / 2,), (one,))[1]
        right = right + jax.jvp(lambda u: penalty(height, u), (angle + dth / 2,), (one,))[1]
    return -up, -right


def _minmod(left: jax.Array, right: jax.Array) -> jax.Array:
    return jnp.where(left * right > 0, jnp.sign(left) * jnp.minimum(jnp.abs(left), jnp.abs(right)), 0.0)


def _upwind(mass: jax.Array, before: jax.Array, after: jax.Array, speed: jax.Array) -> jax.Array:
    """Return the mass flux through the right face of each cell; ``before``, ``after`` are the neighbours' masses."""
    half = 0.5 * _minmod(mass - before, after - mass)
    from_left = mass + half
    # the right neighbour's own limited slope, at its left face
    beyond = jnp.roll(half, -1, axis=0)
    from_right = after - beyond
    return jnp.where(speed > 0, speed * from_left, speed * from_right)


def _fitted(
    mass: jax.Array, after: jax.Array, rise: jax.Array, tau: jax.Array, width: jax.Array | float
) -> jax.Array:
    """Return the flux of drift and diffusion to the next cell, where the potential is higher by ``rise``.

    It is that of the stationary solution between two cell centers: zero exactly if mass is proportional to exp(-V/tau).
    """
    return (tau * (_bernoulli(rise / tau) * mass - _bernoulli(-rise / tau) * after)) / width


def _bernoulli(u: jax.Array) -> jax.Array:
    """Return u / (exp(u) - 1), smooth at 0."""
    small = jnp.abs(u) < 1e-4
    safe = jnp.where(small, 1.0, u)
    return jnp.where(small, 1 - u / 2 + u**2 / 12, safe / jnp.expm1(safe))


def _potential(problem: _DensityProblem, mass: jax.Array) -> jax.Array:
    """Return V at the cell centers: the derivative of the energy of the grid by the mass of each cell."""
    cloud = problem.grid.at(mass).cloud(problem.flow.space)
    return equation.first_variation(problem.flow, cloud, problem.data, cloud).reshape(mass.shape)


def _rate(mass: jax.Array, problem: _DensityProblem) -> jax.Array:
    """Return d mass / dt: differences of fluxes, so that the total is conserved to rounding."""
    dh, dth = problem.grid.spacing
    # periodic neighbours; the walls of the heights are closed below by zeroing the flux through the last face
    if problem.temperature is None:
        speed_h, speed_th = _face_speeds(problem, mass)
        flux_h = _upwind(mass, jnp.roll(mass, 1, 0), jnp.roll(mass, -1, 0), speed_h)
        columns = mass.T
        flux_th = _upwind(columns, jnp.roll(columns, 1, 0), jnp.roll(columns, -1, 0), speed_th.T).T
    else:
        value, tau = _potential(problem, mass), problem.temperature
        flux_h = _fitted(mass, jnp.roll(mass, -1, 0), jnp.roll(value, -1, 0) - value, tau, dh)
        flux_th = _fitted(mass, jnp.roll(mass, -1, 1), jnp.roll(value, -1, 1) - value, tau, dth)
    flux_h = flux_h.at[-1].set(0.0)
    return (jnp.roll(flux_h, 1, 0) - flux_h) / dh + (jnp.roll(flux_th, 1, 1) - flux_th) / dth
