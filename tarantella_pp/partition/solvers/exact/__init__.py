"""Solvers that prove their plan the best: dynamic programs over ideals."""
