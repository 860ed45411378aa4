"""``checked`` reads the kinds of arguments from their annotations, once, when the function is first called."""

from __future__ import annotations

import inspect
import pydoc
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, ClassVar, TypedDict, Unpack

import equinox as eqx
import jax
import numpy as np
import pytest
from jaxtyping import Array, ArrayLike, Float, Real

import meanflow as mf
from meanflow import _boundary
from meanflow._boundary import (
    Count,
    FilePath,
    Natural,
    Number,
    Positive,
    PRNGKey,
    checked,
    choice,
    count,
    unchecked,
)


def reads(annotation):
    return _boundary.kind_of(annotation)


@pytest.mark.parametrize(
    ("annotation", "good", "bad", "words"),
    [
        (Annotated[int, count(2)], 2, 1, "u must be an integer >= 2, got 1"),
        (Count, 3, 0, "u must be an integer >= 1"),
        (Count | None, None, 0, "u must be an integer >= 1"),
        (Natural, 0, -1, "u must be an integer >= 0"),
        (Positive, 0.5, 0.0, "u must be > 0"),
        (FilePath, "a", 3, "u must be a path"),
        (PRNGKey, jax.random.key(0), 0, "u must be a single PRNG key"),
        (bool, True, 1, "u must be True or False"),
        (str, "a", 1, "u must be a string"),
        (str | None, None, 1, "u must be a string"),
        (
            Annotated[str, choice("a", "b")] | Number,
            1.0,
            "c",
            r"u must be one of \[.a., .b.\] or a number, got .c.",
        ),
        (Callable[[int, int], int], max, lambda x: x, "u must be a function of 2 arguments"),
        (Callable[..., int], max, 1, "u must be a function"),
        (Sequence[Count], [1, 2], [1, 0], r"u\[1\] must be an integer >= 1"),
        (tuple[Count, ...], (1, 2), 3, "u must be a sequence"),
        (Mapping[str, Count], {"a": 1}, {"a": 0}, r"u\['a'\] must be an integer >= 1"),
        (Float[ArrayLike, "n d"], np.ones((2, 3)), np.ones(2), r"u must have 2 axes, got shape \(2,\)"),
        (Float[ArrayLike, "n d"] | None, None, np.ones(2), r"u must have 2 axes, got shape \(2,\)"),
        (
            Real[Array, "n 2"],
            np.ones((3, 2)),
            np.ones((3, 3)),
            r"must have shape \(any length, 2\), got shape \(3, 3\)",
        ),
        (Float[Array, "*batch d"], np.ones((2, 3)), 1.0, "u must have at least 1 axes"),
        (Float[ArrayLike, "..."], 1.0, [], "u must not be empty"),
        (Real[ArrayLike, ""], 1.0, [1.0], "u must be a number"),
        (mf.Flow, mf.vanilla("tanh"), mf.vanilla, "u must be a Flow"),
        (
            inspect.Parameter,
            inspect.Parameter("a", inspect.Parameter.KEYWORD_ONLY),
            "a",
            "u must be a Parameter",
        ),
    ],
)
def test_annotations_stand_for_kinds(annotation, good, bad, words):
    kind = reads(annotation)
    kind("u", good)
    with pytest.raises((ValueError, TypeError), match=words):
        kind("u", bad)


@pytest.mark.parametrize("annotation", [int, float, Any, jax.Array, tuple[int, int], int | None])
def test_annotations_without_a_kind_are_refused(annotation):
    with pytest.raises(TypeError, match="does not say what is allowed"):
        reads(annotation)


class Options(TypedDict, total=False):
    rate: Positive
    names: Sequence[str]


class Base(eqx.Module):
    size: Count
    table: ClassVar[int] = 3


@checked
class Layer(Base):
    law: Annotated[str, choice("a", "b")] = "a"


class Runner:
    @checked
    def run(self, steps: Count, *, flow: mf.Flow | None = None) -> Missing:
        return steps

    @classmethod
    @checked
    def load(cls, path: FilePath, **options: Unpack[Options]) -> int:
        return path, options


@checked
def draw(
    key: PRNGKey, width: Count, scale: Positive = 1.0, law: Annotated[str, choice("a", "b")] = "a"
) -> jax.Array:
    """Draw."""
    return scale * jax.random.normal(key, (width,))


def test_arguments_are_handed_over_as_their_kinds_return_them():
    assert draw(jax.random.key(0), np.int64(2)).shape == (2,)
    assert Runner().run(3) == 3
    path, options = Runner.load("x", rate=2.0)
    assert path.name == "x" and options == {"rate": 2.0}
    assert Layer(2, law="b").size == 2


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: draw(jax.random.key(0), 0), "width must be an integer >= 1, got 0"),
        (lambda: draw(jax.random.key(0), 1, law="c"), "law must be one of"),
        (lambda: Runner().run(0), "steps must be"),
        (lambda: Runner().run(1, flow=3), "flow must be a Flow.*build one by calling a constructor"),
        (lambda: Runner.load(3), "path must be a path"),
        (lambda: Runner.load("x", rate=-1.0), "rate must be > 0"),
        (lambda: Layer(0), "size must be an integer >= 1"),
        (lambda: Layer(1, "c"), "law must be one of"),
    ],
)
def test_bad_arguments_are_refused_by_name(call, words):
    with pytest.raises((ValueError, TypeError), match=words):
        call()


def test_python_says_itself_what_is_missing_or_too_much():
    with pytest.raises(TypeError, match="missing 1 required positional argument: 'width'"):
        draw(jax.random.key(0))
    with pytest.raises(TypeError, match="takes from 2 to 4 positional arguments but 5 were given"):
        draw(jax.random.key(0), 1, 1.0, "a", 3)


def test_kinds_can_be_read_and_are_resolved_when_they_are():
    known = []

    def kind(name, value):
        known.append(name)
        return value

    @checked
    def later(u: Annotated[int, unchecked("a kind that is read late")], v: Defined) -> None: ...

    globals()["Defined"] = Annotated[int, kind]
    assert list(later.kinds()) == ["u", "v"]
    later(1, v=2)
    assert known == ["v"]
    assert set(Layer.__init__.kinds()) == {"size", "law"}
    assert set(Runner.load.kinds()) == {"path", "options", "rate", "names"}


def test_an_argument_without_a_kind_is_an_error_that_names_it():
    @checked
    def bare(u, v: int = 3): ...

    with pytest.raises(TypeError, match="bare must annotate u by its kind"):
        bare(1)


def test_help_shows_annotations_as_they_are_written():
    assert "draw(key: PRNGKey, width: Count, scale: Positive = 1.0, law: Annotated[str" in pydoc.plain(
        pydoc.render_doc(draw)
    )
