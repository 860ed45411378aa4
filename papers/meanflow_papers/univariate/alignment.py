"""Early alignment: ReLU neurons from a small start turn to extremal directions, slide on hyperplanes, and merge."""

import jax
import jax.numpy as jnp
import numpy as np
from matplotlib.figure import Figure
from scipy.optimize import lsq_linear
from scipy.sparse.csgraph import connected_components

from meanflow.flows import vanilla
from meanflow.measures import Cloud, Dataset, Neurons
from meanflow.solvers import descend, solve
from meanflow_papers.entry import entry
from meanflow_papers.outcome import Arrays, Criterion, Outcome
from meanflow_papers.style import NEGATIVE, PALE, POSITIVE, REFERENCE, below, panels

ON = 1e-9  # a direction this close to a hyperplane is on it


def draw(data: Arrays) -> Figure:
    """Directions of the neurons over time for d = 2, with the hyperplanes, and how many neurons slide."""
    figure, (left, right) = panels(1, 2, width=5.4, height=4.0)
    times, angles, signs = (np.asarray(data[k]) for k in ("times", "angles", "signs"))
    for k, angle in enumerate(np.asarray(data["kinks"])):
        left.axhline(angle, color=PALE, linewidth=0.6, label="hyperplanes of the samples" if k == 0 else None)
    for sign, color, name in ((1, POSITIVE, "neurons, $a > 0$"), (-1, NEGATIVE, "neurons, $a < 0$")):
        dots = left.plot(times, angles[:, signs == sign], ".", color=color, markersize=1.5)
        dots[0].set_label(name)
    left.set_xlabel("$t$")
    left.set_ylabel("direction of $b$ (radians), $d = 2$")
    left.set_title("neurons turn to few directions and stay on hyperplanes")
    left.legend(loc="upper center", bbox_to_anchor=(0.5, -0.15), ncols=3, markerscale=5, fontsize=7.5)
    for name, color in (("2", POSITIVE), ("10", NEGATIVE)):
        right.plot(times, np.asarray(data[f"on_{name}"]), color=color, label=f"sliding solver, $d = {name}$")
    right.plot(times, np.asarray(data["on_euler"]), color=REFERENCE, label="descent, $d = 2$")
    right.set_xlabel("$t$")
    right.set_ylabel("neurons on a hyperplane")
    right.set_title("only the sliding solver keeps them there")
    below(right, columns=3)
    return figure


def _problem(dim: int, samples: int, width: int, size: float) -> tuple[Dataset, Cloud]:
    """Return inputs on the sphere with random labels, and balanced neurons of length ``size``."""
    rng = np.random.default_rng(0)
    unit = lambda rows: rows / np.linalg.norm(rows, axis=1, keepdims=True)
    data = Dataset(unit(rng.standard_normal((samples, dim))), np.sign(rng.standard_normal(samples)))
    a = size * np.where(np.arange(width) % 2, 1.0, -1.0)
    b = size * unit(rng.standard_normal((width, dim)))
    return data, Cloud(Neurons(jnp.asarray(a), jnp.asarray(b)))


def _directions(b: np.ndarray) -> np.ndarray:
    return b / np.linalg.norm(b, axis=-1, keepdims=True)


def _turning(directions: np.ndarray, x: np.ndarray, pull: np.ndarray) -> np.ndarray:
    """Return how much of the force of least norm turns each neuron, in [0, 1]: 0 at an extremal direction."""
    found = []
    for u in directions:
        z = x @ u
        on = np.abs(z) < ON
        force = (pull * ((z > 0) & ~on)) @ x
        if np.any(on):
            columns = (pull[on][:, None] * x[on]).T
            force = force + columns @ lsq_linear(columns, -force, bounds=(0, 1), tol=1e-13).x
        length = np.linalg.norm(force)
        found.append(np.linalg.norm(force - (force @ u) * u) / length if length > 0 else 0.0)
    return np.array(found)


