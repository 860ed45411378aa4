"""Products of a parameter brought into one form: y[g, p, o] = sum over k of h[g, p, k] w[g, k, o].

g runs over groups (axes that both share), p over positions (places at which the same parameter acts: pixels, tokens,
rounds of a loop), k and o over inputs and outputs. The gradient of f with respect to w is then
J[g, k, o] = sum over p of h[g, p, k] D[g, p, o] with D = df/dy. A convolution takes this form on the patches of its
input; a lookup of rows does with h the indicator of the row, which is never formed.
"""

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Shaped

from meanflow.kernels._empirical.sites import Site, show
from meanflow.kernels._empirical.visit import shape_of


class Sizes(NamedTuple):
    """Lengths of the axes of one product: groups, positions, inputs, outputs.

    ``compared`` is how many multiplications one h_p . h'_q takes: as many as inputs, which 0 stands for, or less where
    windows are added up (``Windowed``).
    """

    groups: int
    positions: int
    inputs: int
    outputs: int
    compared: float = 0.0

    @property
    def entries(self) -> int:
        """How many numbers the parameter has."""
        return self.groups * self.inputs * self.outputs


def _split(site: Site) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the loops around a site that slice the parameter, and those that repeat it."""
    pairs = list(enumerate(site.view.sliced))
    return tuple(i for i, s in pairs if s), tuple(i for i, s in pairs if not s)


class _Dot(NamedTuple):
    """Axes of the weight and of its partner in a dot_general: shared, contracted and free ones."""

    shared: tuple[int, ...]
    contracted: tuple[int, ...]
    free: tuple[int, ...]


def _dot_axes(site: Site) -> tuple[_Dot, _Dot]:
    (left, right), (left_shared, right_shared) = site.equation.params["dimension_numbers"]

    def axes(operand: int, contracted: Sequence[int], shared: Sequence[int]) -> _Dot:
        rank = len(shape_of(site.equation.invars[operand]))
        taken = {*map(int, contracted), *map(int, shared)}
        free = tuple(i for i in range(rank) if i not in taken)
        return _Dot(tuple(map(int, shared)), tuple(map(int, contracted)), free)

    both = axes(0, left, left_shared), axes(1, right, right_shared)
    return both if site.operand == 0 else (both[1], both[0])


def key(site: Site) -> tuple[object, ...]:
    """Return what decides the order of the parameter's entries in J: sites of equal keys may be added."""
    order: object = site.equation.params.get("feature_group_count")
    if site.kind == "dot_general":
        order = _dot_axes(site)[0]
    elif site.kind == "conv_general_dilated":
        order = (order, tuple(site.equation.params["dimension_numbers"].rhs_spec))
    lengths = tuple(n for n, sliced in zip(site.lengths, site.view.sliced, strict=True) if sliced)
    return site.kind, site.view.root, site.view.steps, lengths, order


def sizes(site: Site) -> Sizes:
    """Return the lengths of the axes of a site's product, loops included."""
    weight, out = shape_of(site.equation.invars[site.operand]), shape_of(site.equation.outvars[0])
    if site.kind == "dot_general":
        mine, other = _dot_axes(site)
        partner = shape_of(site.equation.invars[1 - site.operand])
        pick = lambda axes, shape: math.prod(shape[i] for i in axes)
        groups, inputs = pick(mine.shared, weight), pick(mine.contracted, weight)
        positions, outputs = pick(other.free, partner), pick(mine.free, weight)
    elif site.kind == "conv_general_dilated":
        groups = site.equation.params["feature_group_count"]
        outputs = weight[site.equation.params["dimension_numbers"].rhs_spec[0]] // groups
        inputs = math.prod(weight) // (outputs * groups)
        positions = math.prod(out) // (outputs * groups)
    else:
        groups, inputs, outputs = 1, weight[0], math.prod(weight[1:])
        positions = math.prod(out) // max(outputs, 1)
    slicing, repeating = _split(site)
    # a loop that slices the parameter has other entries in every round: groups. One that repeats it adds positions.
    groups *= math.prod(site.lengths[i] for i in slicing)
    positions *= math.prod(site.lengths[i] for i in repeating)
    return Sizes(groups, positions, inputs, outputs, _compared(site, inputs, positions))


