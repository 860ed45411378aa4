"""The tangent kernel of any JAX function at given parameters: as a matrix, as an operator, and its spectrum."""
