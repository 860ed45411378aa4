"""Theorem 5 and Corollary 6: the norms of kernel learning, as printed and as they are."""

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import ArrayLike
from matplotlib.figure import Figure

from meanflow.measures import laws
from meanflow.univariate import wide_kernel
from meanflow_papers.entry import entry
from meanflow_papers.outcome import Arrays, Criterion, Outcome
from meanflow_papers.style import COLORS, PALE, REFERENCE, below, panels


def integral(values: ArrayLike, points: np.ndarray) -> float:
    """Return the integral over the points by the trapezoidal rule."""
    return float(np.trapezoid(np.asarray(values), points))


def one_slope(a: float, x0: float, count: int = 20_001) -> dict[str, float]:
    """Return |K(., x0)|^2 for slopes a and biases uniform on (0, 1): as K(x0, x0), and by (25) with two densities."""
    b = np.linspace(0, 1, count)
    truth = integral(np.maximum(a * x0 - b, 0) ** 2, b)  # reproducing property: the squared norm is K(x0, x0)
    u = b / a  # knots; K'' = a^2 (a x0 - a u)_+ there, and mu_a(a u) = 1
    second = a**2 * np.maximum(a * x0 - a * u, 0)
    return {"truth": truth, "printed": integral(second**2 / a, u), "cubed": integral(second**2 / a**3, u)}


def radial(x0: float, count: int = 200_001) -> dict[str, float]:
    """Return the same for (a, b) standard normal, with nu = 1/(pi (1 + u^2)), or nu_3 = 2/(pi (1 + u^2)^2)."""
    t = np.linspace(-np.pi / 2, np.pi / 2, count)[1:-1]
    u = np.tan(t)
    curve = jax.jit(jax.vmap(jax.grad(jax.grad(lambda v: wide_kernel(v, x0, "feature", law="radial")))))
    square = np.asarray(curve(jnp.asarray(u))) ** 2 * (1 + u**2)  # du = (1 + u^2) dt
    return {
        "truth": float(wide_kernel(x0, x0, "feature", law="radial")),
        "printed": integral(square * np.pi * (1 + u**2), t),
        "cubed": integral(square * np.pi * (1 + u**2) ** 2 / 2, t),
    }


def draw(data: Arrays) -> Figure:
    """Squared norms of kernel sections: exact, as printed, with the cubed slopes, by slope; and for the normal law."""
    figure, (left, right) = panels(1, 2, width=4.8, height=3.9)
    slopes, rows = np.asarray(data["slopes"]), data["one slope"]
    names = {
        "truth": "exact: $K(x_0, x_0)$",
        "printed": r"(25), $\nu = \int |a|\,\mu_a$",
        "cubed": r"(25), $\nu_3 = \int |a|^3 \mu_a$",
    }
    styles = {"truth": ("o", COLORS[0]), "printed": ("--", COLORS[1]), "cubed": ("-", COLORS[2])}
    for name, label in names.items():
        mark, color = styles[name]
        left.plot(slopes, rows[name], mark, color=color, label=label, mfc="none")
    left.set(
        yscale="log",
        xlabel="slope $a$ (biases uniform on (0, 1))",
        ylabel="$\\|K(\\cdot, x_0)\\|^2$, $x_0 = 0.4$",
    )
    left.set_title("each slope enters with its third power")
    below(left, columns=1)
    points = np.asarray(data["points"])
    for name, label in names.items():
        mark, color = styles[name]
        right.plot(points, data["radial"][name], mark, color=color, label=label, mfc="none")
    rest = np.asarray(data["radial"]["truth"]) - np.asarray(data["radial"]["cubed"])
    right.plot(points, rest, color=REFERENCE, lw=4, alpha=0.3, label="what is left for the affine part")
    right.set(
        xlabel="$x_0$",
        ylabel=r"$\|K(\cdot, x_0)\|^2$",
        title="(a, b) normal: curvature is not all of the norm",
    )
    right.set_ylim(bottom=0)
    below(right, columns=1)
    return figure


