"""The Eulerian view for d = 2: the continuity equation on the flat cylinder (a, angle), by finite volumes.

With batch norm and inputs in the plane a neuron is a point (a, th) of R x circle (b = (cos th, sin th)), and the
measure has a density that obeys

    d_t rho = d_a(rho F) + d_th(rho a F'(th)),    F(th) = sum_j q_j l'(f(x_j), y_j) s(T(b(th)) . (x_j - mean)).

The scheme is conservative and positive: upwind fluxes of limited (minmod) piecewise-linear reconstructions, Heun
steps (strong-stability preserving) below the CFL bound. It knows nothing of particles, so it checks them, and it
gives densities at m = infinity.
"""

from typing import Any, NamedTuple, Self

import diffrax
import equinox as eqx
import jax
import jax.numpy as jnp

from meanflow import _checks
from meanflow.flows.flow import Flow, energy
from meanflow.geometry import omega
from meanflow.measures.cloud import Cloud, Neurons
from meanflow.measures.dataset import Dataset
from meanflow.solvers.saving import SaveTimes, save_times
from meanflow.solvers.step import Problem, StepController

CFL = 0.4  # positivity needs sum of Courant numbers <= 1/2


class Density(eqx.Module):
    """Masses of the cells of [-bound, bound] x circle.

    Attributes:
        mass: (rows, columns), nonnegative, sum 1; rows are cells in a, columns cells in the angle.
        bound: half-width of the interval of a.
    """

    mass: jax.Array
    bound: jax.Array

    def at(self, mass: jax.Array) -> Self:
        """The same grid with other masses."""
        return eqx.tree_at(lambda d: d.mass, self, mass)

    @property
    def spacing(self) -> tuple[jax.Array, float]:
        """Cell sizes (da, dth)."""
        rows, columns = self.mass.shape
        return 2 * self.bound / rows, 2 * jnp.pi / columns

    def centres(self) -> tuple[jax.Array, jax.Array]:
        """Cell centres: a (rows,) and angle (columns,)."""
        rows, columns = self.mass.shape
        da, dth = self.spacing
        return -self.bound + da * (jnp.arange(rows) + 0.5), dth * (jnp.arange(columns) + 0.5)

    def cloud(self, sigma: jax.Array) -> Cloud:
        """The quadrature cloud of the cells on R x Omega, so that every function of clouds applies."""
        a, th = (u.ravel() for u in jnp.meshgrid(*self.centres(), indexing="ij"))
        return Cloud(Neurons(a, _omega(th, sigma)), self.mass.ravel() / jnp.sum(self.mass), width=jnp.inf)


class DensitySolution(NamedTuple):
    """Densities ``mass`` (k, rows, columns), energies (k,) at times ``ts`` (k,), steps taken, final density."""

    ts: jax.Array
    mass: jax.Array
    energy: jax.Array
    steps: jax.Array
    final: Density


class _Courant(NamedTuple):
    """Step rule: CFL * 1 / max(|v_a|/da + |v_th|/dth), refreshed at every step."""

    every: int = 1

    def size_at(self, problem: Problem, density: Any) -> jax.Array:
        speed_a, speed_th = _face_speeds(problem.flow, density, problem.data)
        da, dth = density.spacing
        worst = jnp.max(jnp.abs(speed_a)) / da + jnp.max(jnp.abs(speed_th)) / dth
        return CFL / worst


def uniform_density(rows: int, columns: int, bound: float, half_width: float = 1.0) -> Density:
    """a ~ U(-half_width, half_width), uniform angle, on [-bound, bound] x circle (exact cell masses)."""
    rows, columns = _checks.whole("rows", rows, 2), _checks.whole("columns", columns, 3)
    if not 0 < half_width <= bound:
        raise ValueError(f"half_width must lie in (0, bound = {bound}], got {half_width}")
    edges = jnp.linspace(-bound, bound, rows + 1)
    clipped = jnp.clip(edges, -half_width, half_width)
    share = jnp.diff(clipped) / (2 * half_width)
    return Density(jnp.outer(share, jnp.full(columns, 1.0 / columns)), jnp.asarray(bound, share.dtype))


