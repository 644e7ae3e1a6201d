"""Rank 1 comes too late to meet the others, which wait for all ranks."""

import os
import time

import tarantella_pp as tnt

rank = int(os.environ.get("PMI_RANK") or os.environ["OMPI_COMM_WORLD_RANK"])
if rank == 1:
    time.sleep(60)
else:
    tnt.barrier()
