"""Motion of single neurons through the kinks of a piecewise linear activation, while the residual is frozen."""