def evolve(flow: Flow, density: Density, data: Dataset, t1: Any, ts: Any = None) -> DensitySolution:
    """Solves the continuity equation of a batch-norm manifold flow (c = 1) in mean-field time up to ``t1``.

    The walls at a = +-bound are closed: choose ``bound`` beyond the support (|a'| <= sqrt(2 E(0)) (|s(0)| + Lip s)
    for the squared loss). Cost per step O(n columns + rows columns). Second order where the density is smooth.
    """
    flow = flow.bind(data)
    if data.x.ndim != 2 or data.x.shape[1] != 2:
        raise ValueError(f"x must have shape (n, 2) for the Eulerian view, got {data.x.shape}")
    if getattr(flow.feature, "sigma", None) is None:
        raise ValueError(f"flow must be a batch-norm flow, got the feature {type(flow.feature).__name__}")
    _checks.at_least("t1", t1, 0.0, strict=True)
    t1 = jnp.asarray(t1, density.mass.dtype)
    return _evolve(flow, density, data, t1, save_times(ts, jnp.zeros_like(t1), t1, t1.dtype))


@eqx.filter_jit
def _evolve(flow: Flow, density: Density, data: Dataset, t1: jax.Array, ts: Any) -> DensitySolution:
    problem = Problem(flow, density, data, jnp.ones_like(t1))  # type: ignore[arg-type]
    solver, adjoint = diffrax.Heun(), diffrax.RecursiveCheckpointAdjoint()

    def save(t: Any, mass: jax.Array, problem: Any) -> Any:
        return mass, energy(flow, density.at(mass).cloud(flow.feature.sigma), data)

    raw = diffrax.diffeqsolve(
        diffrax.ODETerm(_rate),
        solver,
        jnp.zeros_like(t1),
        t1,
        jnp.ones_like(t1),
        density.mass,
        problem,
        saveat=diffrax.SaveAt(subs={"series": diffrax.SubSaveAt(t1=True, fn=save)}),
        stepsize_controller=StepController(_Courant(), solver, ts, None),
        adjoint=adjoint if ts is None else SaveTimes(adjoint, ts),
        max_steps=None,
        throw=False,
    )
    mass, energies = raw.ys["series"]
    return DensitySolution(raw.ts["series"], mass, energies, raw.stats["num_steps"], density.at(mass[-1]))


def _omega(th: jax.Array, sigma: jax.Array) -> jax.Array:
    return omega.normalize(jnp.stack([jnp.cos(th), jnp.sin(th)], axis=-1), sigma)


def _face_speeds(flow: Flow, density: Density, data: Dataset) -> tuple[jax.Array, jax.Array]:
    """v_a = -F at the angle centres (columns,), v_th = -a F' at (rows, columns), columns = right faces."""
    sigma = flow.feature.sigma
    a, th = density.centres()
    _, dth = density.spacing
    unit = jnp.ones_like(th)

    def features(angle: jax.Array) -> jax.Array:
        return flow.feature(Cloud(Neurons(unit, _omega(angle, sigma))), data.x)

    moment = a @ density.mass  # sum of a over each column: f is linear in a
    f = features(th) @ moment
    g = data.weights * flow.loss.slope(f, data.y)
    force = g @ features(th)
    slope = jax.jvp(lambda angle: g @ features(angle), (th + dth / 2,), (unit,))[1]
    return -force, -a[:, None] * slope[None, :]


def _minmod(left: jax.Array, right: jax.Array) -> jax.Array:
    return jnp.where(left * right > 0, jnp.sign(left) * jnp.minimum(jnp.abs(left), jnp.abs(right)), 0.0)


def _upwind(mass: jax.Array, before: jax.Array, after: jax.Array, speed: jax.Array) -> jax.Array:
    """Mass flux through the right face of each cell; ``before``, ``after`` are the neighbours' masses."""
    half = 0.5 * _minmod(mass - before, after - mass)
    from_left = mass + half
    # the right neighbour's own limited slope, at its left face
    beyond = jnp.roll(half, -1, axis=0)
    from_right = after - beyond
    return jnp.where(speed > 0, speed * from_left, speed * from_right)


def _rate(t: Any, mass: jax.Array, problem: Problem) -> jax.Array:
    """d mass / dt: differences of fluxes, so that the total is conserved to rounding."""
    density: Any = problem.cloud.at(mass)
    speed_a, speed_th = _face_speeds(problem.flow, density, problem.data)
    da, dth = density.spacing
    # periodic neighbours; the walls in a are closed below by zeroing the flux through the last face
    flux_a = _upwind(
        mass, jnp.roll(mass, 1, 0), jnp.roll(mass, -1, 0), jnp.broadcast_to(speed_a[None], mass.shape)
    )
    flux_a = flux_a.at[-1].set(0.0)
    columns = mass.T
    flux_th = _upwind(columns, jnp.roll(columns, 1, 0), jnp.roll(columns, -1, 0), speed_th.T).T
    return (jnp.roll(flux_a, 1, 0) - flux_a) / da + (jnp.roll(flux_th, 1, 1) - flux_th) / dth
