"""Rank 1 comes too late to meet the others, before MPI starts, or with `started` after it.

With `ended` it meets them, and ends too late.
"""

import os
import sys
import time

import tarantella_pp as tnt

if "started" in sys.argv:
    from mpi4py import MPI  # noqa: F401
rank = int(os.environ.get("PMI_RANK") or os.environ["OMPI_COMM_WORLD_RANK"])
if "ended" in sys.argv:
    tnt.barrier()
    time.sleep(3 * rank)
    sys.stderr.write("ready\n" * rank)
    sys.stderr.flush()
    time.sleep(60 * rank)
elif rank == 1:
    time.sleep(60)
else:
    tnt.barrier()
