"""Checkpoints as files: what is in them, whether they are whole, which is the newest."""
