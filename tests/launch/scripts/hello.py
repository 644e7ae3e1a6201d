"""The last rank prints what it was given, and all of them log as TensorFlow and the library do."""

import logging
import os
import sys

from mpi4py import MPI

comm = MPI.COMM_WORLD
comm.Barrier()
read = f"read {comm.bcast(0 if sys.stdin.isatty() else len(sys.stdin.read()))}"
print("hello", comm.rank, comm.size, *sys.argv[1:])
print("main", __name__, os.path.basename(sys.path[0]), os.path.basename(sys.argv[0]))
threads, gpu = os.environ["OMP_NUM_THREADS"], os.environ.get("CUDA_VISIBLE_DEVICES")
words = " ".join(repr(os.environ.get(name)) for name in ("GREETING", "B", "C"))
print(f"threads {threads}, {os.environ.get('A')} {words}, gpu {gpu}, -O {sys.flags.optimize}", read)
sys.stderr.write(
    "I0000 00:00:1795359673.039961   13910 port.cc:153] oneDNN custom operations are on.\n"
)
logging.getLogger("tarantella_pp.stage").info("info told")
logging.getLogger("tarantella_pp.stage").warning("warning told")
