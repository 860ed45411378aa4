"""The recorder of kernels along training: against kernels, drifts and Hessians computed on their own."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from meanflow import kernels
from meanflow.kernels.drift import alignment
from meanflow.layers import BatchNorm
from meanflow.training import Trainer
from meanflow.training.data import Data


def test_descent_of_a_linear_network():
    """The first eigenvalue is the sharpness: the largest eigenvalue of the Hessian of the loss."""
    x, y = jax.random.normal(jax.random.key(0), (6, 3)), jnp.arange(12.0).reshape(6, 2)
    net = lambda p, x: x @ p["w"] @ p["v"]
    params = {"w": jnp.eye(3), "v": jnp.ones((3, 2)) / 3}
    recorder = kernels.KernelRecorder(x, y, apply=net, steps=[0, 3, 4], top=2, keep=True)
    loss = lambda p: 0.5 * jnp.mean(jnp.sum((net(p, x) - y) ** 2, axis=1))
    seen = []
    for step in range(5):
        recorder(step, params)
        seen.append(kernels.empirical_ntk(net, params, x).transpose(0, 2, 1, 3).reshape(12, 12))
        params = jax.tree.map(lambda a, g: a - 0.01 * g, params, jax.grad(loss)(params))
    record = recorder.record
    assert record["step"].tolist() == [0, 3, 4]
    chosen = np.stack(seen)[record["step"]]
    np.testing.assert_allclose(record["kernel"], chosen, rtol=1e-12)
    np.testing.assert_allclose(record["drift"], kernels.kernel_drift(chosen), atol=1e-14)
    np.testing.assert_allclose(record["alignment"], [alignment(k, y.reshape(-1)) for k in chosen], rtol=1e-12)
    np.testing.assert_allclose(record["trace"], np.trace(chosen, axis1=1, axis2=2) / 6, rtol=1e-12)
    # at zero residual the Hessian is the Gauss-Newton matrix
    target = net(params, x)
    perfect = kernels.KernelRecorder(x, apply=net, top=2)
    perfect(0, params)
    flat, build = jax.flatten_util.ravel_pytree(params)
    hessian = jax.hessian(lambda u: 0.5 * jnp.mean(jnp.sum((net(build(u), x) - target) ** 2, axis=1)))(flat)
    top = np.linalg.eigvalsh(hessian)[::-1][:2]
    np.testing.assert_allclose(perfect.record["eigenvalues"][0], top, rtol=1e-9)


def test_trainer_of_a_convolutional_network_with_one_compilation():
    traces = []

    class Net(nnx.Module):
        def __init__(self, rngs):
            self.conv, self.norm = nnx.Conv(1, 4, (3, 3), rngs=rngs), BatchNorm(4, rngs=rngs)
            self.head = nnx.Linear(4, 3, rngs=rngs)

        def __call__(self, x):
            traces.append(None)
            return self.head(jnp.mean(nnx.relu(self.norm(self.conv(x))), axis=(1, 2)))

    rng = np.random.default_rng(0)
    x = rng.normal(size=(24, 4, 4, 1)).astype(np.float32)
    y = (np.arange(24) % 3).astype(np.int32)
    data = Data(x[:16], y[:16], x[16:], y[16:])
    trainer = Trainer(Net, optax.sgd(0.1), batch=8)
    recorder = kernels.KernelRecorder(x[:5], jax.nn.one_hot(y[:5], 3))
    state, _ = trainer.run(jax.random.key(0), data, 1, progress=False, hook=recorder)
    before = len(traces)
    state, _ = trainer.run(state, data, 3, progress=False, hook=recorder)
    record = recorder.record
    assert record["step"].tolist() == [0, 1, 2, 3]
    assert len(traces) == before + 1  # a look at the shapes of the data; no program was traced again
    apply, params = kernels.from_nnx(trainer.network(state))  # in inference
    kernel = kernels.empirical_ntk(apply, params, x[:5])
    top = np.linalg.eigvalsh(np.transpose(kernel, (0, 2, 1, 3)).reshape(15, 15))[::-1][:3] / 5
    np.testing.assert_allclose(record["eigenvalues"][-1], top, rtol=1e-4)
    assert record["drift"][0] == 0 and np.all(np.diff(record["drift"]) > 0)
    assert np.all((record["alignment"] > 0) & (record["alignment"] < 1))


@pytest.mark.bad_input
def test_bad_use():
    x = jnp.ones((4, 2))
    coupled = lambda w, x: x @ w - jnp.mean(x @ w)
    with pytest.raises(ValueError, match="couples the samples"):
        kernels.KernelRecorder(x, apply=coupled)(0, jnp.ones(2))
    with pytest.raises(ValueError, match="y must have 4 rows like x, got shape"):
        kernels.KernelRecorder(x, jnp.ones(3), apply=lambda w, x: x @ w)(0, jnp.ones(2))
    with pytest.raises(ValueError, match="steps"):
        kernels.KernelRecorder(x, apply=coupled, steps=0)
    assert kernels.KernelRecorder(x).record == {}
