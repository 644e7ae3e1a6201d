"""Prints the cores of each rank, a line for each."""

import os

from mpi4py import MPI

comm = MPI.COMM_WORLD
for cores in comm.allgather(sorted(os.sched_getaffinity(0))):
    print(*cores)