# multiplications in the time in which one entry of h h' is padded and added up over a window
_ADDED = 40.0


def _compared(site: Site, inputs: int, positions: int) -> float:
    """Return how many multiplications one h_p . h'_q takes by windows; 0 where they save nothing."""
    if site.kind != "conv_general_dilated" or site.lengths:
        return 0.0
    shape, window = shape_of(site.equation.invars[0]), _window(site)
    batch, channels, *space = site.equation.params["dimension_numbers"].lhs_spec
    # u u' has inside^2 entries of ``each`` multiplications, which are padded to padded^2 and added up over the window
    inside = shape[batch] * math.prod(shape[i] for i in space)
    padded = shape[batch] * math.prod(
        low + high + shape[i] + between * (shape[i] - 1)
        for (low, high, between), i in zip(window.edges, space, strict=True)
    )
    each = shape[channels] // site.equation.params["feature_group_count"]
    found = (inside**2 * each + _ADDED * padded**2) / max(positions, 1) ** 2
    return found if found < inputs else 0.0


def _in_loops(
    site: Site, function: Callable[[Array], Array], value: Shaped[Array, "..."]
) -> Float[Array, "G P _"]:
    """Apply a function -> (g, p, ...) in every round of the loops, and merge the rounds into groups and positions."""
    for _ in site.lengths:
        function = jax.vmap(function)
    found = function(value)
    if not site.lengths:
        return found
    slicing, repeating = _split(site)
    n = len(site.lengths)
    # The loops come first, in the order of nesting; then g, p and one more axis of one round. A loop that slices the
    # parameter has other entries in every round: groups. One that repeats it adds positions.
    moved = jnp.transpose(found, (*slicing, n, *repeating, n + 1, n + 2))
    split = len(slicing) + 1
    return moved.reshape(math.prod(moved.shape[:split]), math.prod(moved.shape[split:-1]), moved.shape[-1])


def activation(site: Site, value: Shaped[Array, "..."]) -> Shaped[Array, "..."]:
    """Return h (G, P, K) of one sample from the partner of the weight; patches for a convolution.

    Of a lookup, whose h is the indicator of a row, the rows (P,) that it reads.
    """
    if site.kind == "gather":
        # JAX clips indices or promises that they are inside; those that it drops have no D (``cotangent``)
        flat = value.reshape(-1)
        return flat if _drops(site) else jnp.clip(flat, 0, shape_of(site.equation.invars[0])[0] - 1)
    if site.kind == "conv_general_dilated":
        return _in_loops(site, lambda h: _patches(site, h), value)
    _, other = _dot_axes(site)

    def core(h: Array) -> Array:
        # shared axes are groups, free ones positions, contracted ones inputs
        moved = jnp.transpose(h, other.shared + other.free + other.contracted)
        pick = lambda axes: math.prod(h.shape[i] for i in axes)
        return moved.reshape(pick(other.shared), pick(other.free), pick(other.contracted))

    return _in_loops(site, core, value)


def _drops(site: Site) -> bool:
    """Tell whether a lookup ignores indices outside of its table."""
    return site.equation.params["mode"] == jax.lax.GatherScatterMode.FILL_OR_DROP


