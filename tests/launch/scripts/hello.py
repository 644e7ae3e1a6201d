"""Prints who it is and what it was given."""

import os
import sys

from mpi4py import MPI

comm = MPI.COMM_WORLD
comm.Barrier()
print("hello", comm.rank, comm.size, *sys.argv[1:])
print("main", __name__, os.path.basename(sys.path[0]), os.path.basename(sys.argv[0]))
print("threads", os.environ["OMP_NUM_THREADS"], os.environ.get("GREETING", ""))
sys.stderr.write(f"warning of rank {comm.rank}\n")
