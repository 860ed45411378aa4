"""Global optimality of a two-layer network: bounds of the gap E - E*, and in few dimensions the global minimum itself.

A network is a signed measure nu on the unit sphere of directions u, f(x) = int s(z . u) nu(du), and with a penalty of
lam per unit of charge |nu| its energy E(nu) = L(f) + lam |nu| is convex. With the covector r = L'(f) and the force
F(u) = sum_j r_j s(z_j . u), convexity bounds the energy of any other measure nu*, of charge M, from below:

    E(nu*) >= L(f) - <r, f> - (max |F| - lam)_+ M,    M <= E/lam,

and for the squared loss the residual, shrunk until |F| <= lam, gives the value of the dual problem. So an upper bound
of max |F| over the sphere (``_sphere_maximum``) gives an upper bound of the gap, and any better measure a lower one.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Annotated, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, ArrayLike, Float

from meanflow import activations
from meanflow._boundary import Count, array, checked, number
from meanflow._reuse import compiled
from meanflow.flows import _equation as equation
from meanflow.flows._features import TwoLayer
from meanflow.flows._flow import Flow, bind_and_check
from meanflow.flows._losses import NAMED, squared
from meanflow.flows._sphere_maximum import Maximum, Shape, Slopes, cover, stationary
from meanflow.geometry._neurons import SignedSphere
from meanflow.measures import laws
from meanflow.measures._cloud import CLOUD, Cloud, Neurons
from meanflow.measures._dataset import Dataset
from meanflow.measures._sampling import sample

SPREAD = 4096  # directions that are looked at before any bound is computed
LARGEST = 2048  # the walk through faces makes arrays of n^2 numbers
APART = 0.99  # new directions of one round have a smaller cosine than this


class Certificate(NamedTuple):
    """How far a network is from a global minimum over all measures, numbers on the host.

    Attributes:
        lower, upper: E - E* lies between them; infinite where nothing is known. Only a small ``upper`` certifies.
        value: the largest |F| that was found.
        bound: |F| is nowhere larger; infinite where directions are not confined to a sphere.
        direction: (d,) unit vector b at which ``value`` is found.
    """

    lower: float
    upper: float
    value: float
    bound: float
    direction: np.ndarray

    def optimal(self, tolerance: float = 1e-9) -> bool:
        """Say whether the network is certified to be within ``tolerance`` of the global minimum."""
        return self.upper <= tolerance


class GlobalMinimum(NamedTuple):
    """A global minimum over all measures, as few neurons.

    Attributes:
        cloud: the neurons, in the coordinates of the flow.
        value: its energy; where nothing is charged, the charge with which it fits the data.
        bound: no measure has a lower value.
        force: max |F| over what is charged; 1 at a minimum.
        dual: (n,) the weighted residual q_j (f_j - y_j), in units of lam where nothing is charged.
    """

    cloud: Cloud
    value: float
    bound: float
    force: float
    dual: np.ndarray


def two_layer(name: str, value: object) -> object:
    """Accept a cloud of neurons (a, b)."""
    CLOUD(name, value)
    if not isinstance(value.particles, Neurons):  # type: ignore[attr-defined]
        kind = type(value.particles).__name__  # type: ignore[attr-defined]
        raise TypeError(f"{name} must hold Neurons(a, b), got {kind}")
    return value


class _Sphere:
    """The unit sphere of directions of a flow on samples: features, prices of charge, and max |F|.

    Attributes:
        z: (n, e) samples, with which a unit vector u has the preactivations z . u.
        back: (e, d), so that u @ back is the vector b of a neuron.
        slopes: of a positively homogeneous activation, else None.
        confined: whether every neuron is a multiple of one with a unit direction.
    """

    def __init__(self, flow: Flow, data: Dataset) -> None:
        feature = flow.feature
        if not isinstance(feature, TwoLayer) or flow.centered or isinstance(data, equation.Population):
            raise ValueError(
                "flow must be a two-layer model that is not centered, and data must have samples"
            )
        self.flow, self.feature = flow, feature
        self.z, self.back = (np.asarray(u, np.float64) for u in feature.unit_inputs(data.x))
        act = feature.activation
        places = np.array([-7.0, -2.0, -0.5, 0.5, 2.0, 7.0])
        plus, minus = float(act(jnp.array(1.0))), -float(act(jnp.array(-1.0)))
        straight = np.allclose(
            np.asarray(act(jnp.asarray(places))), places * Slopes(plus, minus).at(places), rtol=1e-5
        )
        self.slopes = Slopes(plus, minus) if straight else None
        self.scale_free = feature.scale_free or isinstance(flow.space, SignedSphere)
        self.confined = straight or self.scale_free

    def charge(self, w: Neurons) -> np.ndarray:
        """Return |a| |b|, or |a| where the length of b does not matter, (m,)."""
        a, b = (np.linalg.norm(np.asarray(u, np.float64).reshape(len(u), -1), axis=1) for u in w)
        return a if self.scale_free else a * b

    def prices(self, u: np.ndarray, shape: tuple[int, ...] = ()) -> np.ndarray:
        """Return the penalty of a unit of charge in each direction, without its strength; 0 without a penalty."""
        penalty = self.flow.penalty
        if penalty is None:
            return np.zeros(len(u))
        rng, b = np.random.default_rng(0), u @ self.back
        a = rng.normal(size=(len(u), *shape))
        a /= np.linalg.norm(a.reshape(len(u), -1), axis=1).reshape((-1,) + (1,) * len(shape))

        def cost(charge: np.ndarray, ratio: np.ndarray) -> np.ndarray:
            """Return the penalty of neurons (charge ratio a, b / ratio)."""
            outer = (charge * ratio).reshape((-1,) + (1,) * len(shape)) * a
            return np.asarray(penalty.function(Neurons(jnp.asarray(outer), jnp.asarray(b / ratio[:, None]))))

        one, (charge, ratio) = np.ones(len(u)), np.exp(rng.normal(size=(2, len(u))))
        price = cost(one, one).astype(np.float64)
        # charge must be cheapest at |a| = |b|, as it is for weight decay and for the variation norm, and never cheaper
        # in larger or smaller pieces; neurons on the sphere have |a| = |b| = 1
        if not isinstance(self.flow.space, SignedSphere):
            least = cost(charge, one if self.scale_free else ratio)
            if np.any(least < charge * price * (1 - 1e-5)) or np.any(price < 0):
                raise ValueError(
                    "penalty must charge neurons for |a| |b| or (a^2 + |b|^2) / 2 (|a| under batch norm), up to a "
                    "factor"
                )
        return price

    def apply(self, function: Callable[[jax.Array], jax.Array]) -> Callable[[np.ndarray], np.ndarray]:
        """Return an elementwise function of arrays on the host, compiled for few sizes."""
        program = jax.jit(function)

        def on_host(t: np.ndarray) -> np.ndarray:
            room = np.zeros(4 ** max(5, math.ceil(math.log(max(t.size, 1), 4))))
            room[: t.size] = t.ravel()
            return np.asarray(program(room), np.float64)[: t.size].reshape(t.shape)

        return on_host

    def columns(self, u: np.ndarray) -> np.ndarray:
        """Return s(z_j . u_k), (n, k)."""
        t = self.z @ u.T
        return t * self.slopes.at(t) if self.slopes else self.apply(self.feature.activation)(t)

    def start(self) -> np.ndarray:
        """Return well-spread directions, and those of the samples."""
        e = self.z.shape[1]
        spread = sample(
            None, SPREAD, Neurons, {"a": laws.constant(), "b": laws.sphere(e)}, quasi=True
        ).particles.b
        length = np.linalg.norm(self.z, axis=1, keepdims=True)
        unit = self.z[length[:, 0] > 0] / length[length[:, 0] > 0]
        return np.concatenate([np.asarray(spread, np.float64), unit, -unit])

    def maximum(self, r: np.ndarray, budget: int, tolerance: float) -> Maximum:
        """Return max |F| for residuals r (n, k): exact where faces are few, else bounded."""
        n, e = self.z.shape
        act = self.feature.activation
        if self.slopes and r.shape[1] == 1 and 2 * n ** (e - 1) <= budget and n <= LARGEST:
            return stationary(self.z, r[:, 0], self.slopes)
        if self.slopes:
            slopes = self.slopes
            shape = Shape(lambda t: t * slopes.at(t), slopes.at, 0.0, abs(slopes.plus - slopes.minus))
        else:
            slope = lambda t: jax.jvp(act, (t,), (jnp.ones_like(t),))[1]
            grid = jnp.linspace(-1.0, 1.0, 8001) * float(np.max(np.linalg.norm(self.z, axis=1)))
            steps = np.diff(np.asarray(jax.jit(slope)(grid), np.float64))
            curvature = 1.01 * np.abs(steps).max() / max(float(grid[1] - grid[0]), 1e-300)
            shape = Shape(self.apply(act), self.apply(slope), float(curvature), 0.0)
        known = self.confined and (self.slopes or not activations.has_kink(act))
        found = cover(self.z, r, shape, self.start(), budget if known else 0, tolerance)
        return found if known else found._replace(bound=math.inf)

    def improving(self, r: np.ndarray, above: float, most: int = 32) -> Maximum:
        """Return directions with |F| above a limit that are stationary and far from each other, and max |F|."""
        assert self.slopes is not None
        found = stationary(self.z, r, self.slopes, above)
        left, chosen = found.directions, list[np.ndarray]()
        while len(left) and len(chosen) < most:
            chosen.append(left[0])
            left = left[left @ left[0] < APART]
        return found._replace(directions=np.array(chosen))


@checked
def certificate(
    flow: Flow,
    cloud: Annotated[Cloud, two_layer],
    data: Dataset,
    *,
    budget: Count = 200_000,
    tolerance: Annotated[float, number(above=0, static=True)] = 1e-6,
) -> Certificate:
    """Bound the gap E - E* between a network and the global minimum over all measures, on the host.

    F(b) = sum_j q_j l'(f_j, y_j) phi((1, b); x_j) is the force on a neuron of output weight 1. With k outputs it is a
    vector, and |F| its Euclidean norm. For a positively homogeneous activation (ReLU, leaky ReLU, linear), under batch
    norm and for ``inner="sphere"`` all neurons are multiples of ones with unit directions, and |F| is bounded over the
    sphere of these: exactly for ReLU and its like, one output and at most ``budget`` faces of the arrangement of sample
    hyperplanes, 2 n^(d-1) (for n <= 2048 in the plane, n <= 316 in space); else by branch and bound over boxes. For
    other activations there is no such sphere, and ``bound`` is infinite. Without a bound or without a penalty E* is
    only known to be >= 0 (for the named losses). The lower bound of the gap comes from one neuron more, in the
    direction of the largest |F|.

    Args:
        flow: a two-layer model with a convex loss; its penalty, if any, must be lam times the charge |a| |b| or weight
            decay lam (a^2 + |b|^2)/2, or lam |a| under batch norm.
        cloud: its neurons.
        data: training data.
        budget: the most faces or boxes that are looked at. Time and memory grow with n times this.
        tolerance: relative error of max |F| at which branch and bound stops before that.

    >>> import jax.numpy as jnp, meanflow as mf
    >>> penalty = lambda w: (w.a**2 + jnp.sum(w.b**2, axis=1)) / 2
    >>> flow = mf.vanilla("relu", penalty=(penalty, 0.1))
    >>> data = mf.Dataset(jnp.eye(2), jnp.array([1.0, 1.0]))
    >>> network = mf.Cloud(mf.Neurons(jnp.ones(1), jnp.array([[1.0, 0.5]])))
    >>> found = mf.flows.certificate(flow, network, data)
    >>> print(f"{found.lower:.4f} <= {float(mf.energy(flow, network, data)) - 0.1314:.4f} <= {found.upper:.4f}")
    0.0232 <= 0.0436 <= 0.0850
    """
    flow = bind_and_check(flow, cloud, data)
    sphere = _Sphere(flow, data)
    f, r, *scalars = (np.asarray(u, np.float64) for u in _state(flow, cloud, data))
    risk, energy, ratio = map(float, scalars)
    residual = r.reshape(len(r), -1) * ratio
    found = sphere.maximum(residual, budget, tolerance)
    u, value, bound = found.directions[0], float(found.values[0]), found.bound
    outputs = cloud.particles.a.shape[1:]
    price = sphere.prices(sphere.start()[:256], outputs) if sphere.confined else np.zeros(1)
    if flow.penalty is not None and (not sphere.confined or np.ptp(price) > 1e-5 * np.max(price)):
        raise ValueError("penalty must be the same for all directions of a positively homogeneous activation")
    lam = 0.0 if flow.penalty is None else float(flow.penalty.strength) * float(price[0])
    # bounds of E* from below
    named = flow.loss.function in NAMED.values()
    lowest = [0.0 if named else -math.inf]
    most = energy / lam if named and lam > 0 else math.inf  # charge of a measure that is better
    excess = max(bound - lam, 0.0)
    charge = float(np.asarray(cloud.weights, np.float64) @ sphere.charge(cloud.particles))
    if math.isfinite(bound):
        lowest.append(risk - float(np.sum(r * f)) - (excess * most if excess > 0 else 0.0))
    y, q = (np.asarray(v, np.float64) for v in (data.y, data.weights))
    if flow.loss.function is squared and lam > 0 and math.isfinite(bound):
        lowest.append(_dual(r.T, y.T, q, min(1.0, lam / bound) if bound > 0 else 1.0))
    # and of what a better measure has: one neuron more, against the force
    force = sphere.columns(u[None])[:, 0] * ratio
    push = force @ r.reshape(len(r), -1)
    step = (force[:, None] * (-push / max(float(np.linalg.norm(push)), 1e-300))).reshape(f.shape)
    better = risk + lam * charge
    if value > lam:
        from scipy.optimize import minimize_scalar

        along = lambda c: float(_along(flow, data, f, step, c)) + lam * (charge + abs(c))
        first = (value - lam) / max(float(q @ force**2), 1e-300)
        better = min(better, float(minimize_scalar(along, bracket=(0.0, first)).fun))
    direction = u @ sphere.back
    return Certificate(
        max(energy - better, 0.0),
        max(energy - max(lowest), 0.0),
        value,
        bound,
        direction / np.linalg.norm(direction),
    )


@compiled
def _state(flow: Flow, cloud: Cloud, data: Dataset) -> tuple[Array, Array, Array, Array, Array]:
    """Return predictions, residuals q l', loss, energy and the factor m/alpha."""
    f = equation.predict(flow, cloud, data.x)
    loss, energy = equation.risk(flow, cloud, data, f), equation.energy(flow, cloud, data, f)
    return f, equation.residual(flow, f, data), loss, energy, flow.scaling.ratio(cloud)


