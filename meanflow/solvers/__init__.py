"""Solvers in continuous and discrete time."""
