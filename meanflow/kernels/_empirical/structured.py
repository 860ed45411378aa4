"""The tangent kernel as a sum over parameters, each by the cheaper of two exact contractions.

With y[g, p, o] = sum_k h[g, p, k] w[g, k, o] (``forms``) and D = df/dy, the gradient J[g, k, o] = sum_p h[g, p, k]
D[g, p, o] is an outer product at every position, so that the kernel of two samples is either

    <J, J'>                                              in parameter space, or
    sum over g, p, q of (h_gp . h'_gq) (D_gp . D'_gq)    in sample space ("BN NTK" eq. A.10 for one position).

All D come from one backward pass a network output, through zeros ("taps") added to every y (``sites``). A parameter
that is used several times has the positions of all its uses, cross terms included. Parameters used in other ways get
their part of J from the same backward pass.
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, PyTree, Shaped

from meanflow.kernels._empirical import contraction, forms
from meanflow.kernels._empirical.contraction import Coupled, Factor, Gram, Jacobian, Rows, Slices
from meanflow.kernels._empirical.convolution import channels_last
from meanflow.kernels._empirical.sites import Analysis, Site, analyze, evaluate
from meanflow.kernels._empirical.visit import dtype_of, shape_of

Sample: TypeAlias = PyTree  # one sample, or a batch of them, of any structure
# (leaves of the parameters, sample) -> outputs at that sample
Function: TypeAlias = Callable[[Sequence[Array], Sample], Float[Array, "..."]]


class Share(NamedTuple):
    """How one parameter's share of the kernel is computed.

    Attributes:
        leaf: the parameter.
        mode: "jacobian", "slices" (J formed in parts while it is contracted), "gram" or "rows".
        sites: its products, which agree in the order of the parameter's entries; empty where J needs more than sums.
        sizes: of all these products together.
    """

    leaf: int
    mode: str
    sites: tuple[int, ...]
    sizes: forms.Sizes


class Traced(NamedTuple):
    """The trace of a function of (leaves, sample) and what is known about it.

    Attributes:
        analysis: its sites.
        sites: the active ones by number.
        leaves: shapes of the parameters.
        output: shape of the outputs.
        used: parameters that the outputs depend on, by number.
    """

    analysis: Analysis
    sites: dict[int, Site]
    leaves: list[jax.ShapeDtypeStruct]
    output: jax.ShapeDtypeStruct
    used: tuple[int, ...]

    @property
    def outputs(self) -> int:
        """How many numbers the function returns."""
        return math.prod(self.output.shape)

    @property
    def taps(self) -> int:
        """How many numbers all y have together."""
        return sum(s.tap for s in self.sites.values())


def trace(function: Function, leaves: Sequence[Array], sample: Sample) -> Traced:
    """Trace a function and find its sites; arrays may be given by their shapes alone."""
    shapes = [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in leaves]
    closed, output = jax.make_jaxpr(function, return_shape=True)(shapes, sample)
    analysis = analyze(closed, len(shapes))
    sites = {s.number: s for s in analysis.sites()}
    used = set(analysis.direct)
    for site in sites.values():
        used |= analysis.roots[site.view.root]
    return Traced(analysis, sites, shapes, output, tuple(sorted(used)))


# sizes of products -> "jacobian", "slices" or "gram"
Chooser: TypeAlias = Callable[[forms.Sizes], str]


def shares(traced: Traced, choose: Chooser) -> list[Share]:
    """Return how each parameter's share is computed; ``choose`` decides where all ways are possible."""
    analysis, found = traced.analysis, []
    mixed = set(analysis.direct)
    for site in traced.sites.values():
        # roots beyond the parameters are functions of several of them: their J is pulled back to each
        if site.view.root >= len(traced.leaves):
            mixed |= analysis.roots[site.view.root]
    for leaf in traced.used:
        mine = [s for s in traced.sites.values() if s.view.root == leaf]
        # sums of J over positions need one order of entries; else J is made in the parameter's own axes
        if leaf in mixed or len({forms.key(s) for s in mine}) != 1:
            size = forms.Sizes(1, 1, 1, math.prod(traced.leaves[leaf].shape))
            found.append(Share(leaf, "jacobian", (), size))
            continue
        size, *others = [forms.sizes(s) for s in mine]
        if others:  # windows of one use are not those of another
            size = size._replace(positions=size.positions + sum(s.positions for s in others), compared=0.0)
        numbers = tuple(s.number for s in mine)
        mode = "rows" if mine[0].kind == "gather" else choose(size)
        found.append(Share(leaf, mode, numbers, size))
    return found


