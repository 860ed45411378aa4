"""The base class of models, their parts, clouds and data: equinox modules with plain methods."""

import equinox as eqx


class Module(eqx.Module):
    """An equinox module that hands out its methods as Python does.

    ``equinox.Module`` makes a pytree of a method each time one is looked up, so that jit may take it as an argument.
    That takes 23 us, and a small eager call such as ``mf.velocity`` looks up a dozen: longer than its program runs.
    Nothing in the package passes methods of these classes to jit; whoever wants to passes a lambda.

    >>> class Pair(Module):
    ...     left: float
    ...     def double(self):
    ...         return 2 * self.left
    >>> type(Pair(3.0).double).__name__
    'method'
    """

    __getattribute__ = object.__getattribute__