@compiled
def _along(flow: Flow, data: Dataset, f: ArrayLike, step: ArrayLike, c: ArrayLike) -> Array:
    return data.weights @ flow.loss(jnp.asarray(f) + c * jnp.asarray(step), data.y)


def _dual(r: np.ndarray, y: np.ndarray, q: np.ndarray, share: float) -> float:
    """Return the dual value of the squared loss at ``share`` times the residuals r = q (f - y), (..., n)."""
    rho = share * np.divide(r, q, out=np.zeros_like(r), where=q > 0)
    return -float(np.sum(q * (rho * y + rho**2 / 2)))


@checked
def global_minimum(
    flow: Flow,
    data: Dataset,
    *,
    directions: Annotated[Float[ArrayLike, "k d"], array((None, None), least=1)] | None = None,
    tolerance: Annotated[float, number(above=0, static=True)] = 1e-10,
    rounds: Count = 60,
) -> GlobalMinimum:
    """Find the global minimum over all measures, by exact solves and exact new directions, on the host.

    Fully corrective conditional gradient: the problem over finitely many directions is a least-distance problem, which
    nonnegative least squares solves exactly; then the directions at which |F| exceeds the price are added, from a walk
    through all faces of the arrangement of sample hyperplanes. Neurons on one face act as one, and are merged. For few
    dimensions: each round costs O(n^d).

    Args:
        flow: a flow with the squared loss, ``alpha="m"``, a positively homogeneous activation (with batch norm or
            without) and a penalty as in ``certificate``. If its strength is 0, the network of least charge that fits
            the data is found, the limit of small penalties.
        data: training data, with one output.
        directions: (k, d) vectors b. Only neurons in these directions are used then, and a penalty may charge them
            differently, or not at all.
        tolerance: the search stops where max |F| is at most 1 + tolerance of its price.
        rounds: largest number of rounds. If they run out, ``bound`` is below ``value``.

    >>> import jax.numpy as jnp, meanflow as mf
    >>> penalty = lambda w: jnp.abs(w.a) * jnp.linalg.norm(w.b, axis=1)
    >>> flow = mf.vanilla("relu", bias=True, penalty=(penalty, 0.1))
    >>> data = mf.Dataset(jnp.array([[-1.0], [0.0], [1.0]]), jnp.array([1.0, 0.0, 1.0]))
    >>> found = mf.flows.global_minimum(flow, data)
    >>> round(found.value, 6), round(found.bound, 6), found.cloud.size
    (0.155, 0.155, 3)
    """
    flow = flow.bind(data)
    if (
        flow.loss.function is not squared
        or data.y.ndim != 1
        or flow.scaling.kind != "m"
        or flow.penalty is None
    ):
        raise ValueError(
            "global_minimum needs loss='squared', one output, alpha='m' and a penalty (function, lam)"
        )
    sphere, lam = _Sphere(flow, data), float(flow.penalty.strength)
    if sphere.slopes is None:
        raise ValueError("global_minimum needs a positively homogeneous activation, such as 'relu'")
    y, q = (np.asarray(v, np.float64) for v in (data.y, data.weights))
    root = np.sqrt(q) if lam > 0 else np.ones_like(q)
    unit = lambda v: v / np.linalg.norm(v, axis=1, keepdims=True)
    start = sphere.start()
    u = np.concatenate([start[:256], start[SPREAD:]])
    if directions is not None:
        u, rounds = unit(np.asarray(directions, np.float64) @ np.linalg.pinv(sphere.back)), 1
    else:
        price = sphere.prices(u)
        if np.ptp(price) > 1e-5 * price.max():
            raise ValueError("penalty must be the same for all directions, unless directions are given")
        # rounding in what the user computes must not choose between directions
        u = np.concatenate([u, sphere.improving(-q * y, lam * price[0]).directions.reshape(-1, u.shape[1])])
    for turn in range(rounds):
        prices = sphere.prices(u) if directions is not None else np.full(len(u), price[0])
        columns, unit_price = sphere.columns(u), lam if lam > 0 else 1.0
        if lam > 0:
            charges = _least_squares(root[:, None] * columns, lam * prices, root * y)
            dual = q * (columns @ charges - y)
        else:
            charges, dual = _interpolation(columns, prices, y)
        used = np.abs(charges) > 1e-12 * max(np.abs(charges).max(), 1e-300)
        if directions is None:
            fresh = sphere.improving(dual, unit_price * price[0] * (1 + tolerance / 2))
            force = fresh.bound / float(unit_price * price[0])
        else:
            costly = prices > 0
            force = float(np.max(np.abs(dual @ columns)[costly] / prices[costly], initial=0.0)) / unit_price
        if force <= 1 + tolerance or turn == rounds - 1:
            break
        u = np.concatenate([u[used], fresh.directions])
    u, charges, prices = u[used], charges[used], prices[used]
    if directions is None:
        u, charges = _merged(sphere.z, u, charges)
        prices = np.full(len(u), price[0])
    paid = float(prices @ np.abs(charges))
    if lam > 0:
        rho = sphere.columns(u) @ charges - y
        value, least = float(q @ rho**2) / 2 + lam * paid, _dual(dual, y, q, 1 / max(force, 1.0))
    else:
        value, least = paid, -float(dual @ y) / max(force, 1.0)
    return GlobalMinimum(_as_cloud(flow, sphere, u, charges), value, least, force, dual)


