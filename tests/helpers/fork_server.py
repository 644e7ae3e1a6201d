"""A process that has loaded TensorFlow, and forks: its ranks run at once, not after four seconds.

    test -> mpiexec -> client, one for each rank -> server -> keeper -> rank
            (starts)   (this file, as mpiexec        (forks)   (forks)
                        takes it for the rank)

The client hands over its arguments, environment and open files, so that the rank is to MPI and to
the test what the client would be. The keeper tells the client how the rank has ended, and the
client ends in the same way; if the client is killed, the keeper kills the rank. The server has
started nothing of TensorFlow and MPI, and has read no option of the package from its environment:
each rank does so itself.

To save time, ranks differ from a process of their own in one way: once the script has ended well,
and what it has registered for its end has run, the interpreter frees no objects.
"""

import atexit
import contextlib
import ctypes
import fcntl
import importlib
import json
import os
import random
import runpy
import select
import signal
import socket
import sys
import threading

RANKS = ("PMI_RANK", "OMPI_COMM_WORLD_RANK")
SIZE_BYTES, MOST_FILES = 8, 100
LOADED = (
    *("hypothesis", "pytest", "tarantella_pp.callbacks"),
    *("tarantella_pp.models.data_parallel_model", "tests.helpers.training"),
)
"""Modules that most ranks import."""
FIRST_FREE = 1000
"""Descriptors from here on are free in a rank, until it has its client's."""


def run_in_fork(sockets: list[str], arguments: list[str]) -> None:
    """Has a server run a script, and ends as that ends."""
    rank = next(int(os.environ[name]) for name in RANKS if name in os.environ)
    here = "/proc/self/fd/"
    # But for that of the listing itself
    files = [int(name) for name in os.listdir(here) if os.path.lexists(here + name)]
    # Neighbouring ranks use different servers: forks of one have their sets of strings in the same
    # order, which ranks need not have.
    with socket.socket(socket.AF_UNIX) as server:
        server.connect("\0" + sockets[rank % len(sockets)])
        request = json.dumps([arguments, dict(os.environ), os.getcwd(), files]).encode()
        socket.send_fds(server, [len(request).to_bytes(SIZE_BYTES, "big")], files)
        server.sendall(request)
        code = int(server.recv(SIZE_BYTES) or 1)
    if code < 0:
        os.kill(os.getpid(), -code)
    os._exit(code)


def serve(listener: socket.socket) -> None:
    """Runs scripts in forks until stdin is closed."""
    _load()
    with listener:
        signal.signal(signal.SIGCHLD, _reap)
        while listener in select.select([listener, sys.stdin], [], [])[0]:
            client, _ = listener.accept()
            if os.fork() == 0:
                listener.close()
                _keep(client)
                return
            client.close()


def _reap(*unused: object) -> None:
    """Has the time that ended keepers and ranks took counted as that of the session."""
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


def _load() -> None:
    """Loads what takes long and is not what tests are about."""
    import gc

    import tensorflow as tf  # noqa: F401

    for name in LOADED:
        importlib.import_module(name)
    gc.collect()
    gc.freeze()  # a collection in a fork would copy every page


def _keep(client: socket.socket) -> None:
    """Runs a client's script in a fork, where it returns; here it ends the process."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    size, files, _, _ = socket.recv_fds(client, SIZE_BYTES, MOST_FILES)
    with client.makefile("rb") as rest:
        request = json.loads(rest.read(int.from_bytes(size, "big")))
    rank = os.fork()
    if rank == 0:
        client.close()
        _run(*request, files)
        return
    for file in files:
        os.close(file)
    if client in select.select([os.pidfd_open(rank), client], [], [])[0]:
        os.kill(rank, signal.SIGKILL)
    code = os.waitstatus_to_exitcode(os.waitpid(rank, 0)[1])
    with contextlib.suppress(OSError):  # of a client that is gone
        client.sendall(str(code).encode())
    os._exit(0)


def _run(
    arguments: list[str],
    environment: dict[str, str],
    folder: str,
    numbers: list[int],
    files: list[int],
) -> None:
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: with the keeper it ends, too
    moved = [fcntl.fcntl(file, fcntl.F_DUPFD_CLOEXEC, FIRST_FREE) for file in files]
    os.closerange(3, FIRST_FREE)
    for file, number in zip(moved, numbers, strict=True):
        os.dup2(file, number)
        os.close(file)
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    random.seed()
    sys.modules["numpy"].random.seed()
    sys.argv = arguments
    sys.path[0] = os.path.dirname(os.path.abspath(arguments[0]))
    runpy.run_path(arguments[0], run_name="__main__")
    _end()


def _end() -> None:
    """Ends a rank whose script has ended well, as the interpreter does, but frees no objects."""
    threading._shutdown()
    atexit._run_exitfuncs()
    mpi = sys.modules.get("mpi4py.MPI")
    if mpi and mpi.Is_initialized() and not mpi.Is_finalized():
        mpi.Finalize()
    sys.stdout.flush()
    sys.stderr.flush()
    ctypes.CDLL(None).exit(0)  # what C libraries have registered runs: mpiexec waits for MPI's


if __name__ == "__main__":
    if sys.argv[1] == "serve":
        serve(socket.socket(fileno=int(sys.argv[2])))
    else:
        run_in_fork(sys.argv[1].split(","), sys.argv[2:])
