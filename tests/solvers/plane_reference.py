"""An independent event-driven integrator for two-layer ReLU networks in any dimension: numpy and scipy, slow, plain.

State of a neuron: which samples are active, and on which it slides. Between events scipy's DOP853 integrates the
coupled smooth equations, in which the force on a sliding neuron is projected on its hyperplanes; a terminal event is
the first margin that reaches zero. What happens at a kink is found by trying every pattern of inactive, active and
sliding: exactly one must be consistent. Times are those of the mean-field clock.
"""

import itertools

import numpy as np
from scipy.integrate import solve_ivp


class NotUnique(Exception):
    """The Filippov solution has no unique continuation."""


class Reference:
    """f = sum_i share_i a_i relu(b_i . x), force on a neuron sum_j q_j (f_j - y_j) [active] x_j."""

    def __init__(self, x, y, weights, rtol=1e-11):
        self.x, self.y, self.q, self.rtol = x, y, weights, rtol

    def unpack(self, flat):
        w = flat.reshape(-1, 1 + self.x.shape[1])
        return w[:, 0], w[:, 1:]

    def residual(self, f):
        return self.q * (f - self.y)

    def forces(self, a, b):
        """Residuals, preactivations, forces of the active samples, and those with the sliding planes projected out."""
        z = b @ self.x.T
        f = (a / len(a)) @ np.where(self.active, z, 0.0)
        r = self.residual(f)
        free = (self.active * r) @ self.x
        full, lam = free.copy(), {}
        for i, planes in enumerate(self.slides):
            if planes:
                normals = self.x[planes].T
                mixed, *_ = np.linalg.lstsq(normals, -free[i], rcond=None)
                full[i] = free[i] + normals @ mixed
                lam[i] = mixed / r[planes]
        return r, z, free, full, lam

    def rhs(self, t, flat):
        a, b = self.unpack(flat)
        _, _, _, force, _ = self.forces(a, b)
        return np.concatenate([-np.sum(force * b, 1)[:, None], -a[:, None] * force], 1).ravel()

    def margins(self, flat):
        """A list of (margin, neuron, kind, sample): distances that must stay positive."""
        a, b = self.unpack(flat)
        _, z, _, _, lam = self.forces(a, b)
        found = []
        for i, planes in enumerate(self.slides):
            if not planes and not self.active[i].any():
                continue  # dead
            if len(planes) < b.shape[1] - 1 or not planes:
                rest = [j for j in range(len(self.y)) if j not in planes]
                found += [(z[i, j] if self.active[i, j] else -z[i, j], i, "hit", j) for j in rest]
            else:
                found.append((np.linalg.norm(b[i]), i, "origin", -1))
            if planes:
                found.append((abs(a[i]), i, "sign", -1))
                for k, value in zip(planes, lam[i], strict=True):
                    found += [(value, i, "low", k), (1 - value, i, "high", k)]
        return found

    def decide(self, flat, i, planes):
        """The one consistent pattern of neuron i on ``planes``: sets what is active and what slides."""
        a, b = self.unpack(flat)
        self.slides[i] = []
        self.active[i, planes] = False
        r, _, free, _, _ = self.forces(a, b)
        good = []
        for pattern in itertools.product("01s", repeat=len(planes)):
            on = [k for k, p in zip(planes, pattern, strict=True) if p == "1"]
            stuck = [k for k, p in zip(planes, pattern, strict=True) if p == "s"]
            if any(a[i] * r[k] <= 0 for k in stuck):
                continue  # sliding on a concave kink is not stable
            force = free[i] + r[on] @ self.x[on]
            if stuck:
                normals = self.x[stuck].T
                mixed, *_ = np.linalg.lstsq(normals, -force, rcond=None)
                if np.any(mixed / r[stuck] < 0) or np.any(mixed / r[stuck] > 1):
                    continue
                force = force + normals @ mixed
            speed = -a[i] * (self.x @ force)
            if all(speed[k] > 0 for k in on) and all(
                speed[k] < 0 for k, p in zip(planes, pattern, strict=True) if p == "0"
            ):
                good.append((on, stuck))
        if len(good) != 1:
            raise NotUnique(f"{len(good)} consistent patterns")
        on, stuck = good[0]
        self.active[i, on] = True
        self.slides[i] = stuck
        self.most = max(self.most, len(stuck))
        return on, stuck

    def solve(self, a, b, end, max_step=0.05):
        flat = np.concatenate([a[:, None], b], 1).ravel().astype(float)
        self.active = b @ self.x.T > 0
        self.slides = [[] for _ in a]
        self.log, self.most, self.now = [], 0, 0.0
        while self.now < end:
            event = lambda t, y: min((m[0] for m in self.margins(y)), default=1.0)
            event.terminal, event.direction = True, -1
            out = solve_ivp(
                *(self.rhs, (self.now, end), flat),
                method="DOP853",
                rtol=self.rtol,
                atol=1e-13,
                max_step=max_step,
                events=event,
            )
            assert out.success
            flat, self.now = out.y[:, -1].copy(), out.t[-1]
            if out.status == 0:
                break
            assert len(self.log) < 2000
            self.handle(flat)
        return self.unpack(flat)

    def handle(self, flat):
        _, i, kind, k = min(self.margins(flat))
        if kind in ("sign", "origin"):
            raise NotUnique(kind)
        if kind in ("low", "high"):
            self.slides[i].remove(k)
            self.active[i, k] = kind == "high"
            self.log.append((self.now, "release", i, k))
        else:
            came = bool(self.active[i, k])
            before = list(self.slides[i])
            on, stuck = self.decide(flat, i, [*before, k])
            self.log += [(self.now, "release", i, j) for j in before if j not in stuck]
            if k in stuck:
                self.log.append((self.now, "capture", i, k))
            elif (k in on) != came:
                self.log.append((self.now, "cross", i, k))
        self.settle(flat, i)

    def settle(self, flat, i):
        """Puts a neuron on the planes it slides on, and 1e-13 off those it has just left."""
        _, b = self.unpack(flat)
        planes = self.slides[i]
        z = self.x @ b[i]
        side = np.where(self.active[i], 1.0, -1.0)
        close = [j for j in range(len(z)) if j not in planes and side[j] * z[j] < 1e-13]
        assert all(abs(z[j]) < 1e-8 for j in close)
        rows = [*planes, *close]
        if rows:
            wanted = np.array([0.0] * len(planes) + [side[j] * 1e-13 for j in close])
            step, *_ = np.linalg.lstsq(self.x[rows], wanted - z[rows], rcond=None)
            b[i] += step
