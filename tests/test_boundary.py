"""The public boundary: every argument of every public function has a declared kind, and bad values are refused by name.

The kinds themselves are in ``meanflow/_boundary.py``. Bad values are drawn from a pool for every argument of every
exported function. Some of the pool must be refused by whatever kind an argument has (``test_no_kind_is_too_weak``);
for the others the kind says whether they are bad, and the call must then refuse them in the words of the kind, with the
name of the argument, before anything is compiled.
"""

import functools
import importlib
import importlib.util
import inspect
import logging
import pathlib
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import meanflow as mf

ROOT = pathlib.Path(__file__).parent.parent
spec = importlib.util.spec_from_file_location("names", ROOT / "docs" / "names.py")
names = importlib.util.module_from_spec(spec)
spec.loader.exec_module(names)

# steps of larger computations, which judge NaN themselves; and knots, which neurons without one have at NaN
PASS_NAN_ON = {
    *("on_sample_share", "concentration"),
    *("Stack.lower", "Stack.upper", "Stack.__call__", "ResNet.states"),
}
CLASSES = {"record", "chart", "dtype"}  # arguments that are classes


def exported():
    """Everything that is exported, by its path: functions, classes and modules, each once."""
    found = {}
    for room in names.ROOMS:
        package = importlib.import_module(f"meanflow.{room}")
        for public in names.exported(f"meanflow.{room}"):
            found[public.path] = getattr(package, public.name)
    return found


def own(value, module):
    """Whether a function or class is defined in this module, and not imported into it."""
    return getattr(value, "__module__", None) == module.__name__


def functions():
    """Every exported function once, and every public function of an exported module, by path."""
    found = {}
    for path, value in exported().items():
        if inspect.isfunction(value):
            found[path] = value
        if inspect.ismodule(value):
            for name, one in vars(value).items():
                if inspect.isfunction(one) and own(one, value) and not name.startswith("_"):
                    found[f"{path}.{name}"] = one
    # kinds of arguments are functions (name, value) themselves
    return {
        path: f for path, f in found.items() if list(inspect.signature(f).parameters)[:2] != ["name", "value"]
    }


def classes():
    """Every exported class once, and every public class of an exported module, by path."""
    found = {path: value for path, value in exported().items() if inspect.isclass(value)}
    for path, value in exported().items():
        if inspect.ismodule(value):
            found |= {
                f"{path}.{name}": one
                for name, one in vars(value).items()
                if inspect.isclass(one) and own(one, value) and not name.startswith("_")
            }
    return found


def methods():
    """Constructors and methods that declare kinds, by path; a method is called on None, which it must not reach."""
    found = {}
    for path, value in classes().items():
        for name, one in vars(value).items():
            one = one.__func__ if isinstance(one, classmethod) else one
            one = inspect.unwrap(one, stop=lambda f: hasattr(f, "kinds")) if callable(one) else one
            if hasattr(one, "kinds") and (not name.startswith("_") or name in ("__init__", "__call__")):
                found[f"{path}.{name}"] = functools.partial(one, None)
                found[f"{path}.{name}"].kinds = one.kinds
    return found


FUNCTIONS = functions()
DECLARED = FUNCTIONS | methods()
ARGUMENTS = [
    (path, name)
    for path, f in DECLARED.items()
    for name, p in inspect.signature(f).parameters.items()
    if p.kind is not p.VAR_KEYWORD and name in f.kinds()
]

# classes whose constructors check their arguments in their own words, or that users do not make
OTHER_CONSTRUCTORS = {
    "particles of clouds, which Cloud checks": ("Affine", "Neurons", "Polar"),
    "checked together in __init__, tested in test_nothing_silent": (
        *(
            "Cloud",
            "Dataset",
            "BatchNormManifold",
            "ConstantStep",
            "GaussianPopulation",
            "KernelStep",
            "Normalized",
        ),
    ),
    "abstract, or without arguments": (
        *("Space", "Feature", "Observable", "Stepper", "StepRule"),
        *("FailedRun", "RESULTS"),
    ),
    "made by functions of this package": (
        "Flow",
        "Chart",
        "Solution",
        "DensitySolution",
        "Data",
        "PiecewiseLinear",
    ),
}


def kind_of(path, name):
    return DECLARED[path].kinds()[name]


def is_unchecked(kind):
    return hasattr(kind, "reason")


