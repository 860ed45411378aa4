"""Every row of the table for users of neural-tangents: the call here runs, and gives what the call there means."""

import pathlib
import re

import diffrax
import jax
import jax.numpy as jnp
import numpy as np
import pytest

PAGE = (pathlib.Path(__file__).parents[2] / "docs" / "learn" / "neural_tangents.md").read_text()
ROWS = re.findall(r"^\| `(.*?)`[^|]* \| `(.*?)` \|$", PAGE, re.MULTILINE)
SPACE: dict = {}


@pytest.fixture(scope="module", autouse=True)
def definitions():
    """Run what the page defines, and put what the functions below use where they look."""
    exec(re.search(r"```python\n(.*?)```", PAGE, re.DOTALL).group(1), SPACE)
    globals().update({name: SPACE[name] for name in ("x1", "x2", "y", "params", "f", "t")})
    first, second = jacobian(f, x1), jacobian(f, x2)
    train = np.einsum("tcp,sdp->tscd", first, first)
    globals().update(J1=first, J2=second, FULL=np.einsum("tcp,sdp->tscd", first, second))
    globals().update(MATRIX=train.transpose(0, 2, 1, 3).reshape(12, 12))


def jacobian(function, x, p=None):
    """(n, outputs, parameters) by forward mode."""
    p = params if p is None else p
    parts = jax.tree.leaves(jax.jacfwd(lambda p: function(p, x))(p))
    count = len(jax.tree.leaves(p)[0].shape)
    assert count == 2
    return np.concatenate([j.reshape(j.shape[:-2] + (-1,)) for j in parts], axis=-1)


def ode(field, start):
    term = diffrax.ODETerm(lambda t, u, args: field(u))
    rule = diffrax.PIDController(rtol=1e-11, atol=1e-12)
    return diffrax.diffeqsolve(
        term, diffrax.Tsit5(), 0.0, t, 0.01, start, stepsize_controller=rule, max_steps=100_000
    ).ys[0]


def trained_elsewhere():
    """f' = -K (f - y) / size at x1, and along with it at x2."""
    cross = np.einsum("scp,tdp->sctd", J2, J1).reshape(8, 12)
    slope = lambda u: -(u[:12] - y.reshape(-1)) / 12
    both = jnp.concatenate([SPACE["f0"].reshape(-1), SPACE["g0"].reshape(-1)])
    out = ode(lambda u: jnp.concatenate([MATRIX @ slope(u), cross @ slope(u)]), both)
    return out[12:].reshape(4, 2)


def by_cross_entropy():
    flat = lambda u: (jax.nn.softmax(u.reshape(6, 2)) - SPACE["labels"]).reshape(-1) / 6
    return ode(lambda u: -MATRIX @ flat(u), SPACE["f0"].reshape(-1)).reshape(6, 2)


def ensemble(time, size):
    theta, cross, prior = SPACE["theta"], SPACE["theta_test"], SPACE["prior"]
    left = np.zeros((6, 6)) if np.isinf(time) else jax.scipy.linalg.expm(-time / size * theta)
    a = cross @ np.linalg.solve(theta, np.eye(6) - left)
    covariance = prior[2] - a @ prior[1].T - prior[1] @ a.T + a @ prior[0] @ a.T
    return a @ y, covariance


def posterior():
    gram, cross, test = SPACE["prior"]
    inverse = np.linalg.inv(gram + 0.1 * np.eye(6))
    return cross @ inverse @ y, test - cross @ inverse @ cross.T


def taylor(degree):
    line = lambda e: f(jax.tree.map(lambda a, b: a + e * (b - a), params, SPACE["other"]), x1)
    second = jax.jacfwd(jax.jacfwd(line))(0.0) / 2 if degree == 2 else 0
    return line(0.0) + jax.jacfwd(line)(0.0) + second


def three_networks():
    grams = [jacobian(f, x1, SPACE["init"](k)) for k in jax.random.split(SPACE["key"], 3)]
    return sum(np.einsum("tcp,sdp->tscd", j, j) for j in grams) / 3


def pairs(layer):
    return layer.nngp, layer.ntk


def erf_network():
    """By hand: arcsine formulas for E erf erf and E erf' erf'."""
    grow = lambda k: 1.96 * k + 0.01
    a, c, b = (grow(k / 3) for k in (jnp.sum(x1**2, 1)[:, None], jnp.sum(x2**2, 1)[None], x1 @ x2.T))
    product = (1 + 2 * a) * (1 + 2 * c)
    value, slope = 2 / np.pi * np.arcsin(2 * b / np.sqrt(product)), 4 / np.pi / np.sqrt(product - 4 * b**2)
    return 1.96 * value, 1.96 * (value + b * slope)


def relu_dual(k):
    """E relu relu and E step step for a Gaussian vector of covariance k (angles between samples)."""
    scale = np.sqrt(np.outer(np.diag(k), np.diag(k)))
    angle = np.arccos(np.clip(k / scale, -1, 1))
    return scale * (np.sin(angle) + (np.pi - angle) * np.cos(angle)) / (2 * np.pi), (np.pi - angle) / (
        2 * np.pi
    )


