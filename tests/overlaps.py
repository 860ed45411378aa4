"""The equations of Saad and Solla (1995) for the overlaps of a soft committee machine, written from Gaussian integrals.

Students and teachers have the activation g(z) = erf(z / sqrt 2); a step of one-pass descent with rate eta/d on a fresh
sample moves the student by (eta/d) delta_i x with delta_i = g'(x_i) (sum_n g(y_n) - sum_j g(x_j)). In the limit of
large d, with time in samples over d,

    dR_in/dt = eta E[delta_i y_n],    dQ_ik/dt = eta E[delta_i x_k + delta_k x_i] + eta^2 E[delta_i delta_k].
"""

import numpy as np
from scipy.integrate import solve_ivp


def three(c):
    """E[g'(u) v g(w)] for Gaussians (u, v, w) of covariance c (3, 3)."""
    root = np.sqrt((1 + c[0, 0]) * (1 + c[2, 2]) - c[0, 2] ** 2)
    return 2 / np.pi / root * (c[1, 2] * (1 + c[0, 0]) - c[0, 1] * c[0, 2]) / (1 + c[0, 0])


def four(c):
    """E[g'(t) g'(u) g(v) g(w)] for Gaussians (t, u, v, w) of covariance c (4, 4)."""
    # under the weight g'(t) g'(u) the others are Gaussian with this covariance, and E[g(v) g(w)] is an arcsine
    front = np.eye(2) + c[:2, :2]
    rest = c[2:, 2:] - c[2:, :2] @ np.linalg.solve(front, c[:2, 2:])
    scale = 2 / np.pi / np.sqrt(np.linalg.det(front))
    return scale * 2 / np.pi * np.arcsin(rest[0, 1] / np.sqrt((1 + rest[0, 0]) * (1 + rest[1, 1])))


def overlap_path(r, q, eta, times, noise=True):
    """Return R (t, k, m) and Q (t, k, k) at times, for orthonormal teachers; ``noise=False``: no eta^2 terms."""
    k, m = r.shape
    signs = np.concatenate([-np.ones(k), np.ones(m)])  # students are subtracted from teachers

    def rate(_, y):
        r, q = y[: k * m].reshape(k, m), y[k * m :].reshape(k, k)
        whole = np.block([[q, r], [r.T, np.eye(m)]])
        pick = lambda *i: whole[np.ix_(i, i)]
        force = lambda i, v: sum(signs[w] * three(pick(i, v, w)) for w in range(k + m))
        dr = eta * np.array([[force(i, k + n) for n in range(m)] for i in range(k)])
        turn = np.array([[force(i, j) for j in range(k)] for i in range(k)])
        dq = eta * (turn + turn.T)
        if noise:
            pairs = [(v, w) for v in range(k + m) for w in range(k + m)]
            square = lambda i, j: sum(signs[v] * signs[w] * four(pick(i, j, v, w)) for v, w in pairs)
            dq = dq + eta**2 * np.array([[square(i, j) for j in range(k)] for i in range(k)])
        return np.concatenate([dr.ravel(), dq.ravel()])

    start = np.concatenate([r.ravel(), q.ravel()])
    path = solve_ivp(rate, (0, times[-1]), start, t_eval=times, rtol=1e-7, atol=1e-9).y.T
    return path[:, : k * m].reshape(-1, k, m), path[:, k * m :].reshape(-1, k, k)


def students(d, overlaps, norms, seed):
    """Return K students in R^d with given products with the first K unit vectors and among each other, (K, d)."""
    k = overlaps.shape[0]
    rest = np.linalg.cholesky(norms - overlaps @ overlaps.T)
    frame = np.linalg.qr(np.random.default_rng(seed).normal(size=(d - k, k)))[0]
    return np.concatenate([overlaps, rest @ frame.T], axis=1)


def energy(r, q):
    """Return E (f - y)^2 / 2 from the overlaps, for orthonormal teachers."""
    one = 1 + np.diag(q)
    own = np.arcsin(q / np.sqrt(np.outer(one, one))).sum()
    cross = np.arcsin(r / np.sqrt(2 * one)[:, None]).sum()
    return (own + r.shape[1] * np.pi / 6 - 2 * cross) / np.pi
