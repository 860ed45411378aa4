"""The certificate of global optimality."""

import jax.numpy as jnp
import numpy as np
from helpers import ring

import meanflow as mf
from meanflow.flows._optimality import certificate


def student_and_teacher():
    x = ring(48)
    flow = mf.batchnorm_manifold("tanh", mean=jnp.zeros(2), covariance=jnp.diag(jnp.array([5.0, 1.0])))
    turn = np.array([0.4, 1.9, 4.0])
    teacher = flow.space.from_raw(
        mf.Cloud(mf.Neurons(jnp.array([3.0, -3.0, 2.0]), jnp.asarray(np.c_[np.cos(turn), np.sin(turn)])))
    )
    return flow, teacher, mf.Dataset(x, mf.predict(flow, teacher, x))


def test_certificate_vanishes_at_the_teacher_only():
    flow, teacher, data = student_and_teacher()
    assert float(certificate(flow, teacher, data).value) < 1e-14
    other = teacher.at(mf.Neurons(0.5 * teacher.particles.a, teacher.particles.b))
    found = certificate(flow, other, data, count=20_000)
    # against a direct maximisation over the angle
    turn = np.linspace(0, 2 * np.pi, 40_001)
    b = np.c_[np.cos(turn), np.sin(turn)]
    bb = b / np.sqrt(np.sum(b**2 * [5.0, 1.0], axis=1))[:, None]
    residual = np.asarray(mf.predict(flow, other, data.x) - data.y) / 48
    exact = np.abs(residual @ np.tanh(np.asarray(data.x) @ bb.T)).max()
    assert abs(float(found.value) / exact - 1) < 1e-6
    raw = mf.batchnorm("tanh", mean=flow.feature.mean, covariance=flow.feature.covariance)
    assert abs(float(certificate(raw, mf.geometry.lift(other), data, count=20_000).value) / exact - 1) < 1e-6