def cotangent(site: Site, value: Float[Array, "..."], partner: Shaped[Array, "..."]) -> Float[Array, "G P O"]:
    """Return D of one sample and one output of the network, times the scale of the parameter.

    Args:
        site: the product.
        value: D in the axes of y.
        partner: what the parameter is multiplied with; a lookup has no D where this index is outside of the table.
    """

    def core(d: Array) -> Array:
        if site.kind == "conv_general_dilated":
            numbers, groups = (site.equation.params[n] for n in ("dimension_numbers", "feature_group_count"))
            batch, channels, *space = numbers.out_spec
            # positions are all pixels of all rows of the batch; channels split into groups and outputs o of each
            moved = jnp.transpose(d, (batch, *space, channels))
            return jnp.swapaxes(moved.reshape(-1, groups, d.shape[channels] // groups), 0, 1)
        mine, other = _dot_axes(site)
        shared, rows, columns = len(mine.shared), len(other.free), len(mine.free)
        if site.operand == 0:  # the weight's free axes come first: (g, o, p) to (g, p, o)
            order = (*range(shared), *range(shared + columns, d.ndim), *range(shared, shared + columns))
            d = jnp.transpose(d, order)
        pick = lambda start, count: math.prod(d.shape[start : start + count])
        return d.reshape(pick(0, shared), pick(shared, rows), pick(shared + rows, columns))

    if site.kind == "gather":
        table = shape_of(site.equation.invars[0])
        flat, index = value.reshape(1, -1, math.prod(table[1:])), partner.reshape(-1)
        if _drops(site):
            flat = jnp.where(((index >= 0) & (index < table[0]))[None, :, None], flat, 0)
    else:
        flat = _in_loops(site, core, value)
    return flat if site.view.scale == 1.0 else flat * np.asarray(site.view.scale, flat.dtype)


class Window(NamedTuple):
    """What a convolution's weights see, by axes of space.

    Attributes:
        edges: zeros before, after and between the entries of the input.
        sizes: of the weights.
        apart: distances of the weights.
        strides: distances of the outputs.
    """

    edges: tuple[tuple[int, int, int], ...]
    sizes: tuple[int, ...]
    apart: tuple[int, ...]
    strides: tuple[int, ...]

    def shifts(self, axis: int, value: Array, places: Sequence[int]) -> list[Array]:
        """Return what each weight along one axis of space sees of a value, in which that axis has these places."""
        apart, stride, found = self.apart[axis], self.strides[axis], []
        for i in range(self.sizes[axis]):
            seen = value
            for place in places:
                # the first entries that the last weight can start from: all weights see as many
                reach = value.shape[place] - (self.sizes[axis] - 1) * apart
                seen = jax.lax.slice_in_dim(seen, i * apart, i * apart + reach, stride, place)
            found.append(seen)
        return found


def _window(site: Site) -> Window:
    options = site.equation.params
    weight = shape_of(site.equation.invars[1])
    edges = zip(options["padding"], options["lhs_dilation"], strict=True)
    return Window(
        tuple((int(low), int(high), int(inner) - 1) for (low, high), inner in edges),
        tuple(weight[i] for i in options["dimension_numbers"].rhs_spec[2:]),
        tuple(options["rhs_dilation"]),
        tuple(options["window_strides"]),
    )


def _patches(site: Site, h: Float[Array, "..."]) -> Float[Array, "G P K"]:
    """Return what each entry of a convolution's output sees of its input, kernel positions first in k.

    Shifted copies are put side by side along one axis of space after the other: each step moves runs of numbers that
    are longer than those of the step before, which is faster than all shifts at once.
    """
    window, groups = _window(site), site.equation.params["feature_group_count"]
    batch, channels, *space = site.equation.params["dimension_numbers"].lhs_spec
    h = jnp.transpose(h, (batch, *space, channels))
    # zeros at the edges, and between the entries of a dilated input, as the convolution itself has them
    seen = jax.lax.pad(h, jnp.zeros((), h.dtype), [(0, 0, 0), *window.edges, (0, 0, 0)])
    seen = seen.reshape((*seen.shape[:-1], groups, -1))
    # from the last axis of space to the first, whose kernel positions then come first in k
    for axis in reversed(range(len(space))):
        seen = jnp.concatenate(window.shifts(axis, seen, [1 + axis]), axis=-1)
    return jnp.swapaxes(seen.reshape(-1, groups, seen.shape[-1]), 0, 1)


class Windowed(eqx.Module):
    """The input of a convolution whose patches are compared without being formed.

    With u the input, h_p . h'_q = sum over the weights' places w of u_{p + w} . u'_{q + w}: products of channels alone,
    added up along one axis of space after the other. Patches would be multiplied as often as the weights have places.

    Attributes:
        value: u of any number of samples, (..., G, batch, space..., channels of a group).
        window: what the weights see.
    """

    value: Float[Array, "..."]
    window: Window = eqx.field(static=True)


def windowed(site: Site, value: Float[Array, "..."]) -> Windowed:
    """Return the input of a convolution at one sample."""
    batch, channels, *space = site.equation.params["dimension_numbers"].lhs_spec
    h = jnp.transpose(value, (batch, *space, channels))
    split = h.reshape((*h.shape[:-1], site.equation.params["feature_group_count"], -1))
    return Windowed(jnp.moveaxis(split, -2, 0), _window(site))


def windowed_products(one: Windowed, many: Windowed) -> Float[Array, "G P S Q"]:
    """Return h_gp . h'_gq of one sample with many."""
    groups, *inside, channels = one.value.shape
    count, rank = many.value.shape[0], len(one.window.sizes)
    h, other = one.value.reshape(groups, -1, channels), many.value.reshape(count, groups, -1, channels)
    product = jnp.einsum("gpk,sgqk->gpsq", h, other, precision=jax.lax.Precision.HIGHEST)
    seen = product.reshape((groups, *inside, count, *many.value.shape[2:-1]))
    edges = [(0, 0, 0), (0, 0, 0), *one.window.edges]
    seen = jax.lax.pad(seen, jnp.zeros((), seen.dtype), [*edges, *edges])
    # positions p of the one and q of the other move together: both axes are shifted by the same place of the weights
    for axis in range(rank):
        shifts = one.window.shifts(axis, seen, [2 + axis, 4 + rank + axis])
        seen = sum(shifts[1:], shifts[0])
    positions = math.prod(seen.shape[1 : 2 + rank])
    return seen.reshape(groups, positions, count, -1)


def to_root(site: Site, jacobian: Float[Array, "G K O"], root: jax.ShapeDtypeStruct) -> Float[Array, "..."]:
    """Bring J of one site (without its scale) into the axes of the root that the site shows."""
    weight = shape_of(site.equation.invars[site.operand])
    loops = tuple(n for n, s in zip(site.lengths, site.view.sliced, strict=True) if s)
    # J has the axes (g, k, o) of the weight: ``axes`` is the order of the weight's own axes in it
    if site.kind == "dot_general":
        mine, _ = _dot_axes(site)
        axes = mine.shared + mine.contracted + mine.free
        flat = jacobian.reshape(loops + tuple(weight[i] for i in axes))
    elif site.kind == "gather":
        flat, axes = jacobian.reshape(loops + weight), tuple(range(len(weight)))
    else:
        outs, ins, *space = site.equation.params["dimension_numbers"].rhs_spec
        groups, window = site.equation.params["feature_group_count"], tuple(weight[i] for i in space)
        split = jacobian.reshape(loops + (groups, *window, weight[ins], weight[outs] // groups))
        # bring the groups beside the outputs
        flat = jnp.moveaxis(split, len(loops), -2).reshape((*loops, *window, weight[ins], weight[outs]))
        axes = (*space, ins, outs)
    shown = jnp.transpose(flat, (*range(len(loops)), *(len(loops) + int(i) for i in np.argsort(axes))))
    # the scale is part of D already; a view only moves entries, so that its transpose moves them back
    view = site.view._replace(scale=1.0)
    return jax.linear_transpose(lambda r: show(view, r), root)(shown)[0]
