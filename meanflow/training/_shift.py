"""How far the outputs of a layer move within an epoch, and their moments up to order 4."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, ArrayLike, Float

from meanflow._boundary import Natural, checked, choice
from meanflow._numerics import safe_divide, safe_sqrt
from meanflow._observable import Observable
from meanflow._reuse import compiled
from meanflow.training._networks import Cuttable, LayerNumber, Network
from meanflow.training.data import Data
from meanflow.transport import ics

Loss = Callable[[jax.Array, jax.Array], jax.Array]
"""(logits, labels) -> scalar mean loss."""


class Training(NamedTuple):
    """What stays the same in a run of a trainer, as its observables see it.

    Attributes:
        data: training and test data.
        loss: (logits, labels) -> number.
        axis: name of the axis over which minibatches are split, or None.
    """

    data: Data
    loss: Loss
    axis: str | None


class FeatureMoments(NamedTuple):
    """Mean, variance, skewness and excess kurtosis, one entry a feature."""

    mean: Float[Array, "*features"]
    variance: Float[Array, "*features"]
    skewness: Float[Array, "*features"]
    kurtosis: Float[Array, "*features"]


def moments(x: Float[ArrayLike, "N ..."]) -> FeatureMoments:
    """Return the population moments over samples (N, ...).

    With c = x - E x they are E x, s^2 = E c^2, E c^3 / s^3 and E c^4 / s^4 - 3. The last two are 0 for a feature that
    is constant.

    >>> print(moments(jnp.array([-1.0, 1.0])).kurtosis)
    -2.0
    """
    x = jnp.asarray(x)
    mean = jnp.mean(x, axis=0, keepdims=True)
    # central moments in two passes, as powers of the standardized deviations
    centered = x - mean
    variance = jnp.mean(jnp.square(centered), axis=0)
    standard = safe_divide(centered, safe_sqrt(variance)[None])
    # 0 for a constant feature, where 0 - 3 would look like a distribution of two points
    kurtosis = jnp.where(variance > 0, jnp.mean(standard**4, axis=0) - 3, 0)
    return FeatureMoments(mean[0], variance, jnp.mean(standard**3, axis=0), kurtosis)


class LayerShift(Observable):
    """Record the outputs of a normalization layer after each epoch: moments, and the shift since the epoch began.

    The record gets mean, variance, skewness and kurtosis (one entry a feature), loss_shift (what the change of the
    layers below alone does to the loss), and the covariate shift as ics_lower, ics_exact, ics_upper and ics_paired.

    Attributes:
        layer: index of the normalization layer. The network must have the methods ``lower(x, layer)``, the outputs of
            that layer before its gamma and beta, and ``upper(h, layer)``, the logits from there on, as ``Stack`` and
            ``ResNet`` have.
        moments: ``"batch"`` recomputes all moments on the training inputs, which must fit into memory at once.
            ``"running"`` uses the running averages, whose own noise puts a floor under the measured shift.
        rows: number of training inputs, the first ones, on which the covariate shift is measured; 0 for the rest alone.

    >>> LayerShift(rows=100).layer                                         # the last normalization layer
    -1
    """

    layer: int = eqx.field(static=True)
    moments: str = eqx.field(static=True)
    rows: int = eqx.field(static=True)

    @checked
    def __init__(
        self,
        layer: LayerNumber = -1,
        moments: Annotated[str, choice("batch", "running")] = "batch",
        rows: Natural = 400,
    ):
        self.layer, self.moments, self.rows, self.coords = layer, moments, rows, {}

    def begin(self, run: Training, state: Network) -> Any:
        """Remember the network."""
        return state

    def measure(self, run: Training, state: Network, memory: Network) -> Any:
        """Return the record; the covariate shift is measured on the host."""
        if not isinstance(state, Cuttable):
            raise ValueError(
                f"make must return a network with the methods lower and upper, got {type(state).__name__}"
            )
        (graph, new), (_, old) = nnx.split(state), nnx.split(memory)
        x, y = (jnp.asarray(u) for u in run.data[:2])
        before, after, seen, shift = _compared(
            graph, (old, new), x, y, run.loss, run.axis, self.layer, self.moments == "batch"
        )
        record = {"loss_shift": shift, **seen._asdict()}
        if self.rows:
            found = ics(before[: self.rows], after[: self.rows])
            values = (found.lower, found.exact, found.upper, found.pieces["paired"])
            names = ("ics_lower", "ics_exact", "ics_upper", "ics_paired")
            record |= dict(zip(names, map(np.asarray, values), strict=True))
        return record


@compiled
def _compared(
    graph: Any,
    states: tuple[Any, Any],
    x: Array,
    y: Array,
    loss: Loss,
    axis: str | None,
    layer: int,
    training: bool,
) -> tuple[Array, Array, FeatureMoments, Array]:
    """Return the outputs of the layer before and after, moments, and the change of the loss above."""

    def cut(state: Any) -> Any:
        model = nnx.merge(graph, state, copy=True)
        model.train() if training else model.eval()
        return model

    def bind(function: Callable[[], jax.Array]) -> jax.Array:
        # layers may name the axis of a mesh, which is here one device
        return function() if axis is None else jax.vmap(lambda _: function(), axis_name=axis)(jnp.zeros(1))[0]

    # both times in one vmapped pass: half the program to compile
    both = jax.tree.map(lambda *u: jnp.stack(u), *states)
    before, after = jax.vmap(lambda state: bind(lambda: cut(state).lower(x, layer)))(both)
    # the layers above at their old weights, so that only the layers below have moved
    above = lambda h: loss(bind(lambda: cut(states[0]).upper(h, layer)), y)
    # pixels of images count as samples of their channel
    return before, after, moments(after.reshape(-1, after.shape[-1])), above(after) - above(before)
