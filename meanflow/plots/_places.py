"""Where neurons stand in a plane, for every record: one rule for figures, animations and the report."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np


class Places(NamedTuple):
    """Places of neurons, the signs of what they contribute, and what the places are."""

    place: np.ndarray  # (..., m, D)
    sign: np.ndarray  # (..., m); 0 where nothing tells
    name: str  # "r" for the plane (u, v) of univariate neurons, "|a| b" for two-layer neurons, else the coordinates


def places(fields: Mapping[str, np.ndarray]) -> Places:
    """Return where neurons stand, from their coordinates by name, each (..., m) or (..., m, D).

    Univariate neurons stand at |r| (cos theta, sin theta), which is |c| (a, -b) for those with three weights; two-layer
    neurons at |a| b, since ReLU cannot tell how a product is shared between both layers. Neurons of another model stand
    at their coordinates but the amplitude ``a``, which gives the sign.
    """
    names = set(fields)
    if names == {"r", "theta"}:
        r, theta = fields["r"], fields["theta"]
        place = np.abs(r)[..., None] * np.stack([np.cos(theta), np.sin(theta)], -1)
        return Places(place, np.sign(r), "r")
    if names == {"a", "b", "c"} and fields["a"].ndim == fields["b"].ndim == fields["c"].ndim:
        a, b, c = (fields[name] for name in "abc")
        return Places(np.abs(c)[..., None] * np.stack([a, -b], -1), np.sign(c), "r")
    if names == {"a", "b"}:
        a, b = fields["a"], fields["b"]
        # one row of outputs a neuron: its length is what the neuron contributes, its sign that of the first output
        a = a if a.ndim == b.ndim else a[..., None]
        return Places(np.linalg.norm(a, axis=-1, keepdims=True) * b, np.sign(a[..., 0]), "|a| b")
    rank = min(u.ndim for u in fields.values())
    columns = {n: u if u.ndim > rank else u[..., None] for n, u in fields.items()}
    amplitude = columns.pop("a", None) if len(columns) > 1 else None
    place = np.concatenate(list(columns.values()), -1)
    sign = np.zeros(place.shape[:-1]) if amplitude is None else np.sign(amplitude[..., 0])
    return Places(place, sign, f"({', '.join(columns)})" if len(columns) > 1 else next(iter(columns)))


def leading(place: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return places in the two directions that hold most of their squared length at the end, and the share they hold.

    Args:
        place: (..., k, m, D) places over k moments; NaN where there is no neuron.

    Returns:
        (..., k, m, 2), with the same two directions at all moments, and the shares (...).
    """
    outer = place.shape[:-3]
    flat = place.reshape(-1, *place.shape[-3:])
    seen, share = np.full((*flat.shape[:-1], 2), np.nan), np.full(len(flat), np.nan)
    for k, moving in enumerate(flat):
        real = np.isfinite(moving).all(-1)
        if not real.any():
            continue
        # a run that failed ends in NaN: the last moment that has neurons
        end = np.flatnonzero(real.any(-1))[-1]
        _, sizes, basis = np.linalg.svd(moving[end][real[end]], full_matrices=False)
        basis = basis[:2]
        if len(basis) < 2:  # a single neuron spans one direction
            basis = np.concatenate([basis, np.zeros_like(basis)])
        # an eigenvector has no sign of its own: its largest entry is positive
        largest = np.take_along_axis(basis, np.abs(basis).argmax(1)[:, None], 1)
        seen[k] = moving @ (basis * np.where(largest < 0, -1, 1)).T
        share[k] = (sizes[:2] ** 2).sum() / max((sizes**2).sum(), np.finfo(float).tiny)
    return seen.reshape(*outer, *seen.shape[1:]), share.reshape(outer)