def align(left: Traced, right: Traced, plan: Sequence[Share]) -> tuple[list[Share], list[Share]]:
    """Return the shares of two traces of the same parameters so that their entries are in the same order."""
    others = {s.leaf: s for s in shares(right, lambda _: "jacobian")}
    mine, theirs = [], []
    for share in plan:
        other = others.get(share.leaf, share._replace(sites=()))
        used = [left.sites[n] for n in share.sites] + [right.sites[n] for n in other.sites]
        if not (share.sites and other.sites and len(set(map(forms.key, used))) == 1):
            # in the parameter's own order
            share, other = share._replace(mode="jacobian", sites=()), other._replace(sites=())
        mine.append(share)
        theirs.append(other._replace(mode=share.mode))
    return mine, theirs


class Gradients(NamedTuple):
    """What the backward pass delivers at one sample.

    Attributes:
        activations: what the parameter is multiplied with at each site.
        cotangents: D of each site, the C outputs first.
        direct: gradients of the parameters that are used directly, the C outputs first.
    """

    activations: dict[int, Array]
    cotangents: dict[int, Array]
    direct: dict[int, Array]

    @property
    def outputs(self) -> int:
        """How many outputs were pulled back."""
        return next(iter((*self.cotangents.values(), *self.direct.values()))).shape[0]


def pullback(
    traced: Traced, leaves: Sequence[Array], sample: Sample
) -> tuple[dict[int, Array], Callable[[Array], tuple[dict[int, Array], dict[int, Array]]]]:
    """Evaluate at one sample; return all activations, and the map from a cotangent of the outputs to D and direct J."""
    zeros = {n: jnp.zeros(s.lengths + s.out.shape, s.out.dtype) for n, s in traced.sites.items()}

    def tapped(taps: dict[int, Array], some: dict[int, Array]) -> tuple[Array, dict[int, Array]]:
        # differentiated in the taps and in the direct parameters alone: all other gradients are h D
        args = [some.get(i, a) for i, a in enumerate(leaves)] + jax.tree.leaves(sample)
        outs, found = evaluate(traced.analysis.scope, args, taps)
        return outs[0].reshape(-1), found

    some = {i: leaves[i] for i in sorted(traced.analysis.direct)}
    _, pull, found = jax.vjp(tapped, zeros, some, has_aux=True)
    return found, pull


def gradients(traced: Traced, leaves: Sequence[Array], sample: Sample) -> Gradients:
    """Return the gradients of all outputs at one sample."""
    found, pull = pullback(traced, leaves, sample)
    # one backward pass for each of the C outputs
    cotangents, direct = jax.vmap(pull)(jnp.eye(traced.outputs, dtype=traced.output.dtype))
    return Gradients(found, cotangents, direct)


def _activations(traced: Traced, numbers: Sequence[int], found: Gradients) -> Shaped[Array, "..."]:
    """Return h (G, P, K) of one sample, the positions of all uses one after the other; of lookups their rows (P,)."""
    parts = [forms.activation(traced.sites[n], found.activations[n]) for n in numbers]
    return parts[0] if len(parts) == 1 else jnp.concatenate(parts, 0 if parts[0].ndim == 1 else 1)


def _cotangents(traced: Traced, numbers: Sequence[int], found: Gradients) -> Float[Array, "C G P O"]:
    """Return D of one sample, the positions of all uses one after the other."""
    # over the C outputs, the partner being the same for all
    one = lambda n: jax.vmap(lambda d: forms.cotangent(traced.sites[n], d, found.activations[n]))
    parts = [one(n)(found.cotangents[n]) for n in numbers]
    return parts[0] if len(parts) == 1 else jnp.concatenate(parts, 2)


