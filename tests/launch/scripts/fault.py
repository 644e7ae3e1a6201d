"""A rank that fails in the way it is told to, and others that wait for it.

    fault.py FAULT WAIT [--guard]

Rank 1 does FAULT; all other ranks, and that one if FAULT is "none", do WAIT.
"""

import os
import signal
import subprocess
import sys
import threading
import time

from mpi4py import MPI

fault, wait = sys.argv[1:3]
comm = MPI.COMM_WORLD
if "--guard" in sys.argv:
    from tarantella_pp.runtime.comm.communicator import world

    world()  # which installs the guard
comm.Barrier()
if comm.rank == 0:
    sys.stderr.write("ready\n")
    sys.stderr.flush()


def fail() -> None:
    time.sleep(0.2)
    if fault == "orphan":
        subprocess.Popen(["setsid", "sleep", "60"])
    if fault in ("raise", "orphan"):
        raise ValueError("a bad apple")
    if fault == "exit75":
        sys.exit(75)
    if fault in ("_exit0", "_exit5"):
        os._exit(int(fault[5:]))
    if fault == "keeper":
        os.kill(os.getppid(), signal.SIGKILL)
        time.sleep(60)
    if fault == "sigkill":
        os.kill(os.getpid(), signal.SIGKILL)
    if fault == "interrupt":
        raise KeyboardInterrupt
    if fault == "thread":
        threading.Thread(target=lambda: 1 / 0).start()
        time.sleep(60)


if comm.rank == 1:
    fail()
elif wait == "recv":
    comm.recv(source=1, tag=7)
elif wait == "barrier":
    comm.Barrier()
elif wait == "work":
    time.sleep(60)
if fault == "none" and comm.rank == 1:
    subprocess.Popen(["sleep", "60"])  # goes with the rank that has started it
    time.sleep(60)
