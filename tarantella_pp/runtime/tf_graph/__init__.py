"""Traced TensorFlow graphs: what depends on what, cut in three, called again."""
