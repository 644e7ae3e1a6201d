"""Prints the rank that MPI gives it, and the one that the launcher counts it for."""

import tarantella_pp as tnt
from tarantella_pp.launch.records import RANK_VARIABLE, number_from

tnt.barrier()
print(f"rank {tnt.get_rank()} of {tnt.get_size()}, recorded {number_from(RANK_VARIABLE)}")
