"""Descriptions of functions and objects, by which a store knows whether a run is the same: code, values, sources."""

import functools
import importlib
import sys
import textwrap

import jax
import jax.numpy as jnp
import pytest

import meanflow as mf
from meanflow import _identity as identity
from meanflow._identity import describe, difference

MODULES = {
    "laws": """
        import helper_module
        from helper_module import imported
        from constant_module import SIZE
        import constant_module

        TABLE = {"size": 1.0}
        NUMBERS = [1.0, 2.0]

        class Callable:
            FACTOR = 1.0

            def __init__(self, size):
                self.size = size

            def __call__(self, key, sigma):
                return self.size * self.FACTOR * sigma

        class Child(Callable):
            pass

        class Record:
            def value(self):
                return 1.0

        RECORD = Record()

        def by_import(key, sigma):
            return imported(sigma)

        def by_module(key, sigma):
            return helper_module.inner(sigma)

        def by_constant(key, sigma):
            return SIZE * sigma

        def by_module_constant(key, sigma):
            return constant_module.OTHER * sigma

        def by_table(key, sigma):
            return TABLE["size"] * sigma

        def by_list(key, sigma):
            return NUMBERS[0] * sigma

        def by_class(key, sigma):
            return Callable(1.0)(key, sigma)

        def by_object(key, sigma):
            return RECORD.value() * sigma

        def by_default(key, sigma, size=2.0):
            return size * sigma

        called = Callable(1.0)
        child = Child(1.0)
    """,
    "helper_module": """
        def inner(sigma):
            return 1.0 * sigma

        def imported(sigma):
            return inner(sigma)
    """,
    "constant_module": "SIZE = OTHER = 1.0",
}
KINDS = {
    "by_import": ("helper_module", "1.0 * sigma", "2.0 * sigma"),
    "by_module": ("helper_module", "1.0 * sigma", "2.0 * sigma"),
    "by_constant": ("constant_module", "1.0", "2.0"),
    "by_module_constant": ("constant_module", "1.0", "2.0"),
    "by_table": ("laws", '{"size": 1.0}', '{"size": 2.0}'),
    "by_list": ("laws", "[1.0, 2.0]", "[2.0, 2.0]"),
    "by_class": ("laws", "self.size * self", "2 * self.size * self"),
    "by_object": ("laws", "return 1.0", "return 2.0"),
    "by_default": ("laws", "size=2.0", "size=3.0"),
    "called": ("laws", "self.size * self", "2 * self.size * self"),
    "child": ("laws", "FACTOR = 1.0", "FACTOR = 2.0"),
}


@pytest.fixture
def modules(tmp_path, monkeypatch):
    """Three modules of a user, and a function that loads them after a change of one."""
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)

    def fresh(changed=None, old="", new=""):
        for name, text in MODULES.items():
            text = textwrap.dedent(text)
            assert name != changed or old in text
            (tmp_path / f"{name}.py").write_text(text.replace(old, new) if name == changed else text)
            sys.modules.pop(name, None)
        importlib.invalidate_caches()
        identity.is_library.cache_clear()
        return importlib.import_module("laws")

    yield fresh
    for name in MODULES:
        sys.modules.pop(name, None)


@pytest.mark.parametrize("kind", KINDS)
def test_changed_code_is_another_description(modules, kind):
    before = describe(getattr(modules(), kind))
    assert describe(getattr(modules(), kind)) == before  # the same code, loaded again
    assert describe(getattr(modules(*KINDS[kind]), kind)) != before


def test_a_change_that_a_function_does_not_reach_does_not_matter(modules):
    before = describe(modules().by_table)
    assert describe(modules("laws", "self.size * self", "2 * self.size * self").by_table) == before
    assert describe(modules("helper_module", "1.0 * sigma", "2.0 * sigma").by_table) == before


def test_rules_of_derivatives_and_decorators_belong_to_a_function():
    def rule(factor):
        @jax.custom_jvp
        def f(x):
            return x

        f.defjvp(lambda primals, tangents: (primals[0], factor * tangents[0]))
        return f

    def decorated(factor):
        def inner(x):
            return x

        @functools.wraps(inner)
        def outer(x):
            return factor * inner(x)

        return outer

    for make in (rule, decorated, lambda c: jax.jit(lambda x: c * x), lambda c: functools.partial(pow, c)):
        assert describe(make(2.0)) == describe(make(2.0)) != describe(make(3.0))


def test_libraries_are_described_by_name_and_by_what_they_hold():
    import optax

    assert describe(optax.sgd(0.1)) == describe(optax.sgd(0.1)) != describe(optax.sgd(0.2))
    assert describe(jnp.sin) == describe(jnp.sin) != describe(jnp.cos)
    assert describe(mf.Cloud) == "meanflow.measures._cloud.Cloud"


def test_the_digest_of_the_source_follows_the_files(tmp_path, monkeypatch):
    (tmp_path / "meanflow").mkdir()
    monkeypatch.setattr(identity, "__file__", str(tmp_path / "meanflow" / "_identity.py"))
    seen = set()
    for name, text in (("a.py", "1"), ("a.py", "2"), ("b.py", ""), ("note.txt", "not code")):
        (tmp_path / "meanflow" / name).write_text(text)
        seen.add(identity.source_digest.__wrapped__())
    assert len(seen) == 3


class Law:
    """An initial law with a parameter, as a user would write it."""

    def __init__(self, size):
        self.size = size

    def draw(self, key, width):
        return self.size * width


FACTOR = 2.0


def helper(width):
    return FACTOR * width


def uses_a_helper(key, width):
    return helper(width)


def test_descriptions_follow_parameters_helpers_and_constants(monkeypatch):
    assert describe(Law(1.0).draw) == describe(Law(1.0).draw) != describe(Law(2.0).draw)
    assert describe(Law(1.0)) != describe(Law(2.0))
    loop = Law(1.0)
    loop.own = loop.draw  # refers to itself
    assert "recursive" in str(describe(loop))
    before = describe(uses_a_helper)
    assert describe(uses_a_helper) == before
    monkeypatch.setitem(globals(), "FACTOR", 3.0)
    assert describe(uses_a_helper) != before
    monkeypatch.undo()
    monkeypatch.setitem(globals(), "helper", lambda width: 3 * width)
    assert describe(uses_a_helper) != before


def test_descriptions_follow_the_code_not_the_place():
    def scaled(c):
        return lambda key, width: c * width

    def the_same(c):
        return lambda key, width: c * width

    strip = lambda f: describe(f).split(":")[1]
    assert strip(scaled(2.0)) == strip(the_same(2.0))
    assert strip(scaled(2.0)) != strip(scaled(3.0))
    assert strip(lambda key: key + 1) != strip(lambda key: key + 2)
    assert describe(mf.KernelStep(0.1)) != describe(mf.KernelStep(0.2))
    assert describe(mf.vanilla("relu")) != describe(mf.vanilla("tanh"))
    assert difference({"a": 1, "b": {"c": 2}}, {"a": 1, "b": {"c": 3}}) == ["b.c: 2 in the store, 3 now"]
