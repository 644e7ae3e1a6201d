"""A batch on its way: read, cut into micro-batches, scored, told as logs."""
