"""The first call of a program: how long people wait who call it once, against diffrax and loops written by hand.

Each row is measured in a process of its own in which nothing was compiled before, with the cache of programs off.
"""

import importlib
import json
import os
import pathlib
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

ONE_THREAD = "--xla_cpu_multi_thread_eigen=false"
EVENTS = {
    "/jax/core/compile/jaxpr_trace_duration": "tracing",
    "/jax/core/compile/jaxpr_to_mlir_module_duration": "lowering",
    "/jax/core/compile/backend_compile_duration": "compiling",
}
Job = Callable[[], object]


def rows(
    names: tuple[str, ...] | None = None, repeats: int = 1, programs: bool = False, precision: str = "float32"
) -> dict[str, float]:
    """First calls in fresh processes: processor seconds, of which tracing, lowering and compiling, and the second call.

    Importing and drawing the initial network are not counted, since they are done before the clock starts; rows named
    ``import`` measure the import itself, beyond that of jax.

    Args:
        names: rows, all by default; a part of a name stands for all rows that contain it.
        repeats: measurements of each row, of which the fastest counts.
        programs: also count the fusions and the lines of all compiled programs, in one more process for each row.
        precision: "float32" or "float64".

    Returns:
        For each row processor ``seconds``, those of ``tracing``, ``lowering`` and ``compiling`` by the wall clock (one
        thread), and ``again``, the seconds of the second call.
    """
    chosen = [row for row in ROWS if names is None or any(name in row for name in names)]
    if not chosen:
        raise ValueError(f"names must be parts of {sorted(ROWS)}, got {names!r}")
    out: dict[str, float] = {}
    for row in chosen:
        runs = [_in_fresh_process(row, precision) for _ in range(repeats)]
        found = min(runs, key=lambda run: run["seconds"])
        if programs:
            found |= _program_sizes(row, precision)
        out |= {f"{row}: {key}": value for key, value in found.items()}
    return out


def _in_fresh_process(row: str, precision: str, flags: str = "") -> dict[str, float]:
    environment = os.environ | {
        "XLA_FLAGS": f"{ONE_THREAD} {flags}",
        "JAX_ENABLE_COMPILATION_CACHE": "false",
        "JAX_ENABLE_X64": str(precision == "float64"),
        "JAX_PLATFORMS": "cpu",
    }
    command = [sys.executable, "-m", __name__, row]
    answer = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if answer.returncode:
        raise RuntimeError(f"the first call of {row!r} failed: {answer.stderr[-2000:]}")
    numbers: dict[str, float] = json.loads(answer.stdout.splitlines()[-1])
    return numbers


def _program_sizes(row: str, precision: str) -> dict[str, float]:
    """Return the number of fusions and of lines of the optimized programs that a row compiles."""
    with tempfile.TemporaryDirectory() as folder:
        _in_fresh_process(row, precision, f"--xla_dump_to={folder} --xla_dump_hlo_as_text")
        texts = [path.read_text() for path in pathlib.Path(folder).glob("*after_optimizations.txt")]
    return {
        "lines": sum(text.count("\n") for text in texts),
        "fusions": sum(text.count(" fusion(") for text in texts),
        "programs": len(texts),
    }


def _measure(row: str) -> dict[str, float]:
    """Run one row in this process."""
    if row in IMPORTS:
        start = time.process_time()
        importlib.import_module(IMPORTS[row][0])
        for name in IMPORTS[row][1:]:
            getattr(sys.modules[IMPORTS[row][0]], name)
        return {"seconds": time.process_time() - start}
    job = ROWS[row]()
    _load()
    spans: dict[str, list[tuple[float, float]]] = {kind: [] for kind in EVENTS.values()}

    def note(event: str, duration_secs: float, **_: str | int) -> None:
        if event in EVENTS:
            spans[EVENTS[event]].append((time.perf_counter() - duration_secs, time.perf_counter()))

    jax.monitoring.register_event_duration_secs_listener(note)
    start = time.process_time()
    jax.block_until_ready(job())
    first = time.process_time() - start
    kinds = {kind: _covered(found) for kind, found in spans.items()}
    start = time.process_time()
    jax.block_until_ready(job())
    return {"seconds": first} | kinds | {"again": time.process_time() - start}


def _load() -> None:
    """Import what loads on first use: only the rows named ``import`` measure that."""
    import meanflow as mf

    for name in ("solve", "descend", "sweep", "tanh"):
        getattr(mf, name, None)