@entry(
    "004/alignment",
    title="early alignment for vector inputs: neurons from a small start slide on hyperplanes and merge",
    small={"width": 40, "samples": 20},
    minutes=(0.38, 2.0),
    verdict="no claim",
    setup="The paper is about one input; for it the rays of Lemma 2 attract. Inputs on the sphere in d = 2 (8 of "
    "them) and d = 10, random labels, balanced neurons of length 1e-3.",
    draw=draw,
)
def alignment(width: int = 60, samples: int = 40, end: float = 30.0, step: float = 1 / 16) -> Outcome:
    """Follow neurons from a small start, before the loss has moved much, and ask where they point.

    The rays of the paper that attract univariate neurons are hyperplanes for vector inputs. Decisive for d = 2: most
    neurons end at extremal directions (no turning force of least norm), most of them on a hyperplane, in few distinct
    directions. Under descent with learning rate 0.1 none of the neurons is ever on one.

    Args:
        width: number of neurons.
        samples: number of samples for d = 10.
        end: time.
        step: of the sliding solver.
    """
    ts = np.linspace(0, end, 61)
    kept: Arrays = {"times": ts}
    checks = []
    for dim, count in ((2, 8), (10, samples)):
        data, cloud = _problem(dim, count, width, 1e-3)
        flow, x = vanilla(), np.asarray(data.x)
        sol = solve(flow, cloud, data, end, ts=ts, solver="sliding", step=step)
        assert sol.clouds is not None
        paths = _directions(np.asarray(sol.clouds.particles.b))
        on = np.any(np.abs(paths @ x.T) < ON, axis=2).sum(axis=1)
        kept[f"on_{dim}"] = on
        last = paths[-1]
        residual = np.asarray(flow.feature.predict(sol.final, data.x) - data.y) / count
        turning = _turning(last, x, residual)
        close = np.linalg.norm(last[:, None] - last[None], axis=-1) < 1e-2
        groups = connected_components(close)[0]
        kept |= {
            f"turning_{dim}": turning,
            f"groups_{dim}": groups,
            f"planes_{dim}": int(sol.stats["planes"]),
        }
        if dim == 2:
            angle = np.arctan2(x[:, 1], x[:, 0])
            kinks = np.concatenate([angle + np.pi / 2, angle - np.pi / 2])
            kept |= {
                "angles": np.arctan2(paths[..., 1], paths[..., 0]),
                "signs": np.sign(np.asarray(cloud.particles.a)),
                "kinks": np.arctan2(np.sin(kinks), np.cos(kinks)),
            }
            rate = 0.1
            plain = descend(flow, cloud, data, round(end / rate), step=rate, every=round(end / rate) // 60)
            assert plain.clouds is not None
            rough = _directions(np.asarray(plain.clouds.particles.b))
            seen = np.any(np.abs(rough @ x.T) < ON, axis=2).sum(axis=1)
            kept["on_euler"] = seen
            checks += [
                Criterion(
                    "share of neurons at extremal directions, d = 2", float(np.mean(turning < 0.01)), 0.75, 1
                ),
                Criterion("share of neurons on a hyperplane, d = 2", float(on[-1] / width), 0.5, 1),
                Criterion("distinct directions over neurons, d = 2", groups / width, 0, 0.25),
                Criterion("neurons of descent on a hyperplane, at most", float(np.max(seen)), 0, 0),
            ]
        else:
            kept["nonunique_10"] = int(sol.stats["nonunique"])
            checks.append(
                Criterion("share of neurons on a hyperplane, d = 10", float(on[-1] / width), 0.1, 1)
            )
    return Outcome(
        "004/alignment",
        "for vector inputs the rays are hyperplanes: neurons from a small start slide on them, "
        f"{kept['on_2'][-1]} of {width} at time {end:g} for d = 2 and {kept['on_10'][-1]} for d = 10, there on up to "
        f"{kept['planes_10']} at once, with {kept['nonunique_10']} events without a unique future; "
        f"for d = 2 they point in {kept['groups_2']} directions. Under descent at rate 0.1 none is on a hyperplane, to "
        "1e-9",
        jax.tree.map(np.asarray, kept),
        tuple(checks),
    )
