"""The processes of a job, which must all be gone when the job is."""

from __future__ import annotations

import contextlib
import ctypes
import os
import pathlib
import re
import shutil
import signal
import socket
import tempfile
import time
from collections.abc import Iterable, Iterator

import psutil

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
# After which no rank can be about to read a file of Hydra, which it does as it starts.
_STALE_SECONDS = 60.0
# In which MPICH and Open MPI share memory between the ranks of a host.
_SHARED_MEMORY = re.compile(r"/dev/shm/(?:mpich_shm_|sm_segment\.)\S+")  # noqa: S108


def die_with_parent(parent: int, number: int = signal.SIGKILL) -> None:
    """Has the system kill the calling process, or send it a signal, once its parent is gone."""
    _prctl(_PR_SET_PDEATHSIG, number)
    if os.getppid() != parent:
        os.kill(os.getpid(), number)


def adopt_orphans() -> None:
    """Makes this process the parent of descendants that lose theirs, so that they are found."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def describe_exit(status: int) -> str:
    """Returns in words how a process ended, from `subprocess`'s return code."""
    if status >= 0:
        return f"ended with exit code {status}"
    names = {number.value: number.name for number in signal.Signals}
    return f"killed by {names.get(-status, f'signal {-status}')}"


def _prctl(option: int, value: int) -> None:
    ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0)


def shared_memory() -> set[str]:
    """Returns files in which this and lower processes share memory, which stay if it is killed."""
    found: set[str] = set()
    for process in (me := psutil.Process(), *me.children(recursive=True)):
        with contextlib.suppress(OSError):
            maps = pathlib.Path(f"/proc/{process.pid}/maps").read_text()
            found.update(_SHARED_MEMORY.findall(maps))
    return found


def remove(files: Iterable[str]) -> None:
    """Removes files; some may be gone."""
    for file in files:
        with contextlib.suppress(OSError):
            os.unlink(file)


def kill_descendants(patience: float = 0.0, seconds: float = 3.0) -> None:
    """Kills all descendants, which may first end by themselves, which is cleaner, for a while."""
    start, me = time.monotonic(), psutil.Process()
    while True:
        alive = [child for child in me.children(recursive=True) if is_alive(child)]
        waited = time.monotonic() - start
        if not alive or waited > patience + seconds:
            return
        for child in alive if waited >= patience else ():
            with contextlib.suppress(psutil.NoSuchProcess):
                child.kill()
        time.sleep(0.02)
        reap()


def reap(child: int | None = None) -> int | None:
    """Takes the exit codes of ended children, adopted ones included; returns that of one."""
    found = None
    with contextlib.suppress(ChildProcessError):
        while (ended := os.waitpid(-1, os.WNOHANG))[0]:
            if ended[0] == child:
                found = os.waitstatus_to_exitcode(ended[1])
    return found


def is_alive(process: psutil.Process) -> bool:
    """Whether a process runs: it has neither gone nor ended without being missed yet."""
    try:
        return bool(process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def sweep() -> None:
    """Removes what killed jobs have left in the temporary folder, which hosts may share."""
    ours = re.compile(rf"{re.escape(_prefix())}(\d+)-\w+")  # not of a host `NAME-2`
    for folder in pathlib.Path(tempfile.gettempdir()).glob("tarantella-*"):
        found = ours.fullmatch(folder.name)
        if found is not None and not psutil.pid_exists(int(found[1])):
            shutil.rmtree(folder, ignore_errors=True)
    for file in pathlib.Path("/tmp").glob("hydra_hwloc_xmlfile_*"):  # noqa: S108 - of MPICH
        with contextlib.suppress(OSError):
            if time.time() - file.stat().st_mtime > _STALE_SECONDS:
                file.unlink()


@contextlib.contextmanager
def job_folder() -> Iterator[str]:
    """Makes a temporary folder of this process, whose name says so to a later `sweep`."""
    sweep()
    prefix = f"{_prefix()}{os.getpid()}-"
    with tempfile.TemporaryDirectory(prefix=prefix, ignore_cleanup_errors=True) as folder:
        yield folder


def _prefix() -> str:
    return f"tarantella-{socket.gethostname()}-"
