"""A batch on its way: read once, cut into micro-batches, announced to all ranks."""
