"""The processes of a job, all of which must be gone when the job is, and what they share."""

from __future__ import annotations

import contextlib
import ctypes
import glob
import os
import pathlib
import signal
import time

import psutil

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_FOLDER = "/dev/shm/"  # noqa: S108 (files are only removed here)
# What the names of the files begin with, in which MPI libraries share memory between ranks.
_UNUSED_SECONDS = 0.2
_SHARED_MEMORY = ("mpich_shm_", "sm_segment.", "vader_segment.", "ucx_shm_")


def die_with_parent(parent: int, number: int = signal.SIGKILL) -> None:
    """Has the system kill the calling process, or send it a signal, once its parent is gone."""
    _prctl(_PR_SET_PDEATHSIG, number)
    if os.getppid() != parent:
        os.kill(os.getpid(), number)


def adopt_orphans() -> None:
    """Makes the calling process the parent of all its descendants that lose theirs.

    So they can still be found when the process that started them is dead.
    """
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def describe_exit(status: int) -> str:
    """Returns in words how a process ended, from `subprocess`'s return code."""
    if status >= 0:
        return f"ended with exit code {status}"
    names = {number.value: number.name for number in signal.Signals}
    return f"killed by {names.get(-status, f'signal {-status}')}"


def _prctl(option: int, value: int) -> None:
    ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0)


def start_of_process() -> float:
    """Returns when this process began, by the system's clock and a second early."""
    return float(psutil.Process().create_time()) - 1.0


def remove_unused_shared_memory(since: float) -> None:
    """Removes the shared-memory files of MPI that no process has mapped any more.

    A killed rank does not remove its own, and the memory stays taken until a reboot.
    """
    if unused := _unused_shared_memory(since):
        time.sleep(_UNUSED_SECONDS)  # another job makes a file first, and then maps it
        for path in unused & _unused_shared_memory(since):
            with contextlib.suppress(OSError):
                os.unlink(path)


def _unused_shared_memory(since: float) -> set[str]:
    files = {}
    for path in pathlib.Path(_FOLDER).glob("*"):
        with contextlib.suppress(OSError):
            status = path.stat()
            ours = status.st_uid == os.getuid() and status.st_ctime >= since
            if ours and path.name.startswith(_SHARED_MEMORY):
                device = f"{os.major(status.st_dev):02x}:{os.minor(status.st_dev):02x}"
                files[device, str(status.st_ino)] = str(path)
    for maps in glob.glob("/proc/[0-9]*/maps") if files else ():
        with contextlib.suppress(OSError):
            for line in pathlib.Path(maps).read_text().splitlines():
                if _FOLDER in line:
                    _, _, _, device, inode, _ = line.split(maxsplit=5)
                    files.pop((device, inode), None)
    return set(files.values())


def kill_descendants(patience: float = 0.0, seconds: float = 3.0) -> list[int]:
    """Kills everything the calling process has started, directly or not.

    It may end by itself before, which is cleaner, for so long.
    """
    start, me = time.monotonic(), psutil.Process()
    while True:
        alive = [child for child in me.children(recursive=True) if is_alive(child)]
        waited = time.monotonic() - start
        if not alive or waited > patience + seconds:
            return [child.pid for child in alive]
        for child in alive if waited >= patience else ():
            with contextlib.suppress(psutil.NoSuchProcess):
                child.kill()
        time.sleep(0.02)
        _reap()


def _reap() -> None:
    """Takes the exit codes of ended children, adopted ones included."""
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


def is_alive(process: psutil.Process) -> bool:
    """Whether a process runs: it has neither gone nor ended without being missed yet."""
    try:
        return bool(process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False
