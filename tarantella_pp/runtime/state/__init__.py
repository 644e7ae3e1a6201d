"""Weights and optimizer state: which rank has them, trains them, sends them."""
