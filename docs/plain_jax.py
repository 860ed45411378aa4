"""One equation in plain JAX: how a two-layer network learns, as a cloud of neurons. No meanflow in this file.

A network is a cloud of neurons w_i with weights p_i (1/m each for a plain network of width m). It predicts

    f(x) = sum_i p_i phi(w_i; x)

and has the energy E = sum_j q_j (f(x_j) - y_j)^2 / 2. What the energy gains when a little mass is put at w is its first
variation V(w) = sum_j q_j (f(x_j) - y_j) phi(w; x_j). Every neuron moves down V, measured in a metric:

    w_i' = -C(w_i) grad V(w_i),

with C the inverse of the metric. That is gradient descent on E with an infinitely small rate, m times as fast. Plain
networks have C = 1. Under batch norm directions live on the ellipsoid b' S b = 1, S the covariance of the data, and C
is the metric of a sphere in disguise, over the squared length of the weights (which training does not change).

Run it: python docs/plain_jax.py
"""

import jax
import jax.numpy as jnp

# A neuron is (a, b): a number and a direction; a cloud is (a (m,), b (m, d)) with weights p (m,).


def plain(w, x):
    """The feature of a plain neuron: a tanh(b . x)."""
    a, b = w
    return a * jnp.tanh(b @ x)


def flat(w, gradient):
    """The inverse metric of a plain network: none."""
    return gradient


def normalized(mean, covariance, length=1.0):
    """The feature and the inverse metric of a neuron under batch norm, whose b obeys b' S b = 1."""

    def feature(w, x):
        return plain(w, x - mean)

    def cometric(w, gradient):
        (_, b), (ga, gb) = w, gradient
        u = covariance @ b
        tangent = gb - u * (b @ gb)  # (I - S b b') g: no part of the covector acts along b
        return ga, (b @ b) * (tangent - b * (u @ tangent)) / length**2

    return feature, cometric


def on_the_ellipsoid(b, covariance):
    """Directions of length one in the norm of the covariance."""
    return b / jnp.sqrt(jnp.einsum("md,de,me->m", b, covariance, b))[:, None]


def predict(feature, cloud, p, x):
    """f(x) at the samples x (n, d)."""
    each = jax.vmap(jax.vmap(feature, (0, None)), (None, 0))(cloud, x)  # (n, m)
    return each @ p


def energy(feature, cloud, p, x, y):
    """E: the mean of half the squared residuals."""
    return 0.5 * jnp.mean((predict(feature, cloud, p, x) - y) ** 2)


def gradients(feature, cloud, p, x, y):
    """grad V at every neuron."""
    residual = predict(feature, cloud, p, x) - y

    def variation(w):  # V(w), with the residual held fixed
        return jnp.mean(residual * jax.vmap(feature, (None, 0))(w, x))

    return jax.vmap(jax.grad(variation))(cloud)


def velocity(feature, cometric, cloud, p, x, y):
    """-C grad V at every neuron."""
    return jax.tree.map(jnp.negative, jax.vmap(cometric)(cloud, gradients(feature, cloud, p, x, y)))


def dissipation(feature, cometric, cloud, p, x, y):
    """-dE/dt = sum_i p_i <grad V, C grad V>: how fast the energy falls."""
    gradient = gradients(feature, cloud, p, x, y)
    moved = jax.vmap(cometric)(cloud, gradient)
    each = jax.vmap(lambda u, v: sum(jnp.vdot(s, t) for s, t in zip(u, v, strict=True)))(gradient, moved)
    return p @ each


def kernel(feature, cometric, cloud, p, x):
    """K(x, z) = sum_i p_i <grad phi(w_i; x), C grad phi(w_i; z)>: how predictions move each other."""
    slopes = jax.vmap(jax.vmap(jax.grad(feature), (None, 0)), (0, None))(cloud, x)  # (m, n, ...)
    raised = jax.vmap(jax.vmap(cometric, (None, 0)))(cloud, slopes)
    pair = [jnp.einsum("mn...,mk...->mnk", u, v) for u, v in zip(slopes, raised, strict=True)]
    return jnp.einsum("m,mnk->nk", p, sum(pair))


def solve(feature, cometric, cloud, p, x, y, end, steps):
    """The cloud at time ``end``, by the classical Runge-Kutta method, and the energies on the way."""
    h = end / steps

    def slope(c):
        return velocity(feature, cometric, c, p, x, y)

    def moved(c, rate, size):
        return jax.tree.map(lambda u, v: u + size * v, c, rate)

    def step(c, _):
        one = slope(c)
        two = slope(moved(c, one, h / 2))
        three = slope(moved(c, two, h / 2))
        four = slope(moved(c, three, h))
        rate = jax.tree.map(lambda a, b, c, d: (a + 2 * b + 2 * c + d) / 6, one, two, three, four)
        return moved(c, rate, h), energy(feature, c, p, x, y)

    return jax.lax.scan(step, cloud, length=steps)


def main():
    """The same network with and without batch norm, on inputs that are wider in one direction."""
    jax.config.update("jax_enable_x64", True)
    x = jax.random.normal(jax.random.key(0), (100, 2)) * jnp.array([[2.2, 1.0]])
    y = jnp.sin(x[:, 0])
    a = jax.random.uniform(jax.random.key(1), (64,), minval=-1)
    b = jax.random.normal(jax.random.key(2), (64, 2))
    p = jnp.full(64, 1 / 64)
    mean, covariance = x.mean(0), jnp.cov(x.T, bias=True)
    models = {
        "plain": (plain, flat, (a, b / jnp.linalg.norm(b, axis=1, keepdims=True))),
        "batch norm": (*normalized(mean, covariance), (a, on_the_ellipsoid(b, covariance))),
    }
    for name, (feature, cometric, cloud) in models.items():
        end, energies = solve(feature, cometric, cloud, p, x, y, 20.0, 400)
        print(f"{name:>10}: energy {energies[0]:.4f} -> {energy(feature, end, p, x, y):.4f}")


if __name__ == "__main__":
    main()
