"""Losses l(f, y) of a prediction f, a number or a row of k numbers, and a target y, with derivatives in f."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

from meanflow import _boundary
from meanflow._boundary import choice, either, taking
from meanflow._module import Module
from meanflow._reuse import canonical

LossFunction = Callable[[jax.Array, jax.Array], jax.Array]


def squared(f: jax.Array, y: jax.Array) -> jax.Array:
    """(f - y)^2 / 2."""
    return 0.5 * (f - y) ** 2


def logistic(f: jax.Array, y: jax.Array) -> jax.Array:
    """log(1 + exp(-y f)) for labels y = -1 or 1."""
    return jax.nn.softplus(-y * f)


def huber(f: jax.Array, y: jax.Array) -> jax.Array:
    """|f - y|^2 / 2 up to |f - y| = 1, then linear."""
    gap = jnp.abs(f - y)
    return jnp.where(gap <= 1, 0.5 * gap**2, gap - 0.5)


def softmax(f: jax.Array, y: jax.Array) -> jax.Array:
    """Cross-entropy -sum_c y_c log softmax(f)_c of a row f (k,) with probabilities y (k,), or with a class number y."""
    if y.ndim:
        return -jnp.sum(y * jax.nn.log_softmax(f))
    # log(1 + sum over the other classes of exp(f_c - f_y)), precise however small it is: as the log of a softmax it
    # would be 0, and its slope in f_y too, once the right class leads by 37; then a flow on the normalized clock, on
    # which such leads are reached, would go astray
    if f.shape[-1] == 1:
        return jnp.zeros((), f.dtype)
    right = jnp.arange(f.shape[-1]) == y.astype(int)
    lead = jnp.sum(jnp.where(right, f, 0.0))
    return jax.nn.softplus(jax.nn.logsumexp(f - lead, where=~right))


ELEMENTWISE: dict[str, LossFunction] = {"squared": squared, "logistic": logistic, "huber": huber}
NAMED: dict[str, LossFunction] = {**ELEMENTWISE, "softmax": softmax}


class Loss(Module):
    """A loss by name, or any callable.

    ``"squared"``, ``"logistic"`` and ``"huber"`` are summed over the outputs of a network, ``"softmax"`` compares k
    outputs with a class. A callable (f, y) -> loss is elementwise for networks with one output; for k outputs it is
    called on rows, f (k,) and y () or (k,), and returns one number.
    """

    function: LossFunction = eqx.field(static=True)

    def __init__(self, loss: "str | LossFunction | Loss") -> None:
        if isinstance(loss, Loss):
            loss = loss.function
        if not callable(loss):
            _boundary.one_of("loss", loss, NAMED)
            loss = NAMED[loss]
        self.function = canonical(loss)

    @property
    def classifies(self) -> bool:
        """Whether targets are classes and outputs their scores."""
        return self.function is softmax

    @property
    def labels(self) -> bool:
        """Whether targets tell classes apart, as numbers -1 and 1 or as classes."""
        return self.classifies or self.function is logistic

    def outputs(self, y: jax.Array | np.ndarray) -> int | None:
        """Return how many outputs a network needs for targets ``y``: k, or None for one without an axis."""
        if y.ndim == 2:
            return y.shape[1]
        known = _boundary.concrete(y) if self.classifies else None
        return None if known is None else int(known.max()) + 1

    def check(self, outputs: tuple[int, ...], y: jax.Array) -> None:
        """Raise ValueError if the targets do not fit predictions of shape ``outputs``, () or (k,)."""
        rows, each = (y.shape[0], *outputs), self.function in ELEMENTWISE.values()
        if self.classifies and not outputs:
            raise ValueError(
                "loss='softmax' needs a network with k outputs: particles.a of shape (m, k), "
                "for instance of flow.init(..., outputs=k)"
            )
        if outputs and each and y.shape != rows:
            raise ValueError(
                f"y must have shape {rows}, one target for each of the {outputs[0]} outputs, got {y.shape}; "
                "jax.nn.one_hot turns class numbers into such rows"
            )
        _boundary.shape("y", y, *dict.fromkeys((rows[:1], rows)))
        # targets come to the host for the losses that ask more of them than a shape
        known = _boundary.concrete(y) if self.classifies or self.function is logistic else None
        if self.classifies and known is not None:
            _check_classes(known, outputs[0])
        elif not each and not self.classifies:
            self._check_values(rows, y)
        elif known is not None and np.any(np.abs(known) != 1):
            raise ValueError(
                f"y must be -1 or 1 for loss='logistic', got {known[np.abs(known) != 1][0]:g}; 2 * y - 1 maps labels "
                "0 and 1 to these"
            )

    def _check_values(self, rows: tuple[int, ...], y: jax.Array) -> None:
        """Raise ValueError unless the user's function returns one real number for each sample."""
        f = jax.ShapeDtypeStruct(rows, y.dtype)
        found = jax.eval_shape(self, f, jax.ShapeDtypeStruct(y.shape, y.dtype))
        if getattr(found, "shape", None) != rows[:1] or not _boundary.is_real(found.dtype):
            raise ValueError(f"loss must return one real number for each of {rows[0]} samples, got {found}")

    def __call__(self, f: jax.Array, y: jax.Array) -> jax.Array:
        """l(f, y) of each sample, (n,), for predictions f (n,) or (n, k)."""
        if f.ndim == 1:
            return self.function(f, y)
        return jax.vmap(self._row)(f, y)

    def slope(self, f: jax.Array, y: jax.Array) -> jax.Array:
        """l'(f, y), the derivative in f, of the shape of f."""
        if f.ndim == 1:
            return jax.jvp(lambda g: self.function(g, y), (f,), (jnp.ones_like(f),))[1]
        return jax.vmap(jax.grad(self._row))(f, y)

    def curvature(self, f: jax.Array, y: jax.Array) -> jax.Array:
        """l''(f, y), the second derivative in f: (n,), or (n, k, k) for f (n, k)."""
        if f.ndim == 1:
            return jax.jvp(lambda g: self.slope(g, y), (f,), (jnp.ones_like(f),))[1]
        return jax.vmap(jax.hessian(self._row))(f, y)

    def _row(self, f: jax.Array, y: jax.Array) -> jax.Array:
        """Return the loss of one sample, f (k,)."""
        value = self.function(f, y)
        if self.function in ELEMENTWISE.values():
            return jnp.sum(value)
        if jnp.shape(value) != ():
            raise ValueError(
                f"loss must return one number for a row of {f.shape[0]} outputs, got shape {jnp.shape(value)}"
            )
        return value


def _check_classes(y: np.ndarray, count: int) -> None:
    """Refuse targets that are neither class numbers below ``count`` nor rows of probabilities."""
    if y.ndim == 1 and (np.any(y != np.round(y)) or y.min() < 0 or y.max() >= count):
        raise ValueError(
            f"y must hold classes 0 to {count - 1} for {count} outputs, got values from {y.min():g} to {y.max():g}"
        )
    if y.ndim == 2 and (y.min() < 0 or np.max(np.abs(y.sum(axis=1) - 1)) > 1e-3):
        raise ValueError("y must hold rows of probabilities, which sum to 1, for loss='softmax'")


AnyLoss = Annotated[str | LossFunction | Loss, either(choice(*NAMED), taking(2))]  # a Loss can be called too
