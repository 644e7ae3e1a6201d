"""Weights and optimizer state: which rank has them, trains, sums, shards and sends them."""
