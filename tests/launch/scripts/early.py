"""Rank 1 ends in the way it is told to, before it has met the others; these wait for all ranks.

    early.py HOW

Of three ranks or more, the last one works on for a long time first.
"""

import os
import sys
import time

import tarantella_pp as tnt

how, size = sys.argv[1], int(os.environ["TNT_NUM_RANKS"])
rank = int(os.environ[os.environ["TNT_RANK_FROM"]])
if rank == 1:
    if how == "exit0":
        sys.exit(0)
    if how == "_exit0":
        os._exit(0)
    if how == "met":
        from mpi4py import MPI  # noqa: F401
elif 1 < rank == size - 1:
    time.sleep(60)
if rank != 1:
    tnt.barrier()
