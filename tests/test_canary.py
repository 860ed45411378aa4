"""Watches for the jax CPU miscompile (jax#39103): jit must equal eager on a per-particle quadratic form.

The sums are computed by a process of its own with the compiler's default options: the suite may run with others, and
users' programs do not.
"""

import json
import os
import subprocess
import sys
from importlib.metadata import version

import numpy as np
import pytest

SIZES = [16385, 20000, 32769, 40000]
PRECISIONS = {"float32": 1e-5, "float64": 1e-12}  # with the relative error that rounding explains


def relative_errors() -> dict[str, list[float]]:
    """For each size and precision, the largest relative errors of the compiled form and of the eager one."""
    import jax
    import jax.numpy as jnp

    jax.config.update("jax_enable_x64", True)
    errors = {}
    for dtype in PRECISIONS:
        for size in SIZES:
            rng = np.random.default_rng(0)
            matrix = rng.normal(size=(3, 3)).astype(dtype)
            points = rng.normal(size=(size, 3)).astype(dtype)
            form = jax.vmap(lambda w, matrix=matrix: jnp.sum((jnp.asarray(matrix) @ w) ** 2))
            exact = np.sum((points.astype("float64") @ matrix.T.astype("float64")) ** 2, axis=1)
            compiled, eager = np.asarray(jax.jit(form)(points)), np.asarray(form(points))
            errors[f"{dtype} {size}"] = [float(np.max(abs(u - exact) / exact)) for u in (compiled, eager)]
    return errors


@pytest.fixture(scope="module")
def errors():
    plain = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
    done = subprocess.run([sys.executable, __file__], capture_output=True, text=True, env=plain, timeout=250)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("dtype", PRECISIONS)
def test_jit_and_eager_are_right(size, dtype, errors):
    compiled, eager = errors[f"{dtype} {size}"]
    assert max(compiled, eager) < PRECISIONS[dtype], (
        f"jax {version('jax')} with jaxlib {version('jaxlib')} computes wrong numbers on this machine: relative error "
        f"{compiled:.1e} compiled, {eager:.1e} eager. Trust no result of this environment. Install another release, "
        f"add jax!={version('jax')} and jaxlib!={version('jaxlib')} to the dependencies in pyproject.toml, and report "
        "it at github.com/jax-ml/jax; jax#39103 was of this kind."
    )


if __name__ == "__main__":
    sys.stdout.write(json.dumps(relative_errors()))
