"""What this package takes for granted about other libraries beyond what they document.

Each test names one assumption and the module that rests on it. When a new release of jax, diffrax, flax or equinox
breaks something, this file says what, and where to look.
"""

import inspect

import diffrax
import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.extend.core import ClosedJaxpr, jaxpr_as_fun

from meanflow.kernels._empirical.visit import carried_arguments


def equations(function, *arguments):
    """The equations of a traced function by the names of their primitives, the last one of each name."""
    return {e.primitive.name: e for e in jax.make_jaxpr(function)(*arguments).jaxpr.eqns}


SQUARE, IMAGE, KERNEL = jnp.ones((3, 3)), jnp.ones((1, 4, 4, 2)), jnp.ones((3, 3, 2, 5))


def convolve(x, w):
    return jax.lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))


# kernels/empirical/sites.py, forms.py and cost.py find what a network does with a parameter by these names and options
PRIMITIVES = {
    "dot_general": (jnp.matmul, (SQUARE, SQUARE), ("dimension_numbers",)),
    "conv_general_dilated": (
        convolve,
        (IMAGE, KERNEL),
        ("dimension_numbers", "feature_group_count", "batch_group_count", "window_strides", "padding")
        + ("lhs_dilation", "rhs_dilation"),
    ),
    "gather": (
        lambda w, i: w.at[i].get(mode="clip"),
        (SQUARE, jnp.array([0, 2])),
        ("dimension_numbers", "slice_sizes", "mode"),
    ),
    "scan": (
        lambda w: jax.lax.scan(lambda h, _: (h @ w, None), w, None, length=2)[0],
        (SQUARE,),
        ("jaxpr", "length", "reverse", "unroll"),
    ),
    "transpose": (jnp.transpose, (SQUARE,), ("permutation",)),
    "reshape": (lambda w: w.reshape(9), (SQUARE,), ("dimensions",)),
    "broadcast_in_dim": (
        lambda w: jnp.broadcast_to(w, (2, 3, 3)),
        (SQUARE,),
        ("broadcast_dimensions",),
    ),
    "convert_element_type": (lambda w: w.astype(jnp.float32), (SQUARE,), ("new_dtype",)),
    "squeeze": (lambda w: jnp.squeeze(w[None]), (SQUARE,), ()),
    "mul": (lambda w: 2.0 * w, (SQUARE,), ()),
    "div": (lambda w: w / 2.0, (SQUARE,), ()),
    "neg": (lambda w: -w, (SQUARE,), ()),
    "custom_jvp_call": (jax.nn.relu6, (SQUARE,), ("call_jaxpr",)),
}


@pytest.mark.parametrize("name", PRIMITIVES)
def test_jax_names_primitives_and_their_options(name):
    function, arguments, options = PRIMITIVES[name]
    found = equations(function, *arguments)
    if name not in found:  # behind one call
        (call,) = (e for e in found.values() if "jaxpr" in e.params or "call_jaxpr" in e.params)
        inner = call.params.get("jaxpr", call.params.get("call_jaxpr"))
        found |= {e.primitive.name: e for e in getattr(inner, "jaxpr", inner).eqns}
    assert name in found
    assert set(options) <= set(found[name].params)


def test_ranks_tell_constants_carried_values_and_sequences_of_a_scan_apart():
    """``visit.carried_arguments``: one constant, two carried values, one sequence; one output is stacked."""

    def loop(w, x, y, items):
        body = lambda h, item: ((h[0] @ w + item, h[1] + 1.0), jnp.sum(item))
        return jax.lax.scan(body, (x, y), items)

    found = equations(loop, SQUARE, SQUARE, jnp.zeros(3), jnp.ones((3, 3, 3)))["scan"]
    assert carried_arguments(found) == slice(1, 3)


def test_jax_runs_one_equation_of_a_jaxpr_alone():
    """``visit.execute``: a jaxpr cut down to one equation is a jaxpr, once names of arguments are dropped."""
    jaxpr = jax.make_jaxpr(lambda x, w: jnp.tanh(jnp.sin(x) @ w))(SQUARE, SQUARE).jaxpr
    (product,) = (e for e in jaxpr.eqns if e.primitive.name == "dot_general")
    alone = jaxpr.replace(
        constvars=[],
        invars=list(product.invars),
        outvars=list(product.outvars),
        eqns=[product],
        debug_info=jaxpr.debug_info._replace(arg_names=None, result_paths=None),
    )
    (out,) = jaxpr_as_fun(ClosedJaxpr(alone, []))(SQUARE, 2 * SQUARE)
    np.testing.assert_allclose(out, 6.0)


def solved(**settings):
    return diffrax.diffeqsolve(
        diffrax.ODETerm(lambda t, y, _: -y),
        diffrax.Tsit5(),
        0.0,
        1.0,
        0.1,
        jnp.ones(2),
        saveat=diffrax.SaveAt(
            subs={"series": diffrax.SubSaveAt(t1=True)},
            solver_state=True,
            controller_state=True,
            made_jump=True,
        ),
        stepsize_controller=diffrax.PIDController(rtol=1e-6, atol=1e-8),
        **settings,
    )


class Looking(diffrax.AbstractAdjoint):
    """Hands on to the default adjoint and notes what it was given."""

    seen: list = eqx.field(static=True)

    def loop(self, **given):
        self.seen.append(given)
        return diffrax.RecursiveCheckpointAdjoint().loop(**given)


def test_diffrax_hands_the_room_for_saved_values_to_the_adjoint():
    """``solvers/saving.py``: the loop gets ``saveat`` and a state with the arrays that saved times and values fill."""
    seen = []
    solved(adjoint=Looking(seen))
    assert set(seen[0]["saveat"].subs) == {"series"}
    room = seen[0]["init_state"].save_state["series"]
    assert room.ts.shape == (1,) and room.ys.shape == (1, 2)


def test_diffrax_can_be_asked_for_blank_states():
    """``solvers/continuous.py``: solver and controller make states like those that a run returns, in one order."""
    run = solved()
    names = list(inspect.signature(diffrax.PIDController.init).parameters)
    assert names == ["self", "terms", "t0", "t1", "y0", "dt0", "args", "func", "error_order"]
    assert list(inspect.signature(diffrax.Tsit5.init).parameters) == [
        "self",
        "terms",
        "t0",
        "t1",
        "y0",
        "args",
    ]
    terms, solver, y = diffrax.ODETerm(lambda t, y, _: -y), diffrax.Tsit5(), jnp.ones(2)
    controller = diffrax.PIDController(rtol=1e-6, atol=1e-8)
    _, control = controller.init(terms, 0.0, 1.0, y, 0.1, None, solver.func, solver.error_order(terms))
    blank = solver.init(terms, 0.0, 1.0, y, None), control
    shapes = lambda tree: [jnp.shape(u) for u in jax.tree.leaves(tree)]
    assert shapes(blank) == shapes((run.solver_state, run.controller_state))


def test_flax_merges_into_a_copy_whose_layers_may_change_their_class():
    """``kernels/empirical/nnx_modules.py``: the copy's layers get another class, the user's module keeps its own."""

    class Doubled(nnx.Linear):
        def __call__(self, x):
            return 2 * super().__call__(x)

    model = nnx.Linear(2, 1, rngs=nnx.Rngs(0))
    copy = nnx.merge(*nnx.split(model))
    copy.__class__ = Doubled
    np.testing.assert_allclose(copy(jnp.ones((1, 2))), 2 * model(jnp.ones((1, 2))))
    assert type(model) is nnx.Linear
