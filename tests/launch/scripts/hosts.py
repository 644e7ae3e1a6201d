"""Prints, for each rank, its host, its threads and what it finds in its environment."""

import os
import socket
import sys

from mpi4py import MPI

comm = MPI.COMM_WORLD
names = ("OMP_NUM_THREADS", *sys.argv[1:])
for found in comm.allgather([socket.gethostname(), *map(os.environ.get, names)]):
    print(*found)
