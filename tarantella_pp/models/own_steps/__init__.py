"""Replicas of a training step of the user's: traced, tried out, and run on shares of a batch."""
