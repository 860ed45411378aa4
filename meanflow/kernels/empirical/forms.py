"""Products of a parameter brought into one form: y[g, p, o] = sum over k of h[g, p, k] w[g, k, o].

g runs over groups (axes that both share), p over positions (places at which the same parameter acts: pixels, tokens,
rounds of a loop), k and o over inputs and outputs. The gradient of f with respect to w is then
J[g, k, o] = sum over p of h[g, p, k] D[g, p, o] with D = df/dy. A convolution takes this form on the patches of its
input; a lookup of rows does with h the indicator of the row, which is never formed.
"""

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, Shaped

from meanflow.kernels.empirical.sites import Site, shape_of, show


class Sizes(NamedTuple):
    """Lengths of the axes of one product: groups, positions, inputs, outputs."""

    groups: int
    positions: int
    inputs: int
    outputs: int


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
    groups *= math.prod(site.lengths[i] for i in slicing)
    positions *= math.prod(site.lengths[i] for i in repeating)
    return Sizes(groups, positions, inputs, outputs)


def _in_loops(site: Site, value: Shaped[Array, "..."], rank: int) -> Shaped[Array, "..."]:
    """Merge loops into groups and positions: (loops..., g, p, ...) to (G, P, ...), ``rank`` axes after p."""
    if not site.lengths:
        return value
    slicing, repeating = _split(site)
    n = len(site.lengths)
    order = (*slicing, n, *repeating, n + 1, *range(n + 2, n + 2 + rank))
    moved = jnp.transpose(value, order)
    split = len(slicing) + 1
    groups, positions = moved.shape[:split], moved.shape[split : len(order) - rank]
    return moved.reshape((math.prod(groups), math.prod(positions)) + moved.shape[len(order) - rank :])


def _over_loops(site: Site, function: Callable[[Array], Array], value: Array) -> Array:
    """Apply a function in every round of the loops."""
    for _ in site.lengths:
        function = jax.vmap(function)
    return function(value)


def activation(site: Site, value: Shaped[Array, "..."]) -> Float[Array, "G P K"]:
    """Return h of one sample from the partner of the weight; patches for a convolution."""
    if site.kind == "conv_general_dilated":
        core = lambda h: _patches(site, h)
    else:
        _, other = _dot_axes(site)

        def core(h: Array) -> Array:
            moved = jnp.transpose(h, other.shared + other.free + other.contracted)
            pick = lambda axes: math.prod(h.shape[i] for i in axes)
            return moved.reshape(pick(other.shared), pick(other.free), pick(other.contracted))

    return _in_loops(site, _over_loops(site, core, value), 1)


def cotangent(site: Site, value: Float[Array, "..."]) -> Float[Array, "G P O"]:
    """Return D of one sample and one output of the network, times the scale of the parameter."""

    def core(d: Array) -> Array:
        if site.kind == "conv_general_dilated":
            numbers, groups = (site.equation.params[n] for n in ("dimension_numbers", "feature_group_count"))
            batch, channels, *space = numbers.out_spec
            moved = jnp.transpose(d, (batch, *space, channels)).reshape(
                -1, groups, d.shape[channels] // groups
            )
            return jnp.swapaxes(moved, 0, 1)
        mine, other = _dot_axes(site)
        shared, rows, columns = len(mine.shared), len(other.free), len(mine.free)
        if site.operand == 0:  # the weight's free axes come first
            order = (*range(shared), *range(shared + columns, d.ndim), *range(shared, shared + columns))
            d = jnp.transpose(d, order)
        pick = lambda start, count: math.prod(d.shape[start : start + count])
        return d.reshape(pick(0, shared), pick(shared, rows), pick(shared + rows, columns))

    if site.kind == "gather":
        width = math.prod(shape_of(site.equation.invars[0])[1:])
        flat = value.reshape(1, -1, width)
    else:
        flat = _in_loops(site, _over_loops(site, core, value), 1)
    return flat if site.view.scale == 1.0 else flat * np.asarray(site.view.scale, flat.dtype)


