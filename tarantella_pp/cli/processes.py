"""The processes of a job, all of which must be gone when the job is."""

from __future__ import annotations

import contextlib
import os
import time

import psutil


def kill_descendants(seconds: float = 3.0) -> list[int]:
    """Kills everything the calling process has started, directly or not.

    Args:
        seconds: How long to wait for the last of them to go.

    Returns:
        Process ids of those that were still there, which only happens to a process that hangs
        inside the kernel.
    """
    deadline = time.monotonic() + seconds
    me = psutil.Process()
    while True:
        alive = [child for child in me.children(recursive=True) if _is_running(child)]
        if not alive or time.monotonic() > deadline:
            return [child.pid for child in alive]
        for child in alive:
            with contextlib.suppress(psutil.NoSuchProcess):
                child.kill()
        time.sleep(0.02)
        _reap()


def _is_running(process: psutil.Process) -> bool:
    try:
        return bool(process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def _reap() -> None:
    """Takes the exit codes of ended children, adopted ones included."""
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
