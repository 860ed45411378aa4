"""Motion of single neurons through the kinks of a piecewise linear activation, while the residual is frozen.

From the solver down to one event; each module uses those below it only:

    two_layer   ``TwoLayerMotion``, ``NormalizedMotion``: what ``solver="sliding"`` asks of a model, for vector inputs
    planes      one event of neurons a s(b . x): decide at the planes they sit on, then move on in closed form
    turning     one event of neurons under batch norm, where the way to the next plane is integrated
    contacts    on which side of which planes a neuron is, and on which it sits; shared by ``planes`` and ``turning``
    filippov    the rule: which planes does a neuron leave, and on which does it slide
    cell        the closed form of the motion between planes
    passage     the loop that carries all neurons through all their events, its derivatives, and the counts of events

One input has motions of its own (``meanflow.univariate._motion`` and ``events``), with the same loop and closed form.
"""
