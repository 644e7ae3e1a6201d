"""Prints the rank that MPI gives it, and the one under which the launcher keeps its record."""

import tarantella_pp as tnt
from tarantella_pp.launch.guard import failure_guard

tnt.barrier()
recorded = failure_guard._guard.record.rank
print(f"rank {tnt.get_rank()} of {tnt.get_size()}, recorded {recorded}")
