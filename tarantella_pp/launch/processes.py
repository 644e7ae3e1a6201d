"""The processes of a job, all of which must be gone when the job is."""

from __future__ import annotations

import contextlib
import glob
import os
import pathlib
import time

import psutil

from tarantella_pp.launch.guard.start_watch import is_alive

_FOLDER = "/dev/shm/"  # noqa: S108 (files are only removed here)
_SHARED_MEMORY = ("mpich_shm_", "sm_segment.", "vader_segment.", "ucx_shm_")
"""What the names of the files begin with, in which MPI libraries share memory between ranks."""


def shared_memory_of_descendants() -> set[str]:
    """Returns the shared-memory files of MPI that processes of the job have mapped.

    A killed rank does not remove its own, and the memory stays taken until a reboot.
    """
    found = set()
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(OSError):
            for line in pathlib.Path(f"/proc/{process.pid}/maps").read_text().splitlines():
                path = line.partition(_FOLDER)[2]
                if path.startswith(_SHARED_MEMORY):
                    found.add(_FOLDER + path.removesuffix(" (deleted)"))
    return found


def unused_shared_memory(since: float) -> set[str]:
    """Returns the shared-memory files of MPI that no process has mapped any more."""
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


def remove_shared_memory(paths: set[str]) -> None:
    """Removes shared-memory files, with those of ranks of the same job that were dead already."""
    for path in paths:
        stem, dot, rank = path.rpartition(".")
        siblings = glob.glob(f"{glob.escape(stem)}.*") if dot and rank.isdigit() else []
        for name in {path, *siblings}:
            with contextlib.suppress(OSError):
                os.unlink(name)


def kill_descendants(seconds: float = 3.0) -> list[int]:
    """Kills everything the calling process has started, directly or not."""
    deadline = time.monotonic() + seconds
    me = psutil.Process()
    while True:
        alive = [child for child in me.children(recursive=True) if is_alive(child)]
        if not alive or time.monotonic() > deadline:
            return [child.pid for child in alive]
        for child in alive:
            with contextlib.suppress(psutil.NoSuchProcess):
                child.kill()
        time.sleep(0.02)
        _reap()


def _reap() -> None:
    """Takes the exit codes of ended children, adopted ones included."""
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
