"""Normalisation layers for flax NNX, and the pure functions underneath."""