def _patches(site: Site, h: Float[Array, "..."]) -> Float[Array, "G P K"]:
    """Return what each entry of a convolution's output sees of its input, kernel positions first in k.

    Shifted copies are put side by side along one axis of space after the other: each step moves runs of numbers that
    are longer than those of the step before, which is faster than all shifts at once.
    """
    options = site.equation.params
    batch, channels, *space = options["dimension_numbers"].lhs_spec
    window = [shape_of(site.equation.invars[1])[i] for i in options["dimension_numbers"].rhs_spec[2:]]
    groups, dilation = options["feature_group_count"], options["rhs_dilation"]
    h = jnp.transpose(h, (batch, *space, channels))
    edges = [
        (low, high, inner - 1)
        for (low, high), inner in zip(options["padding"], options["lhs_dilation"], strict=True)
    ]
    seen = jax.lax.pad(h, jnp.zeros((), h.dtype), [(0, 0, 0), *edges, (0, 0, 0)])
    seen = seen.reshape((*seen.shape[:-1], groups, -1))
    # from the last axis of space to the first, whose kernel positions then come first in k
    for axis in reversed(range(len(space))):
        width, apart, stride = window[axis], dilation[axis], options["window_strides"][axis]
        reach = seen.shape[1 + axis] - (width - 1) * apart
        shifts = [
            jax.lax.slice_in_dim(seen, i * apart, i * apart + reach, stride, 1 + axis) for i in range(width)
        ]
        seen = jnp.concatenate(shifts, axis=-1)
    return jnp.swapaxes(seen.reshape(-1, groups, seen.shape[-1]), 0, 1)


def rows(site: Site, value: Int[Array, "..."], cot: Float[Array, "... G P O"]) -> tuple[Array, Array]:
    """Return the rows (P,) that a lookup reads, and D without those outside of the table."""
    table = shape_of(site.equation.invars[0])[0]
    flat = value.reshape(-1)
    inside = (flat >= 0) & (flat < table)
    mode = site.equation.params["mode"]
    if mode == jax.lax.GatherScatterMode.FILL_OR_DROP:
        return flat, jnp.where(inside[None, :, None], cot, 0)
    return jnp.clip(flat, 0, table - 1), cot


def to_root(site: Site, jacobian: Float[Array, "G K O"], root: jax.ShapeDtypeStruct) -> Float[Array, "..."]:
    """Bring J of one site (without its scale) into the axes of the root that the site shows."""
    weight = shape_of(site.equation.invars[site.operand])
    loops = tuple(n for n, s in zip(site.lengths, site.view.sliced, strict=True) if s)
    if site.kind == "dot_general":
        mine, _ = _dot_axes(site)
        axes = mine.shared + mine.contracted + mine.free
        flat = jacobian.reshape(loops + tuple(weight[i] for i in axes))
    elif site.kind == "gather":
        flat, axes = jacobian.reshape(loops + weight), tuple(range(len(weight)))
    else:
        outs, ins, *space = site.equation.params["dimension_numbers"].rhs_spec
        groups = site.equation.params["feature_group_count"]
        window = tuple(weight[i] for i in space)
        split = jacobian.reshape(loops + (groups, *window, weight[ins], weight[outs] // groups))
        n = len(loops)  # bring the groups beside the outputs
        flat = jnp.moveaxis(split, n, -2).reshape((*loops, *window, weight[ins], weight[outs]))
        axes = (*space, ins, outs)
    inverse = np.argsort(axes)
    n = len(loops)
    shown = jnp.transpose(flat, (*range(n), *(n + int(i) for i in inverse)))
    # the scale is part of D already
    view = site.view._replace(scale=1.0)
    (back,) = jax.linear_transpose(lambda r: show(view, r), root)(shown)
    return back
