"""How a process ends with its parent, adopts orphans, and what its exit status means."""

from __future__ import annotations

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36


def die_with_parent(parent: int) -> None:
    """Has the system kill the calling process as soon as its parent is gone."""
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if sys.platform == "linux" and os.getppid() != parent:
        os.kill(os.getpid(), signal.SIGKILL)


def adopt_orphans() -> None:
    """Makes the calling process the parent of all its descendants that lose theirs.

    So they can still be found when the process that started them is dead.
    """
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def describe_exit(status: int) -> str:
    """Returns in words how a process ended, from `subprocess`'s return code."""
    if status < 0:
        return f"killed by {signal_name(-status)}"
    return f"ended with exit code {status}"


def signal_name(number: int) -> str:
    """Returns `"SIGKILL"` for 9, and so on."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _prctl(option: int, value: int) -> None:
    """Calls prctl where there is one; elsewhere the job is supervised without it."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0)