@entry(
    "004/theorem-5",
    title="the norm of random features: the density, and what the curvature leaves out",
    claims=(
        ("Theorem 5", "Define nu(u) = int |a| mu_a(ab) dq(a). Then the solution (22) solves"),
        ("Theorem 5, equation (25)", "min_f ||f||_RF^2 := int_Omega |f''(u)|^2/nu(u) du s.t. f(x_i) = y_i"),
        ("after Theorem 5", "In particular, independent uniform initialization yields cubic splines"),
    ),
    minutes=(0.06, 0.06),
    verdict="corrected",
    setup="sections K(., x0), whose squared norm is K(x0, x0): one slope and uniform biases, and normal (a, b), by "
    "quadrature; fourth derivatives for independent uniforms.",
    draw=draw,
)
def theorem_5() -> Outcome:
    """Compute the squared norm of kernel sections exactly, and by the integral of (25) with the printed density.

    By the reproducing property |K(., x0)|^2 = K(x0, x0). Decisive are: with nu_3 = int |a|^3 mu_a the integral is
    exact for one slope, with the printed nu it is not; for normal (a, b) even nu_3 leaves a part over, that of the
    affine functions, which (25) gives no norm; and under independent uniforms on (-1, 1) a section is cubic inside
    only: its fourth derivative vanishes at .6 and not at 1.5.
    """
    slopes, x0 = np.linspace(0.5, 3.0, 11), 0.4
    rows = [one_slope(a, x0) for a in slopes]
    one = {name: np.array([row[name] for row in rows]) for name in rows[0]}
    points = np.linspace(-1.0, 1.0, 9)
    found = [radial(float(p)) for p in points]
    normal = {name: np.array([row[name] for row in found]) for name in found[0]}
    section = lambda u: wide_kernel(u, 0.3, "feature", law={"a": laws.uniform(), "b": laws.uniform()})
    fourth = jax.grad(jax.grad(jax.grad(jax.grad(section))))
    inside, outside = float(fourth(0.6)), float(fourth(1.5))
    exact = np.max(np.abs(one["cubed"] / one["truth"] - 1))
    share = normal["cubed"] / normal["truth"]
    return Outcome(
        "004/theorem-5",
        "the density is nu_3 = int |a|^3 mu_a: with the printed nu the norm of a section is "
        f"{one['printed'][-1] / one['truth'][-1]:.1f} "
        f"times what it is at a = 3 and {one['printed'][0] / one['truth'][0]:.2f} times at a = 0.5. For normal (a, "
        "b) the "
        f"curvature with nu_3 is {share.min():.2f} to {share.max():.2f} of the squared norm, the rest is that of "
        "the affine "
        "part. Independent uniforms give cubics only where A |x| <= B",
        {
            "slopes": slopes,
            "one slope": one,
            "points": points,
            "radial": normal,
            "fourth derivative": np.array([inside, outside]),
        },
        (
            Criterion("one slope, nu_3: largest relative error", float(exact), high=1e-6),
            Criterion(
                "one slope, printed nu: ratio to the norm at a = 3",
                float(one["printed"][-1] / one["truth"][-1]),
                low=2,
            ),
            Criterion(
                "normal law: largest part of the squared norm that nu_3 explains",
                float(share.max()),
                high=0.9,
            ),
            Criterion("independent uniforms: |fourth derivative| at .6", abs(inside), high=1e-9),
            Criterion("independent uniforms: |fourth derivative| at 1.5", abs(outside), low=1e-2),
        ),
    )


def draw_corollary(data: Arrays) -> Figure:
    """Sections of the tangent kernel and their slopes, which jump; the printed norm beside the exact one."""
    figure, (left, middle, right) = panels(1, 3, width=4.0, height=3.7)
    x = np.asarray(data["x"])
    for k, (place, values, slopes) in enumerate(
        zip(data["places"], data["sections"], data["slopes"], strict=True)
    ):
        left.plot(x, values, color=COLORS[k], label=f"$x' = {float(place):g}$")
        broken = np.where(np.abs(x - place) < x[1] - x[0], np.nan, slopes)
        middle.plot(x, broken, color=COLORS[k], label=f"$x' = {float(place):g}$")
    left.set(xlabel="$x$", ylabel=r"$K_{\mathrm{NTK}}(x, x')$", title="continuous ...")
    middle.set(
        xlabel="$x$",
        ylabel=r"$\partial_x K_{\mathrm{NTK}}(x, x')$",
        title="... with a slope that jumps at $x'$",
    )
    places = np.asarray(data["norm places"])
    right.plot(places, data["exact"], "o", mfc="none", color=COLORS[0], label="exact: $K(x_0, x_0)$")
    right.plot(places, data["printed"], "--", color=COLORS[1], label="(28) as printed")
    right.plot(places, data["corrected"], color=COLORS[2], label="(28) corrected")
    right.set(xlabel="$x_0$", ylabel=r"$\|K(\cdot, x_0)\|^2$", title="the norm of a section")
    right.axhline(0, color=PALE, lw=0.8)
    for ax in (left, middle, right):
        below(ax, columns=3 if ax is not right else 1)
    return figure


