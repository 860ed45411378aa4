"""Which observables a sweep records: the model's own, some of them, or some of the user's beside them."""

from collections.abc import Mapping

from meanflow.flows.observables import Observable, Observe, as_observable, named
from meanflow.sweeps.labels import PLAIN


def choose(observe: Observe, defaults: Mapping[str, Observable]) -> dict[str, Observable]:
    """Return the observables behind the argument ``observe`` of a sweep, by name.

    Args:
        observe: None for the defaults. A sequence of names: these of the defaults and of those on request;
            ``"default"`` stands for all defaults. A dict: the defaults and these; a name mapped to None is left out.
        defaults: what the model offers, ``flow.observables(data)``.
    """
    if observe is None:
        return dict(defaults)
    if isinstance(observe, Mapping):
        chosen = dict(defaults)
        for name, one in observe.items():
            if name in PLAIN:
                raise ValueError(f"observe must not use the name {name!r}, which every sweep records itself")
            if one is None:
                chosen.pop(name, None)
            else:
                chosen[name] = as_observable(f"observe[{name!r}]", one)
        return chosen
    if not isinstance(observe, str | list | tuple):
        raise ValueError(f"observe must be None, names or a dict of observables, got {observe!r}")
    names = [observe] if isinstance(observe, str) else list(observe)
    everything = dict(defaults) if "default" in names else {}
    return everything | named([name for name in names if name != "default"], defaults)
