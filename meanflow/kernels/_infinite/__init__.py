"""Infinite width: dual activations, order parameters, and the kernels and spectra they predict."""