def _covered(spans: list[tuple[float, float]]) -> float:
    """Return the length of a union of intervals: traces of inner functions lie in those of outer ones."""
    total, reached = 0.0, -float("inf")
    for start, end in sorted(spans):
        total += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return total


# --- the problem: 16 neurons, 20 samples of two inputs ------------------------------------------------------------


def _problem(model: str = "vanilla", activation: str = "tanh") -> tuple[Any, Any, Any]:
    """Return flow, cloud and data, computed and ready."""
    import meanflow as mf

    x = jax.random.normal(jax.random.key(0), (20, 1 if model == "full" else 2))
    data = mf.Dataset(x[:, 0] if model == "full" else x, jnp.sin(2.0 * x[:, 0]))
    if model == "full":
        flow = mf.full()
        return flow, flow.init(jax.random.key(1), 16), data
    flow = getattr(mf, model)(activation)
    cloud = (flow if model == "vanilla" else flow.bind(data)).init(jax.random.key(1), 16, dim=2)
    return flow, jax.block_until_ready(cloud), data


def _velocity(model: str) -> Job:
    import meanflow as mf

    flow, cloud, data = _problem(model)
    return lambda: mf.velocity(flow, cloud, data)


def _descend(model: str = "vanilla", **settings: Callable[[], object]) -> Job:
    import meanflow as mf

    flow, cloud, data = _problem(model)
    made: dict[str, Any] = {name: make() for name, make in settings.items()} or {"step": 0.1}
    descend = mf.descend  # loads the room
    return lambda: descend(flow, cloud, data, 100, **made)


def _minibatches() -> Job:
    import meanflow as mf

    return _descend(step=lambda: 0.1, batches=lambda: mf.Batches(5, jax.random.key(2)))


def _noise() -> Job:
    import meanflow as mf

    return _descend(step=lambda: 0.1, dynamics=lambda: mf.Noise(0.01, jax.random.key(2)))


def _adam() -> Job:
    import optax

    return _descend(optimizer=lambda: optax.adam(1e-2))


def _solve(model: str = "vanilla", activation: str = "tanh", **settings: Any) -> Job:
    import meanflow as mf

    flow, cloud, data = _problem(model, activation)
    solve = mf.solve  # loads the room
    return lambda: solve(flow, cloud, data, 1.0, **settings)


def _gradient(run: Callable[..., Any], model: str = "vanilla", activation: str = "tanh") -> Job:
    """Return the gradient of the last energy of a run in its initial weights."""
    flow, cloud, data = _problem(model, activation)
    last = lambda particles: run(flow, cloud.at(particles), data).energy[-1]
    # users write jax.grad around a run; it is compiled as one program
    gradient = jax.jit(jax.grad(last))
    return lambda: gradient(cloud.particles)


def _gradient_of_solve(model: str = "vanilla", activation: str = "tanh", **settings: Any) -> Job:
    import meanflow as mf

    solve = mf.solve
    return _gradient(lambda flow, cloud, data: solve(flow, cloud, data, 1.0, **settings), model, activation)


def _gradient_of_descend() -> Job:
    import meanflow as mf

    descend = mf.descend
    return _gradient(lambda flow, cloud, data: descend(flow, cloud, data, 100, step=0.1))


def _kernel(name: str, outputs: str) -> Job:
    from meanflow import kernels
    from meanflow_benchmarks.networks import NETWORKS

    apply, params, x = NETWORKS[name]()
    jax.block_until_ready((params, x))
    return lambda: kernels.empirical_ntk(apply, params, x, outputs=outputs, stats="frozen")


def _sweep() -> Job:
    import meanflow as mf

    x = jnp.linspace(-1.0, 1.0, 10)
    data = mf.Dataset(x, jnp.sin(3.0 * x))
    widths, deltas = [8, 12, 16, 24, 32, 48, 64, 96], [float(d) for d in range(-4, 5)]
    sweep = mf.sweep
    return lambda: sweep(mf.lifted(), data, widths=widths, deltas=deltas, seeds=4, t1=1.0, step=0.05)


# --- the same by hand and by diffrax ------------------------------------------------------------------------------


