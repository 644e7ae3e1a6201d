"""Rank 1 comes too late to meet the others, before MPI starts, or with `started` after it."""

import os
import sys
import time

import tarantella_pp as tnt

if "started" in sys.argv:
    from mpi4py import MPI  # noqa: F401
rank = int(os.environ.get("PMI_RANK") or os.environ["OMPI_COMM_WORLD_RANK"])
if rank == 1:
    time.sleep(60)
else:
    tnt.barrier()
