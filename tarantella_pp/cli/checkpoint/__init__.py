"""What `tarantella checkpoint` does with the checkpoints of a run."""