def _hand(kind: str, normalized: bool = False, activation: Any = jnp.tanh) -> Job:
    """Return a job written in plain JAX: a step or a whole run of the flow, one jitted function.

    Kinds: "velocity"; "descend", "adam", "minibatch", "noise" (100 steps); "rk4" and "heun" (20 steps of .05 to time 1,
    recording the energy at the end); "euler" is the rule of "descend". With "gradient of " before it, the gradient of
    the last loss in the initial weights.
    """
    _, cloud, data = _problem("batchnorm" if normalized else "vanilla")
    weights = tuple(cloud.particles)

    def loss(w: Any, x: jax.Array, y: jax.Array) -> jax.Array:
        a, b = w
        z = x @ b.T
        if normalized:
            z = (z - z.mean(0)) / jnp.sqrt(z.var(0))
        return 0.5 * jnp.mean((activation(z) @ a / a.shape[0] - y) ** 2)

    def field(w: Any, x: jax.Array = data.x, y: jax.Array = data.y) -> Any:
        return jax.tree.map(lambda g: -w[0].shape[0] * g, jax.grad(loss)(w, x, y))

    def add(w: Any, k: Any, size: float) -> Any:
        return jax.tree.map(lambda u, v: u + size * v, w, k)

    def euler(w: Any, _: Any) -> tuple[Any, None]:
        return add(w, field(w), 0.1), None

    def heun(w: Any, _: Any) -> tuple[Any, None]:
        first = field(w)
        second = field(add(w, first, 0.05))
        return jax.tree.map(lambda u, p, q: u + 0.025 * (p + q), w, first, second), None

    def rk4(w: Any, _: Any) -> tuple[Any, None]:
        first = field(w)
        second = field(add(w, first, 0.025))
        third = field(add(w, second, 0.025))
        fourth = field(add(w, third, 0.05))
        whole = lambda u, p, q, r, s: u + 0.05 / 6 * (p + 2 * q + 2 * r + s)
        return jax.tree.map(whole, w, first, second, third, fourth), None

    def minibatch(w: Any, number: jax.Array) -> tuple[Any, None]:
        order = jax.random.permutation(jax.random.fold_in(jax.random.key(2), number // 4), 20)
        rows = jax.lax.dynamic_slice_in_dim(order, 5 * (number % 4), 5)
        return add(w, field(w, data.x[rows], data.y[rows]), 0.1), None

    def noise(w: Any, number: jax.Array) -> tuple[Any, None]:
        keys = jax.random.split(jax.random.fold_in(jax.random.key(2), number), 2)
        drawn = tuple(jax.random.normal(key, u.shape) for key, u in zip(keys, w, strict=True))
        return add(add(w, field(w), 0.1), drawn, (2 * 0.01 * 0.1) ** 0.5), None

    steps = {"descend": euler, "minibatch": minibatch, "noise": noise, "heun": heun, "rk4": rk4}

    def run(w: Any) -> tuple[Any, jax.Array]:
        if kind.endswith("adam"):
            import optax

            method = optax.adam(1e-2)

            def step(carry: Any, _: Any) -> tuple[Any, None]:
                w, state = carry
                moved, state = method.update(jax.grad(loss)(w, data.x, data.y), state)
                return (optax.apply_updates(w, moved), state), None

            end = jax.lax.scan(step, (w, method.init(w)), None, length=100)[0][0]
        else:
            name = kind.removeprefix("gradient of ")
            numbers = jnp.arange(20 if name in ("heun", "rk4") else 100)
            end = jax.lax.scan(steps[name], w, numbers)[0]
        return end, loss(end, data.x, data.y)

    if kind == "velocity":
        program: Any = jax.jit(field)
    elif kind.startswith("gradient"):
        program = jax.jit(jax.grad(lambda w: run(w)[1]))
    else:
        program = jax.jit(run)
    return lambda: program(weights)


def _diffrax(adaptive: bool, gradient: bool = False, normalized: bool = False) -> Job:
    """Return a run to time 1 by diffrax's Tsit5, by itself or with the gradient of its last loss."""
    import diffrax

    _, cloud, data = _problem("batchnorm" if normalized else "vanilla")
    weights = tuple(cloud.particles)

    def loss(w: Any) -> jax.Array:
        z = data.x @ w[1].T
        if normalized:
            z = (z - z.mean(0)) / jnp.sqrt(z.var(0))
        return 0.5 * jnp.mean((jnp.tanh(z) @ w[0] / w[0].shape[0] - data.y) ** 2)

    control: Any = diffrax.PIDController(rtol=1e-6, atol=1e-8) if adaptive else diffrax.ConstantStepSize()

    def run(w: Any) -> tuple[Any, jax.Array]:
        term = diffrax.ODETerm(lambda t, w, _: jax.tree.map(lambda g: -16.0 * g, jax.grad(loss)(w)))
        solution = diffrax.diffeqsolve(
            term, diffrax.Tsit5(), 0.0, 1.0, 0.05, w, stepsize_controller=control, max_steps=4096
        )
        assert solution.ys is not None
        end = jax.tree.map(lambda u: u[-1], solution.ys)
        return end, loss(end)

    program: Any = jax.jit(jax.grad(lambda w: run(w)[1])) if gradient else jax.jit(run)
    return lambda: program(weights)


IMPORTS = {"import: meanflow": ("meanflow", "solve"), "import: diffrax": ("diffrax",)}
ROWS: dict[str, Callable[[], Job]] = {
    **dict.fromkeys(IMPORTS, lambda: lambda: None),
    "velocity": lambda: _velocity("vanilla"),
    "velocity: by hand": lambda: _hand("velocity"),
    "velocity, batch norm": lambda: _velocity("batchnorm"),
    "velocity, batch norm: by hand": lambda: _hand("velocity", normalized=True),
    "descend": lambda: _descend(),
    "descend: by hand": lambda: _hand("descend"),
    "descend, Adam": _adam,
    "descend, Adam: by hand": lambda: _hand("adam"),
    "descend, minibatches": _minibatches,
    "descend, minibatches: by hand": lambda: _hand("minibatch"),
    "descend, batch norm": lambda: _descend("batchnorm"),
    "descend, batch norm: by hand": lambda: _hand("descend", normalized=True),
    "descend, noise": _noise,
    "descend, noise: by hand": lambda: _hand("noise"),
    "solve": lambda: _solve(),
    "solve: diffrax": lambda: _diffrax(adaptive=True),
    "solve, batch norm": lambda: _solve("batchnorm"),
    "solve, batch norm: diffrax": lambda: _diffrax(adaptive=True, normalized=True),
    "solve, manifold": lambda: _solve("batchnorm_manifold"),
    "solve, fixed step": lambda: _solve(step=0.05),
    "solve, fixed step: diffrax": lambda: _diffrax(adaptive=False),
    "solve, fixed step: by hand": lambda: _hand("rk4"),
    "solve, ReLU": lambda: _solve(activation="relu"),
    "solve, ReLU: by hand": lambda: _hand("heun", activation=jax.nn.relu),
    "solve, ReLU with batch norm": lambda: _solve("batchnorm", "relu"),
    "solve, ReLU with batch norm: by hand": lambda: _hand("heun", True, jax.nn.relu),
    "sliding, one input": lambda: _solve("full", solver="sliding", step=0.05),
    "sliding": lambda: _solve("vanilla", "relu", solver="sliding", step=0.05),
    "sliding, batch norm": lambda: _solve("batchnorm", "relu", solver="sliding", step=0.05),
    "gradient of descend": _gradient_of_descend,
    "gradient of descend: by hand": lambda: _hand("gradient of descend"),
    "gradient of solve": lambda: _gradient_of_solve(),
    "gradient of solve: diffrax": lambda: _diffrax(adaptive=True, gradient=True),
    "gradient of solve, fixed step": lambda: _gradient_of_solve(step=0.05),
    "gradient of solve, fixed step: diffrax": lambda: _diffrax(adaptive=False, gradient=True),
    "gradient of solve, fixed step: by hand": lambda: _hand("gradient of rk4"),
    "gradient of sliding, one input": lambda: _gradient_of_solve("full", solver="sliding", step=0.05),
    "gradient of sliding": lambda: _gradient_of_solve("vanilla", "relu", solver="sliding", step=0.05),
    "gradient of sliding, batch norm": lambda: _gradient_of_solve(
        "batchnorm", "relu", solver="sliding", step=0.05
    ),
    "kernel, dense with 100 outputs, full": lambda: _kernel("dense, 100 outputs", "full"),
    "kernel, deep, full": lambda: _kernel("dense, deep", "full"),
    "kernel, layer norm, full": lambda: _kernel("layer norm", "full"),
    "kernel, cnn, full": lambda: _kernel("cnn", "full"),
    "kernel, cnn, trace": lambda: _kernel("cnn", "trace"),
    "kernel, resnet, full": lambda: _kernel("resnet", "full"),
    "kernel, transformer, full": lambda: _kernel("transformer", "full"),
    "kernel, recurrent, full": lambda: _kernel("recurrent", "full"),
    "kernel, cnn of 64 channels, full": lambda: _kernel("cnn, 64 channels", "full"),
    "kernel, convnext, full": lambda: _kernel("convnext", "full"),
    "kernel, vit, full": lambda: _kernel("vit", "full"),
    "sweep": _sweep,
}


if __name__ == "__main__":
    sys.stdout.write(json.dumps(_measure(sys.argv[1])))
