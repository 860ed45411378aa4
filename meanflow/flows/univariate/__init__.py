"""Univariate ReLU networks: function space, attractors, forces."""

from meanflow.flows.univariate import knots as knots