@entry(
    "004/corollary-6",
    title="the tangent kernel: its norm, and the jump of its slope",
    claims=(
        (
            "Corollary 6, equation (28)",
            "||f||_NTK^2 := inf {int_Omega (|f_1'(u)|^2/nu(u) + E(c^2) (|f_2'(u)|^2/nu(u) + |uf_3'(u) - "
            "f_3(u)|^2/(u^2 nu(u)))) du; f = f_1 + f_2 + f_3}",
        ),
        ("Corollary 6", "K_NTK is also piece-wise cubic."),
    ),
    minutes=(0.06, 0.06),
    verdict="corrected",
    setup="a = +-1 and b uniform on (-1, 1) for the sections; a = 1 and b uniform on (0, 1) for the norm; E(c^2) "
    "= 0.3.",
    draw=draw_corollary,
)
def corollary_6(c2: float = 0.3) -> Outcome:
    """Compute sections of the tangent kernel, their slopes at x', and their norms by (28) as printed and corrected.

    For a = 1 and biases uniform on (0, 1) the kernel is a sum of three, each with one density for its knots, so that
    the parts of a section are those that attain the infimum. Decisive are: sections are cubic away from x' (the
    fourth derivative vanishes); the slope jumps by -E(c^2) (x'^2 + 1)/2 at x'; (28) with f_1'', 1/E(c^2) and u^4
    gives K(x0, x0), as printed it gives less than half.
    """
    places = (-0.4, 0.1, 0.6)
    section = lambda place: lambda u: wide_kernel(u, place, law="signs", c2=c2)
    x = jnp.linspace(-1, 1, 801)[1:-1]
    sections = [jax.vmap(section(p))(x) for p in places]
    slopes = [jax.vmap(jax.grad(section(p)))(x) for p in places]
    jumps = [jax.grad(section(p))(p + 1e-9) - jax.grad(section(p))(p - 1e-9) for p in places]
    error = max(abs(float(j) + c2 * (p**2 + 1) / 2) for j, p in zip(jumps, places, strict=True))
    fourth = lambda p, u: jax.grad(jax.grad(jax.grad(jax.grad(section(p)))))(u)
    quartic = max(abs(float(fourth(p, p + side))) for p in places for side in (-0.2, 0.2))
    u = np.linspace(0, 1, 100_001)[1:]
    exact, printed, corrected = [], [], []
    norm_places = np.linspace(0.2, 0.9, 8)
    for p in norm_places:
        low = np.minimum(u, p)
        on = u < p
        exact.append(p**3 / 3 + c2 * (1 + p**2) * p)
        # f_1 = int_0^low (u - b)(p - b) db, f_2 = c2 low, f_3 = c2 u p low; in closed form with their derivatives
        first, second = p * low - low**2 / 2, np.where(on, p - u, 0.0)
        f3, d2, d3 = c2 * u * p * low, c2 * on, c2 * p * np.where(on, 2 * u, p)
        gauge = (u * d3 - f3) ** 2
        printed.append(integral(first**2 + c2 * (d2**2 + gauge / u**2), u))
        corrected.append(integral(second**2 + (d2**2 + gauge / u**4) / c2, u))
    rows = {"exact": np.array(exact), "printed": np.array(printed), "corrected": np.array(corrected)}
    share = rows["printed"] / rows["exact"]
    return Outcome(
        "004/corollary-6",
        "piecewise cubic is true; but the kernel is only continuous, its slope jumps by -E(c^2)(x'^2 + 1)/2 at "
        "x'. In (28) "
        f"f_1 must enter with f_1'', E(c^2) inversely and u^4 for u^2: as printed it gives {share.min():.2f} to "
        f"{share.max():.2f} of the norm of a section",
        {
            "x": x,
            "places": np.array(places),
            "sections": np.stack(sections),
            "slopes": np.stack(slopes),
            "norm places": norm_places,
            **rows,
        },
        (
            Criterion("largest |fourth derivative| beside x'", quartic, high=1e-9),
            Criterion("largest error of the jump of the slope", error, high=1e-6),
            Criterion(
                "(28) corrected: largest relative error",
                float(np.max(np.abs(rows["corrected"] / rows["exact"] - 1))),
                high=1e-3,
            ),
            Criterion("(28) as printed: largest part of the norm", float(share.max()), high=0.5),
        ),
    )
