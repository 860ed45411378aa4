"""Infinite width: the kernels of any network, from its trace, and the order parameters of dense ones.

How a call of ``infinite_width`` goes through the modules, in the order in which they are best read:

    width           what users call; one trace, followed for a pair of samples, mapped over all pairs
      laws            variances of the parameters: given, or read from the function that draws them
      fields          what a value of the trace is: a constant, a parameter, or a field made of atoms
      rules           what each operation does to them
      tables          second moments and tangent kernels of atoms, computed when they are asked for
      expect          expectations over Gaussians: closed forms, Hermite series, points

    dual            dual activations in closed form or by a trapezoid rule, which two-layer flows use, too
    mean_field      order parameters of dense networks
"""