def convolution(kind):
    """All positions of all images as samples of one dense layer on patches."""
    mode = {"mode": "wrap"} if kind == "windows" else {}
    padded = np.pad(SPACE["images"], ((0, 0), (1, 1), (1, 1), (0, 0)), **mode)
    patches = np.stack(
        [padded[:, i : i + 3, j : j + 3].reshape(3, -1) for i in range(4) for j in range(4)], 1
    )
    k = patches.reshape(48, -1) @ patches.reshape(48, -1).T / 18
    value, slope = (u.reshape(3, 16, 3, 16) for u in relu_dual(k))
    tangent = k.reshape(3, 16, 3, 16) * slope
    means = {
        "flatten": lambda u: np.einsum("tpsp->ts", u) / 16,
        "pool": lambda u: u.mean((1, 3)),
        # windows of 2 x 2 pixels: the mean over all pairs of pixels of one window, and over windows
        "windows": lambda u: (
            np.einsum("taibjsckdl,ac,bd->ts", u.reshape(3, 2, 2, 2, 2, 3, 2, 2, 2, 2), *[np.eye(2)] * 2) / 64
        ),
    }
    mean = means[kind]
    return mean(value), mean(value) + mean(tangent)


def branches():
    k = 2 * x1 @ x1.T / 3
    value, slope = relu_dual(np.asarray(k))
    return k + value, k + value + k * slope


def normed():
    k = np.asarray(2 * x1 @ x1.T / 3)
    k = k / np.sqrt(np.outer(np.diag(k), np.diag(k)))
    return k, 2 * k


def gates():
    k = np.asarray(x1 @ x1.T / 3)
    product = np.outer(1 + 2 * np.diag(k), 1 + 2 * np.diag(k))
    value, slope = 2 / np.pi * np.arcsin(2 * k / np.sqrt(product)), 4 / np.pi / np.sqrt(product - 4 * k**2)
    # both factors of a product of independent ones, and the layers before them
    return value**2, value**2 + 2 * value * slope * (2 * k)


def attention():
    x = np.asarray(x1).reshape(2, 3, 3)
    k = np.einsum("tpi,sqi->tspq", x, x) / 3
    mix = [np.asarray(jax.nn.softmax(k[t, t])) for t in range(2)]
    exact = np.stack([np.stack([mix[t] @ k[t, s] @ mix[s].T for s in range(2)]) for t in range(2)])
    return exact, 2 * exact


EXPECTED = [
    ("empirical_ntk_fn(f, trace_axes=())", lambda: FULL),
    ("empirical_ntk_fn(f)", lambda: np.einsum("tscc->ts", FULL) / 2),
    ("diagonal_axes=(-1,)", lambda: np.einsum("tscc->tsc", FULL)),
    (
        "diagonal_axes=(1,)",
        lambda: np.einsum("tacp,sacp->tsa", *(jacobian(SPACE["g"], x) for x in (x1, x2))) / 2,
    ),
    ("empirical_nngp_fn", lambda: np.einsum("tc,sc->ts", f(params, x1), f(params, x2)) / 2),
    ("empirical_ntk_vp_fn", lambda: np.einsum("tscd,sd->tc", FULL, SPACE["v"])),
    ("linearize", lambda: taylor(1)),
    ("taylor_expand", lambda: taylor(2)),
    ("gradient_descent_mse(", trained_elsewhere),
    ("gradient_descent(", by_cross_entropy),
    ("gradient_descent_mse_ensemble", lambda: ensemble(t, 12)),
    ('("nngp"', posterior),
    ('("ntk", k_test_train', lambda: ensemble(np.inf, 12)),
    ("max_learning_rate", lambda: 2 * 12 / np.linalg.eigvalsh(MATRIX)[-1]),
    ("batch_size=2", lambda: FULL),
    ("device_count=-1", lambda: FULL),
    ("monte_carlo", three_networks),
    ("stax.Erf()", erf_network),
    ("stax.Flatten()", lambda: convolution("flatten")),
    ("stax.GlobalAvgPool()", lambda: convolution("pool")),
    ("stax.AvgPool", lambda: convolution("windows")),
    ("stax.FanInSum()", branches),
    ("stax.FanInProd()", gates),
    ("stax.LayerNorm()", normed),
    ("stax.GlobalSelfAttention", attention),
]


def test_every_row_has_its_meaning():
    assert len(ROWS) == len(EXPECTED) == len([row for row in PAGE.splitlines() if row.startswith("| `")])
    assert all(sign in row[0] for (sign, _), row in zip(EXPECTED, ROWS, strict=True))


FAST = ("empirical_ntk_fn(f, trace_axes=())", "gradient_descent_mse_ensemble", "stax.FanInSum()")


@pytest.mark.parametrize(
    "number",
    [
        pytest.param(k, id=sign, marks=() if sign in FAST else pytest.mark.slow)
        for k, (sign, _) in enumerate(EXPECTED)
    ],
)
def test_row(number):
    ours = eval(ROWS[number][1], SPACE)
    ours = pairs(ours) if hasattr(ours, "ntk") else ours
    exact = EXPECTED[number][1]()
    for mine, theirs in zip(*((u,) if not isinstance(u, tuple) else u for u in (ours, exact)), strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=1e-6, atol=1e-8)
