"""The certificate of global optimality and the separation checker."""

import jax.numpy as jnp
import numpy as np
from helpers import ring

import meanflow as mf
from meanflow.flows._optimality import certificate, separates


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
    raw = mf.batchnorm("tanh", mean=flow.feature.mean, covariance=flow.feature.sigma)
    assert abs(float(certificate(raw, mf.geometry.lift(other), data, count=20_000).value) / exact - 1) < 1e-6


def test_separation_in_the_plane_and_in_space():
    turn = 2 * np.pi * np.arange(64) / 64
    wave = mf.Cloud(
        mf.Neurons(jnp.asarray(0.5 * np.sin(turn)), jnp.asarray(np.c_[np.cos(turn), np.sin(turn)]))
    )
    assert separates(wave, 1.0, tolerance=0.15)
    half = mf.Cloud(mf.Neurons(wave.particles.a[:32], wave.particles.b[:32]))
    assert not separates(half, 1.0, tolerance=0.15)
    jump = mf.Cloud(mf.Neurons(jnp.asarray(np.where(turn < np.pi, 0.5, -0.5)), wave.particles.b))
    assert not separates(jump, 1.0, tolerance=0.15)  # two half circles at different heights leave gaps

    rng = np.random.default_rng(0)
    b = rng.normal(size=(600, 3))
    sphere = mf.Cloud(mf.Neurons(jnp.zeros(600), jnp.asarray(b)))
    cap = mf.Cloud(mf.Neurons(jnp.zeros(600), jnp.asarray(np.c_[b[:, :2], np.abs(b[:, 2]) + 0.1])))
    assert separates(sphere, 1.0, tolerance=0.5)
    assert not separates(cap, 1.0, tolerance=0.5)
