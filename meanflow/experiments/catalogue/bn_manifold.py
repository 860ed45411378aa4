"""Paper 001: batch norm as a Riemannian metric."""

from meanflow.experiments.catalogue.entry import Entry

DATA = "400 quasi-normal inputs with covariance diag(5, 1), target |x_1|, ReLU, plain descent"

ENTRIES = (
    Entry(
        "001/figure-1",
        "speed of neurons by direction, and their alignment with the wide axis, with and without batch norm",
        "batchnorm:figure_1",
        minutes=(0.2, 0.2),
        verdict="corrected",
        setup=f"{DATA} (eta = 0.01, 8000 steps); 50 neurons with equispaced directions, |b| = 1. The paper gives "
        "neither teacher, width, step nor start.",
        picture="speed_profiles",
    ),
    Entry(
        "001/figure-2",
        "neurons with |b| = 1 and |b| = 10 in one network: the short ones turn first",
        "batchnorm:figure_2",
        minutes=(0.2, 0.2),
        verdict="corrected",
        setup=f"{DATA} (eta = 0.01, 10000 steps); 25 neurons of each norm with the same directions.",
        picture="two_scales",
    ),
    Entry(
        "001/figure-3",
        "first-step amplification: norms of 40 neurons after one step of descent",
        "batchnorm:figure_3",
        verdict="corrected",
        setup=f"{DATA} (eta = 0.1, 200 steps); norms from 1e-3 to 1, log-spaced.",
    ),
    Entry(
        "001/learning-rate-sensitivity",
        "final loss against the learning rate (section 4.2)",
        "batchnorm:learning_rates",
        minutes=(0.2, 0.2),
        verdict="corrected",
        setup=f"{DATA}, 1000 steps at seven rates; batch norm, batch norm with mixed norms, vanilla.",
    ),
    Entry(
        "001/theorem-3",
        "raw batch norm and the flow on the manifold give the same function (theorems 2 and 3)",
        "batchnorm:equivalence",
        minutes=(0.3, 0.3),
        verdict="corrected",
        setup="12 tanh neurons, 300 points in 3 dimensions with mean 1.5, t in [0, 20], tolerance 1e-11.",
    ),
    Entry(
        "001/theorem-4",
        "finite networks approach the mean-field limit: function error against the width",
        "batchnorm:theorem_4",
        small={"largest": 10},
        minutes=(1.6, 6.5),
        setup="ring of 128 points with covariance diag(5, 1), tanh, t = 5; reference: quadrature with 48 x 256 nodes.",
    ),
    Entry(
        "001/theorem-4-bounds",
        "the estimates inside the proof of theorem 4, with their slack",
        "batchnorm:theorem_4_bounds",
        minutes=(0.2, 0.2),
        verdict="corrected",
        setup="256 neurons, the problem of theorem 4, t in [0, 5].",
    ),
    Entry(
        "001/theorem-5",
        "a separating start reaches the global minimum, an arc gets stuck",
        "batchnorm:theorem_5",
        minutes=(0.3, 0.3),
        verdict="confirmed",
        setup="64 neurons with a = 0 on the circle or on an arc, three-neuron softplus teacher, t = 300.",
    ),
)
