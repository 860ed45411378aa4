"""The tangent kernel of any JAX function at given parameters: as a matrix, as an operator, and its spectrum.

How a call of ``empirical_ntk`` goes through the modules, in the order in which they are best read:

    kernel          what users call: pytrees of inputs, output axes, groups of parameters, devices
    modules         networks as functions (params, batch) -> outputs, and batches as arrays
      adapters        modules of other libraries as such functions (NNX: ``nnx_modules``)
    coupling        do samples depend on each other? a probe, and what ``stats`` then means
    plan            ``Method``: which one is the fastest within the limit of memory
      cost            operations and numbers through memory, counted in the trace
      layout          how the structured method goes about it: contractions, samples and rows at a time
    ntk             evaluates the kernel by the chosen method
      structured      the kernel as a sum of shares, one a parameter
        sites           where a trace uses a parameter
        forms           every such use as one product y = h w
        contraction     from the factors h and D = df/dy of all samples to the kernel
        convolution     convolutions in the order of axes that CPUs are fast in

    visit           the one visitor of traces: a value for every variable, and the jaxprs that an equation runs;
                    ``cost``, ``sites``, ``convolution`` and ``coupling`` only say what is done at an equation

    operator        products with the kernel, without forming it
    spectra         eigenvalues and moments from such products

Letters are the same everywhere: T rows (samples of x) and S columns (samples of z) of the kernel, C outputs of the
network, and for one parameter G groups, P positions, K inputs and O outputs (``forms``).
"""
