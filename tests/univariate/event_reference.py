"""An independent event-driven integrator for univariate ReLU networks: numpy and scipy, dense, slow, plain.

State of a neuron: which samples are active, and the sample it slides on, if any. Between events scipy's DOP853
integrates the coupled smooth ODE; a terminal event is the first margin that reaches zero. Times are those of
gradient flow on the loss (learning rate x steps).
"""

import numpy as np
from scipy.integrate import solve_ivp


class NotUnique(Exception):
    """The Filippov solution has no unique continuation."""


class Reference:
    """kind: "full" (y = a, -b, c), "planar" (c frozen), "canonical" (y = r, theta; network mean). slope(f, y) = l'."""

    def __init__(self, x, y, alpha, kind="full", slope=lambda f, y: f - y, decay=0.0, rtol=1e-12):
        self.x, self.y, self.alpha, self.kind, self.slope, self.decay = x, y, alpha, kind, slope, decay
        self.tilde = np.stack([x, np.ones_like(x)], 1)
        self.rtol = rtol

    def directions(self, w):
        return np.stack([np.cos(w[1]), np.sin(w[1])], 1) if self.kind == "canonical" else w[:2].T

    def amplitude(self, w):
        return w[0] / w.shape[1] if self.kind == "canonical" else w[2] / self.alpha

    def forces(self, w):
        p = self.directions(w)
        z = p @ self.tilde.T
        f = self.amplitude(w) @ np.where(self.active, z, 0.0)
        self.rho = self.slope(f, self.y)
        return p, z, (self.active * self.rho) @ self.tilde

    def ray(self, i):
        """Unit vector of the ray that neuron i slides on, on its own side."""
        j = self.stuck[i]
        return self.facing[i] * np.array([1.0, -self.x[j]]) / np.hypot(1, self.x[j])

    def rhs(self, t, flat):
        w = flat.reshape(self.rows, -1)
        p, _, force = self.forces(w)
        for i in np.flatnonzero(self.stuck >= 0):
            d = self.ray(i)
            force[i] = (force[i] @ d) * d
        if self.kind == "canonical":
            m = w.shape[1]
            d = self.directions(w)
            turn = np.stack([-d[:, 1], d[:, 0]], 1)
            return np.concatenate([-np.sum(force * d, 1), -w[0] * np.sum(force * turn, 1)]) / m
        c = w[2]
        dp = -(c / self.alpha)[:, None] * force - self.decay * p
        dc = -np.sum(force * p, 1) / self.alpha - self.decay * c
        return np.concatenate([dp[:, 0], dp[:, 1], dc * (self.kind == "full")])

    def margins(self, w):
        """(m, s) distances that must stay positive; inf where there is nothing to watch."""
        p, z, force = self.forces(w)
        margin = np.where(self.active, z, -z)
        margin[~self.active.any(1)] = np.inf  # dead neurons rest
        sign = w[0] if self.kind == "canonical" else w[2]
        for i in np.flatnonzero(self.stuck >= 0):
            j = self.stuck[i]
            margin[i] = np.inf
            without = -sign[i] * (self.tilde[j] @ force[i])
            own = -sign[i] * (self.tilde[j] @ (force[i] + self.rho[j] * self.tilde[j]))
            watched = [without, -own] + ([] if self.kind == "canonical" else [p[i] @ self.ray(i)])
            margin[i, : len(watched)] = watched
        return margin

    def event(self, t, flat):
        return np.min(self.margins(flat.reshape(self.rows, -1)))

    def decide(self, w, i, j):
        """Neuron i is on the ray of sample j: slide, or enter one of the sides."""
        p, _, _ = self.forces(w)
        others = self.active[i].copy()
        others[j] = False
        base = (others * self.rho) @ self.tilde
        sign = (w[0] if self.kind == "canonical" else w[2])[i]
        without = -sign * (self.tilde[j] @ base)
        own = -sign * (self.tilde[j] @ (base + self.rho[j] * self.tilde[j]))
        self.active[i, j] = False
        self.stuck[i] = -1
        if without > 0 > own:
            self.stuck[i] = j
            self.facing[i] = np.sign(p[i] @ np.array([1.0, -self.x[j]]))
            self.log.append((self.now, "capture", i, j))
        else:
            self.active[i, j] = without > 0
            self.log.append((self.now, "cross", i, j))

    def solve(self, w0, end, max_step=0.05):
        w = np.array(w0, float)
        self.rows, m = w.shape
        self.stuck, self.facing = np.full(m, -1), np.zeros(m)
        self.active = self.directions(w) @ self.tilde.T > 0
        self.log, self.now = [], 0.0
        while self.now < end:
            out = solve_ivp(
                self.rhs,
                (self.now, end),
                w.ravel(),
                method="DOP853",
                rtol=self.rtol,
                atol=1e-13,
                max_step=max_step,
                events=self._terminal(),
            )
            assert out.success
            w, self.now = out.y[:, -1].reshape(self.rows, -1), out.t[-1]
            if out.status == 0:
                break
            assert len(self.log) < 1000
            self.handle(w)
        assert self.now == end
        return w

    def _terminal(self):
        def event(t, y):
            return self.event(t, y)

        event.terminal, event.direction = True, -1
        return event

    def handle(self, w):
        margin = self.margins(w)
        first = np.unravel_index(np.argmin(margin), margin.shape)
        # neurons on one ray are set free together: the condition is the same
        together = [(i, j) for i, j in zip(*np.nonzero(margin < 1e-9), strict=True) if self.stuck[i] >= 0]
        for i, j in {first, *together}:
            if self.stuck[i] < 0:
                self.put_on_ray(w, i, j)
                self.decide(w, i, j)
            elif j == 2:
                raise NotImplementedError("p = 0 while sliding")
            else:
                k = self.stuck[i]
                sign = (w[0] if self.kind == "canonical" else w[2])[i]
                if abs(sign) < 1e-9:
                    raise NotUnique("c = 0 while sliding")
                self.stuck[i] = -1
                self.active[i, k] = j == 1
                self.log.append((self.now, "release", i, k))
            self.nudge(w, i)

    def put_on_ray(self, w, i, j):
        if self.kind == "canonical":
            return
        normal = self.tilde[j] / np.linalg.norm(self.tilde[j])
        w[:2, i] -= (w[:2, i] @ normal) * normal

    def nudge(self, w, i):
        """Moves a neuron by 1e-13 off the ray it has just passed, so that rounding cannot make it meet it again."""
        if self.stuck[i] >= 0:
            return
        p = self.directions(w)[i]
        z = p @ self.tilde.T
        side = np.where(self.active[i], 1.0, -1.0)
        for j in np.flatnonzero(side * z < 1e-13):
            assert abs(z[j]) < 1e-9
            gap = side[j] * 1e-13 - z[j]
            if self.kind == "canonical":
                w[1, i] += gap / (self.tilde[j] @ np.array([-p[1], p[0]]))
            else:
                w[:2, i] += gap * self.tilde[j] / (self.tilde[j] @ self.tilde[j])
