"""Solvers of the partition problem: exact where the down-sets can be listed, bounded elsewhere."""
