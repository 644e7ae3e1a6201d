"""Rank 1 ends in the way it is asked to, before it has met the others; these wait for all ranks.

early.py HOW
"""

import os
import sys
import time

import tarantella_pp as tnt

rank = int(os.environ.get("PMI_RANK") or os.environ["OMPI_COMM_WORLD_RANK"])
if rank == 1:
    if sys.argv[1] == "_exit0":
        os._exit(0)
    time.sleep(60 if sys.argv[1] == "sleep" else 0)
else:
    tnt.barrier()