def pool():
    """Values of every sort that users pass by mistake, by name; the random ones are always the same."""
    rng = np.random.default_rng(0)
    flow = mf.vanilla("tanh")
    values = {
        "None": None,
        "text": "bogus",
        "no text": "",
        "bytes": b"bogus",
        "object": object(),
        "class": dict,
        "class of flows": mf.Flow,
        "class of clouds": mf.Cloud,
        "uncalled constructor": mf.vanilla,
        "not a number": float("nan"),
        "infinity": float("inf"),
        "minus infinity": float("-inf"),
        "complex number": 1 + 2j,
        "negative": -3,
        "negative fraction": -0.5,
        "zero": 0,
        "fraction": 2.5,
        "huge integer": 10**13,
        "huge number": 1e300,
        "true": True,
        "empty list": [],
        "empty dict": {},
        "empty array": np.zeros(0),
        "empty matrix": np.zeros((0, 2)),
        "ragged": [[1.0], [2.0, 3.0]],
        "list of texts": ["a", "b"],
        "list of None": [None, None],
        "dict of None": {"a": None},
        "dict of texts": {1: "a"},
        "set": {1, 2},
        "array of texts": np.array(["a", "b"]),
        "array of objects": np.array([object(), None]),
        "five axes": np.ones((2, 1, 2, 1, 2)),
        "asymmetric": np.array([[1.0, 0.9], [0.1, 1.0]]),
        "indefinite": np.array([[1.0, 2.0], [2.0, 1.0]]),
        "singular": np.ones((2, 2)),
        "not square": np.ones((2, 3)),
        "zeros": np.zeros((3, 2)),
        "decreasing": np.array([3.0, 2.0, 1.0]),
        "negative entries": -np.ones((3,)),
        "flow": flow,
        "cloud": mf.Cloud(mf.Neurons(np.ones(3), np.ones((3, 2)))),
        "univariate cloud": mf.Cloud(mf.Polar(np.ones(3), np.ones(3))),
        "bare particles": mf.Neurons(np.ones(3), np.ones((3, 2))),
        "data": mf.Dataset(np.ones((4, 2)), np.ones(4)),
        "key": jax.random.key(0),
        "batch of keys": jax.random.split(jax.random.key(0), 3),
        "raw key": np.zeros(2, np.uint32),
    }
    for rank in range(1, 4):
        shape = tuple(int(n) for n in rng.integers(2, 5, rank))
        whole = rng.normal(size=shape)
        for name, bad in (("NaN", np.nan), ("infinity", np.inf)):
            broken = whole.copy()
            broken.flat[rng.integers(broken.size)] = bad
            values[f"{name} among {rank} axes"] = broken
        values[f"complex with {rank} axes"] = whole + 1j
        values[f"as jax array: complex with {rank} axes"] = jnp.asarray(whole + 1j)
    return values


POOL = pool()


def refusal(kind, name, value):
    """The message with which the kind refuses the value, or None."""
    try:
        kind(name, value)
    except (TypeError, ValueError) as problem:
        return str(problem)
    return None


def test_every_argument_declares_its_kind():
    missing = {}
    for path, f in FUNCTIONS.items():
        declared = f.kinds() if hasattr(f, "kinds") else {}
        lacking = [name for name in inspect.signature(f).parameters if name not in declared]
        if lacking:
            missing[path] = lacking
    assert not missing
    assert len(FUNCTIONS) > 90 and len(DECLARED) > 130


def test_every_constructor_declares_its_kinds_or_is_known_to_check_otherwise():
    other = {name for listed in OTHER_CONSTRUCTORS.values() for name in listed}
    found = {path: value for path, value in classes().items() if not hasattr(value.__init__, "kinds")}
    assert {path.rpartition(".")[2] for path in found} == other
    for path, value in classes().items():
        kinds = getattr(value.__init__, "kinds", None)
        if kinds is not None:
            parameters = [p for p in inspect.signature(value.__init__).parameters if p != "self"]
            assert set(kinds()) >= set(parameters), path


def test_whatever_is_not_checked_says_why():
    unchecked = [
        (inspect.signature(f).parameters[name], kind.reason)
        for f in DECLARED.values()
        for name, kind in f.kinds().items()
        if is_unchecked(kind)
    ]
    assert all(len(reason) > 15 for _, reason in unchecked)
    # further arguments by name are passed on to what checks them
    assert sum(parameter.kind is not parameter.VAR_KEYWORD for parameter, _ in unchecked) < 12


@pytest.mark.bad_input
def test_no_kind_is_too_weak():
    """Some values are bad for every argument, whatever its kind says."""
    accepted = []
    for path, name in ARGUMENTS:
        kind = kind_of(path, name)
        if is_unchecked(kind):
            continue
        bad = ["object", "complex number", "array of objects", "list of None", "dict of texts"]
        bad += [f"complex with {rank} axes" for rank in (1, 2, 3)]
        passes = any(path.endswith(f".{name}") for name in PASS_NAN_ON)
        if ".plots." not in path and not passes:  # NaN leaves a gap in a curve
            bad += [f"NaN among {rank} axes" for rank in (1, 2, 3)] + ["not a number"]
        if name not in CLASSES:
            bad += ["class", "class of flows", "class of clouds"]
        parameter = inspect.signature(DECLARED[path]).parameters[name]
        if parameter.default is not None and "None" not in re.sub(r"\(.*\)", "", str(parameter.annotation)):
            bad += ["None"]
        accepted += [(path, name, value) for value in bad if refusal(kind, name, POOL[value]) is None]
    assert not accepted


