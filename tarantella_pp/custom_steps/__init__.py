"""A user's own training steps and loops on all ranks: traced, tried, run on shares of a batch."""
