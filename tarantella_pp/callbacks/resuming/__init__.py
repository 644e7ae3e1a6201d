"""How `Checkpoint` writes the state of a run, and `fit` goes on from it."""
