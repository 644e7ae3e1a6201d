"""Prints who it is and what it was given."""

import os
import sys

from mpi4py import MPI

comm = MPI.COMM_WORLD
comm.Barrier()
print("hello", comm.rank, comm.size, *sys.argv[1:])
print("main", __name__, os.path.basename(sys.path[0]), os.path.basename(sys.argv[0]))
print("threads", os.environ["OMP_NUM_THREADS"], os.environ.get("GREETING", ""))
native = "I0000 00:00:1795359673.039961   13910 port.cc:153] oneDNN custom operations are on.\n"
sys.stderr.write(f"{native}warning of rank {comm.rank}\n")
