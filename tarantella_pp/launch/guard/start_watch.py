"""Watches from outside a rank that starts MPI, which holds Python's lock until all have come.

Ranks that `tarantella` has started have records. Without it nobody misses a rank that has ended
before it came to MPI, unless the launcher's processes on this host are counted::

    mpiexec    rank 0   starts MPI, and waits for ever
               rank 1   sys.exit(0)
               watch    1 of 2 processes has ended: says so, and ends rank 0; mpiexec ends the job
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator

import psutil

LOOK_SECONDS = 0.5
"""How often processes are counted."""
GRACE_SECONDS = 5.0
"""How long one may be missing: a launcher takes its time to start them."""

LAUNCHERS = ("hydra_pmi_proxy", "pmi_proxy", "prted", "prterun", "orted", "mpirun", "mpiexec")
LOCAL_SIZES = ("MPI_LOCALNRANKS", "OMPI_COMM_WORLD_LOCAL_SIZE")
_ADVICE = (
    "All ranks must come to the first call that joins them, such as `tnt.init()` or a "
    "PipelineModel: none may end before, or have it behind an `if`."
)


@contextlib.contextmanager
def watched(place: str, warn: float, timeout: float) -> Iterator[None]:
    """Has a process look after this rank while it starts MPI."""
    if not sys.executable or getattr(sys, "frozen", False):  # what would start is no Python
        yield
        return
    command = [sys.executable, __file__, str(os.getpid()), place, str(warn), str(timeout)]
    try:
        watch = subprocess.Popen(command, stdin=subprocess.PIPE)
    except OSError:  # it must not be the reason for a failure
        yield
        return
    try:
        yield
    finally:
        watch.kill()
        watch.communicate()


def main(pid: int, place: str, warn: float, timeout: float) -> None:
    """Watches a process until it closes the pipe, or cannot go on."""
    start, missing_since = time.monotonic(), 0.0
    while not select.select([sys.stdin], [], [], LOOK_SECONDS)[0]:
        now = time.monotonic()
        missing, size = missing_processes(pid)
        missing_since = missing_since or now if missing else 0.0
        if missing and now - missing_since >= GRACE_SECONDS:
            ended = f"{missing} of the {size} processes of the job on host {socket.gethostname()}"
            which = "`tarantella -n <ranks> -- <script>` says which rank it was, and why."
            _end(pid, f"{_waits(place)}, but {ended} ended before. {_ADVICE} {which}")
        if 0 < warn <= now - start:
            _say(f"{_waits(place)}, for {warn:.0f} s by now. {_ADVICE}")
            warn = 0.0
        if 0 < timeout <= now - start:
            limit = f"TNT_TIMEOUT={timeout:g}; 0 waits for ever"
            _end(pid, f"{_waits(place)} and gives up ({limit}). {_ADVICE}")


def missing_processes(pid: int) -> tuple[int, int]:
    """Counts the processes that the launcher of a rank has started on this host and that ended."""
    sizes = [os.environ[name] for name in LOCAL_SIZES if name in os.environ]
    if not sizes or not sizes[0].isdecimal():
        return 0, 0
    try:
        parents = psutil.Process(pid).parents()
        launcher = next((p for p in parents if p.name() in LAUNCHERS), None)
        alive = [] if launcher is None else [*filter(is_alive, launcher.children())]
    except psutil.Error:
        return 0, 0
    size = int(sizes[0])
    return (max(size - len(alive), 0), size) if alive else (0, 0)


def is_alive(process: psutil.Process) -> bool:
    """Whether a process runs: it has neither gone nor ended without being missed yet."""
    try:
        return bool(process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def _waits(place: str) -> str:
    return f"a rank waits at {place} for all others to start MPI"


def _say(text: str) -> None:
    sys.stderr.write(f"tarantella: {text}\n")
    sys.stderr.flush()


def _end(pid: int, text: str) -> None:
    """Says why, and ends the rank; what started it ends the others."""
    _say(text)
    for number in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)
        time.sleep(1.0)
    sys.exit(1)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], float(sys.argv[3]), float(sys.argv[4]))