def _as_cloud(flow: Flow, sphere: _Sphere, u: np.ndarray, charges: np.ndarray) -> Cloud:
    """Return neurons of equal weight with these charges, balanced where the length of b matters."""
    if not len(u):
        u, charges = np.eye(1, sphere.z.shape[1]), np.zeros(1)
    size = len(u) * np.abs(charges)
    length = np.ones_like(size) if sphere.scale_free else np.sqrt(np.maximum(size, 1e-300))
    a = np.sign(charges) * size / length
    return flow.space.from_raw(
        Cloud(Neurons(jnp.asarray(a), jnp.asarray(length[:, None] * (u @ sphere.back))))
    )


def _merged(z: np.ndarray, u: np.ndarray, charges: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Make one neuron of all that share a face and a sign: same values on the samples, and no more charge."""
    t = u @ z.T
    on = np.abs(t) <= 1e-9 * np.linalg.norm(z, axis=1)
    label = np.concatenate([np.where(on, 0.0, np.sign(t)), np.sign(charges)[:, None]], axis=1)
    _, first, group = np.unique(label, axis=0, return_index=True, return_inverse=True)
    sums = np.zeros((len(first), z.shape[1]))
    np.add.at(sums, group.reshape(-1), np.abs(charges)[:, None] * u)
    size = np.linalg.norm(sums, axis=1)
    return sums / size[:, None], np.sign(charges[first]) * size


def _least_squares(columns: np.ndarray, prices: np.ndarray, y: np.ndarray) -> np.ndarray:
    """Minimize 1/2 |A u - y|^2 + sum_k prices_k |u_k| exactly.

    The dual is the projection of y on a polytope, a least-distance problem, which nnls solves in finitely many steps;
    its multipliers are u.
    """
    from scipy.optimize import nnls

    # The dual: the p = y - fit nearest to y with +-a_k.p <= prices_k for the columns a of A. With d = p - y these are
    # rows.d <= limits - rows.y, and the shortest such d comes from the nnls problem min |stacked m - (0, 1)| over
    # m >= 0 (Lawson and Hanson, chapter 23): m over 1 - stacked[-1] m are multipliers.
    rows = np.concatenate([columns, -columns], axis=1)
    stacked = np.concatenate([-rows, (rows.T @ y - np.tile(prices, 2))[None, :]])
    target = np.zeros(len(y) + 1)
    target[-1] = 1.0
    multipliers, _ = nnls(stacked, target, maxiter=50 * stacked.shape[1])
    plus, minus = np.split(multipliers / (1 - stacked[-1] @ multipliers), 2)
    return plus - minus


def _interpolation(columns: np.ndarray, prices: np.ndarray, y: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Minimize sum_k prices_k |u_k| subject to A u = y, a linear program; return u and minus the dual variables."""
    from scipy.optimize import linprog

    result = linprog(
        np.tile(prices, 2), A_eq=np.concatenate([columns, -columns], axis=1), b_eq=y, method="highs"
    )
    if not result.success:
        raise ValueError(
            f"no network in these directions fits the data ({result.message}); are samples distinct?"
        )
    plus, minus = np.split(result.x, 2)
    return plus - minus, -np.asarray(result.eqlin.marginals)