def _joined_jacobian(traced: Traced, numbers: Sequence[int], found: Gradients) -> Float[Array, "C G O K"]:
    """Return J of one sample, summed over sites that show the parameter in the same order.

    J[g, k, o] = sum_p h[g, p, k] D[g, p, o], with inputs last, the order in which the product falls out without a copy.
    """
    h, d = _activations(traced, numbers, found), _cotangents(traced, numbers, found)
    site = traced.sites[numbers[0]]
    if site.kind != "gather":
        return jnp.einsum("gpk,cgpo->cgok", h, d, precision=contraction.HIGH)
    # h is the indicator of a row: D is added to the rows that were read
    table = jnp.zeros((forms.sizes(site).inputs, d.shape[-1]), d.dtype)
    return jax.vmap(lambda c: table.at[h].add(c[0], mode="drop").T[None])(d)


def _factor(traced: Traced, share: Share, found: Gradients) -> Factor:
    """Return the factors of one share at one sample, from which J is not formed, or later."""
    h, d = _activations(traced, share.sites, found), _cotangents(traced, share.sites, found)
    if share.mode == "gram" and share.sizes.compared:
        (number,) = share.sites
        return Gram(forms.windowed(traced.sites[number], found.activations[number]), d)
    if share.mode == "rows":
        return Rows(h, d)
    return Gram(h, d) if share.mode == "gram" else Slices(h, d)


def _product_jacobian(traced: Traced, share: Share, found: Gradients) -> Jacobian:
    """Return J of one sample for a parameter that all its sites show in the same order."""
    total = _joined_jacobian(traced, share.sites, found)
    return Jacobian(total.reshape(total.shape[0], -1))


def _mixed_jacobians(
    traced: Traced, leaves: Sequence[Array], wanted: Sequence[int], found: Gradients
) -> dict[int, Jacobian]:
    """Return J of one sample for parameters whose uses differ: direct ones, several views, functions of parameters."""
    count = len(traced.leaves)
    roots: dict[int, jax.ShapeDtypeStruct] = dict(enumerate(traced.leaves))
    values = lambda some: _derived(traced, some)
    if any(s.view.root >= count for s in traced.sites.values()):
        roots |= jax.eval_shape(values, list(leaves))
    groups: dict[object, list[Site]] = {}  # uses in the same order have their positions added in one product
    for site in traced.sites.values():
        if site.view.root >= count or site.view.root in wanted:
            groups.setdefault(forms.key(site), []).append(site)
    total: dict[int, Array] = {i: found.direct[i] for i in wanted if i in found.direct}  # by root
    for sites in groups.values():
        root = sites[0].view.root
        part = jnp.swapaxes(_joined_jacobian(traced, [s.number for s in sites], found), 2, 3)
        part = jax.vmap(functools.partial(forms.to_root, sites[0], root=roots[root]))(part)
        total[root] = total[root] + part if root in total else part
    zeros = lambda a: jnp.zeros((found.outputs, *a.shape), a.dtype)
    derived = [r for r in total if r >= count]
    if derived:
        # chain rule: J of the parameters is J of the derived roots times their derivative
        seen, pull = jax.vjp(values, list(leaves))
        (parts,) = jax.vmap(pull)({r: total[r] if r in total else zeros(a) for r, a in seen.items()})
        for leaf in frozenset().union(*(traced.analysis.roots[r] for r in derived)) & set(wanted):
            total[leaf] = total[leaf] + parts[leaf] if leaf in total else parts[leaf]
    # a parameter that is used in the other trace only has no gradient here
    each = {i: total[i] if i in total else zeros(traced.leaves[i]) for i in wanted}
    return {i: Jacobian(a.reshape(a.shape[0], -1)) for i, a in each.items()}


def _derived(traced: Traced, leaves: Sequence[Array]) -> dict[int, Array]:
    """Return the roots that are functions of parameters alone; they need no sample, so any will do."""
    closed = traced.analysis.scope.closed
    rest = closed.jaxpr.invars[len(leaves) :]
    samples = [jnp.zeros(shape_of(v), dtype_of(v)) for v in rest]
    roots: dict[int, Any] = {}
    evaluate(traced.analysis.scope, [*leaves, *samples], {}, roots)
    used = {s.view.root for s in traced.sites.values()}
    return {n: a for n, a in roots.items() if n in used}