@pytest.mark.bad_input
def test_bad_values_are_refused_by_name_before_anything_is_compiled(caplog):
    cases = [
        (path, name, label, words)
        for path, name in ARGUMENTS
        for label, value in POOL.items()
        if (words := refusal(kind_of(path, name), name, value)) is not None
    ]
    wrong = []
    with jax.log_compiles(), caplog.at_level(logging.WARNING):
        for path, name, label, words in cases:
            try:
                DECLARED[path](**{name: POOL[label]})
                wrong.append((path, name, label, "accepted"))
            except (TypeError, ValueError) as problem:
                if str(problem) != words or name not in words or len(words) > 1500:
                    wrong.append((path, name, label, str(problem)))
            except Exception as problem:
                wrong.append((path, name, label, repr(problem)))
    compiled = [r.getMessage()[:120] for r in caplog.records if "ompiling" in r.getMessage()]
    assert not wrong
    assert not compiled
    assert len(cases) >= 5000, (
        f"{len(cases)} cases for {len(ARGUMENTS)} arguments of {len(DECLARED)} functions"
    )


def mismatches():
    """Whole calls whose arguments are each of the right kind but do not fit together, with the words of the refusal."""
    key = jax.random.key(0)
    rng = np.random.default_rng(0)
    x, y, wide, line = (
        rng.normal(size=(4, 2)),
        rng.normal(size=(5, 2)),
        rng.normal(size=(4, 3)),
        np.arange(4.0),
    )
    polar, plane = POOL["univariate cloud"], POOL["cloud"]
    some = {"r": mf.measures.laws.uniform(), "theta": mf.measures.laws.angle()}
    data, flow = POOL["data"], POOL["flow"]
    t, d, g = mf.transport, mf.depth, mf.geometry
    return [
        (lambda: mf.Cloud.stack([polar, plane]), "clouds must hold particles of one kind"),
        (
            lambda: mf.measures.quadrature((3, 3), mf.Polar, some, rule=("gauss",)),
            "rule must be one name, or 2",
        ),
        (lambda: mf.measures.quadrature((3,), mf.Polar, some), "counts must list 2"),
        (lambda: mf.measures.sample(key, 3, mf.Neurons, some), "laws must name the coordinates"),
        (lambda: mf.measures.sample(key, 3, mf.Polar, some, labels=[1.0, 2.0]), "labels must have shape"),
        (lambda: g.project(polar, np.eye(2)), "cloud must hold Neurons"),
        (lambda: g.project(plane, np.eye(3)), "covariance must have shape"),
        (lambda: g.distance(x, wide), "other must have as many columns as bb"),
        (lambda: mf.flows.certificate(flow, polar, data), "cloud must hold Neurons"),
        (lambda: mf.energy(flow, polar, data), "particles must be"),
        (lambda: mf.solve(flow, plane, data, 1.0, ts=[0.5, 0.2]), "ts must increase"),
        (lambda: mf.solve(flow, plane, data, -1.0), "t1 must"),
        (lambda: t.wasserstein(x, wide), "x and y must have points of the same shape"),
        (lambda: t.wasserstein(x, y, weights_x=np.ones(3)), "weights_x must have shape"),
        (lambda: t.transport_plan(x, y, weights_y=np.zeros(5)), "weights_y must have a positive sum"),
        (lambda: t.sinkhorn_divergence(x, wide), "x and y must have shapes"),
        (lambda: t.sinkhorn_divergence(x, y, weights_x=np.ones(3)), "weights_x must have shape"),
        (lambda: t.sliced_wasserstein(x, wide, key=key), "x and y must have shapes"),
        (lambda: t.ics(x, y), "before and after must have equal shapes"),
        (lambda: d.propagate(key, np.ones((2, 3, 4)), [5]), "x must be"),
        (lambda: d.expected_gram(np.eye(3), 2, d.Layer(weights="uniform")), "layer.weights must be"),
        (lambda: mf.plots.plane(line, line[:2]), "theta must have shape"),
        (lambda: mf.plots.fit(line, {"f": line[:2]}, None), "must have 4 values like x"),
        (lambda: mf.plots.traces(line, {"f": x}), "must have 4 values like x"),
        (lambda: mf.sweep(flow, data, widths=[2], compute=False), "exactly one of t1 and steps"),
        (lambda: mf.sweep(flow, data, widths=[2], steps=2, step=0.1, bogus=1), "must be among"),
        (lambda: mf.kernels.infinite_width(lambda p, x: x @ p, y, x, variances=(1.0,)), "like params"),
        (lambda: mf.kernels.infinite_width(lambda p, x: x @ p, y, x), "variances must be given"),
    ]


@pytest.mark.bad_input
@pytest.mark.parametrize("number", range(len(mismatches())))
def test_arguments_that_do_not_fit_together(number):
    call, words = mismatches()[number]
    with pytest.raises((TypeError, ValueError), match=words):
        call()
