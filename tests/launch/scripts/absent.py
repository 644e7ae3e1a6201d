"""Rank 1 of plain `mpiexec` ends, or sleeps, and never starts MPI.

absent.py HOW
"""

import os
import sys
import time

import tarantella_pp as tnt

if int(os.environ.get("PMI_RANK") or os.environ["OMPI_COMM_WORLD_RANK"]) == 1:
    time.sleep(60 if sys.argv[1] == "sleep" else 0)
    sys.exit(0)
tnt.init()