def factors(
    traced: Traced, plan: Sequence[Share], leaves: Sequence[Array], batch: Sample, piece: int
) -> list[Factor]:
    """Return every share's factors at the samples of a batch (leading axis of all its arrays).

    Cost: one forward and C backward passes, ``piece`` samples at a time; J costs T G P K O C more operations for each
    parameter that is in parameter space.
    """
    differentiate = channels_last(functools.partial(_differentiated, traced, plan, leaves))
    found, made = contraction.by_pieces(differentiate, batch, piece)
    # patches of inputs are several times as large as these, and are formed one parameter after the other
    form = lambda share: jax.vmap(functools.partial(_factor, traced, share))(_at_sites(found, share.sites))
    return [made[share.leaf] if share.mode == "jacobian" else form(share) for share in plan]


def _differentiated(
    traced: Traced, plan: Sequence[Share], leaves: Sequence[Array], batch: Sample
) -> tuple[Gradients, dict[int, Jacobian]]:
    """Return J of the parameters in parameter space, by number, and what the others need of the backward pass."""
    found = jax.vmap(lambda sample: gradients(traced, leaves, sample))(batch)
    mixed = [s.leaf for s in plan if not s.sites]
    made = jax.vmap(lambda g: _mixed_jacobians(traced, leaves, mixed, g))(found) if mixed else {}
    for share in plan:
        if share.mode == "jacobian" and share.sites:
            product = functools.partial(_product_jacobian, traced, share)
            made[share.leaf] = jax.vmap(product)(_at_sites(found, share.sites))
    return _at_sites(found, [n for s in plan if s.mode != "jacobian" for n in s.sites]), made


def _at_sites(found: Gradients, sites: Sequence[int]) -> Gradients:
    """Return what concerns these sites."""
    return Gradients({n: found.activations[n] for n in sites}, {n: found.cotangents[n] for n in sites}, {})


def coupled_factors(
    traced: Traced, plan: Sequence[Share], leaves: Sequence[Array], rows: int, chunk: int
) -> list[Factor]:
    """Return every share's factors for a function that maps the whole batch, whose samples depend on each other.

    Its positions run over the samples too: D tells how output c of sample t reacts to every position of every sample.

    Args:
        traced: the trace of (leaves, nothing) -> outputs (T, ...).
        plan: how each parameter's share is computed.
        leaves: the parameters.
        rows: T.
        chunk: rows of outputs pulled back at a time.
    """
    activations, pull = pullback(traced, leaves, ())
    each = traced.outputs // rows
    mixed = [s.leaf for s in plan if not s.sites]

    def some(index: Int[Array, " b"]) -> list[Array]:
        # unit cotangents of all outputs of these samples, (b C, T C)
        sample = jax.nn.one_hot(index, rows, dtype=traced.output.dtype)
        output = jnp.eye(each, dtype=traced.output.dtype)
        basis = (sample[:, None, :, None] * output[None, :, None, :]).reshape(-1, rows * each)
        mine = Gradients(activations, *jax.vmap(pull)(basis))
        made = _mixed_jacobians(traced, leaves, mixed, mine) if mixed else {}

        def part(share: Share) -> Array:
            if share.mode != "jacobian":
                return jnp.swapaxes(_cotangents(traced, share.sites, mine), -1, -2)
            return (_product_jacobian(traced, share, mine) if share.sites else made[share.leaf]).value

        return [a.reshape((index.shape[0], each) + a.shape[1:]) for a in map(part, plan)]

    parts = contraction.by_pieces(channels_last(some), jnp.arange(rows), chunk)
    # h is the same for all rows of outputs, and is taken once
    found = Gradients(activations, {}, {})
    form = lambda share, d: Coupled(_activations(traced, share.sites, found), d)
    return [Jacobian(d) if s.mode == "jacobian" else form(s, d) for s, d in zip(plan, parts, strict=True)]
