"""Speed of the core: a velocity against the two bare matrix products it cannot avoid."""

import jax
import jax.numpy as jnp

import meanflow as mf
from meanflow_benchmarks.timing import best_time


def velocity_speed(
    width: int = 10_000, points: int = 1000, dim: int = 100, repeats: int = 10, dtype: str = "float32"
) -> dict[str, float]:
    """One velocity of the batch-norm flows and of the vanilla flow, against the products x b^T and w^T x.

    Every velocity needs the inner products of neurons and samples and, for the gradient, a product with the samples
    again; the ratio says what is lost beside them.

    Args:
        width: number of neurons.
        points, dim: number and dimension of the samples.
        repeats: measurements of which the best counts.
        dtype: precision of all arrays.

    Returns:
        Seconds of the two bare products and of each velocity, and ``ratio_*``, velocity over products.
    """
    keys = jax.random.split(jax.random.key(0), 4)
    x = jax.random.normal(keys[0], (points, dim), dtype)
    data = mf.Dataset(x, jnp.abs(x[:, 0]))
    b = jax.random.normal(keys[1], (width, dim), dtype)
    a = jax.random.normal(keys[2], (width,), dtype)
    raw = mf.Cloud(mf.Neurons(a, b))

    products = jax.jit(lambda x, b, w: (x @ b.T, w.T @ x))
    w = jax.random.normal(keys[3], (points, width), dtype)
    numbers = {"products": best_time(products, x, b, w, repeats=repeats)[1]}
    flows = {
        "vanilla": (mf.vanilla(), raw),
        "batchnorm": (mf.batchnorm().bind(data), raw),
        "manifold": (mf.batchnorm_manifold().bind(data), mf.geometry.project(raw, data.moments()[1])),
    }
    for name, (flow, cloud) in flows.items():
        numbers[name] = best_time(jax.jit(mf.velocity), flow, cloud, data, repeats=repeats)[1]
        numbers[f"ratio_{name}"] = numbers[name] / numbers["products"]
    return numbers
