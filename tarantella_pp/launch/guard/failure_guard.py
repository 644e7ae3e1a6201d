"""Keeps a job from hanging when one of its ranks fails or leaves early.

An uncaught exception on one rank leaves the others waiting for its messages for ever, for MPI
knows nothing of Python's exceptions. The guard of a rank puts on record how the rank ended, which
the other ranks and the launcher learn, and tells when the rank waits for one that has ended.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import sys
from collections.abc import Callable, Iterable
from typing import NoReturn

from tarantella_pp.errors import LaunchError
from tarantella_pp.launch.channel.joining import Whereabouts, join
from tarantella_pp.launch.channel.rank_records import RankRecords
from tarantella_pp.launch.guard import start_watch
from tarantella_pp.launch.guard.cause import calling_line
from tarantella_pp.launch.guard.guarded_rank import Guard, PeerFailedError
from tarantella_pp.launch.guard.start_watch import LOCAL_SIZES

__all__ = ["Guard", "PeerFailedError", "adopt", "check", "install", "starting_mpi"]

_guard: Guard | None = None


def install(
    rank: int,
    size: int,
    abort: Callable[[int], object] | None = None,
    share: Callable[[str], str] | None = None,
) -> None:
    """Makes an uncaught exception or an early exit of this rank end the whole job.

    To be called on every rank when MPI is first used. Does nothing the second time, and nothing
    in a job of one rank.
    """
    global _guard
    if _guard is not None or size == 1:
        return
    records = None if share is None else _shared_records(rank, size, share)
    _guard = Guard(rank, size, records, abort)
    _guard.start()
    _watch_exit(_guard)


def adopt(guard: Guard) -> None:
    """Makes `guard` the one of this process, for the launcher's worker."""
    global _guard
    _guard = guard


def starting_mpi(warn: float, timeout: float) -> contextlib.AbstractContextManager[None]:
    """Returns a block in which this rank starts MPI: for the records of a job of `tarantella`."""
    if _guard is not None:
        return _guard.starting_mpi()
    return start_watch.watched(calling_line() or "its first use of MPI", warn, timeout)


def check(peers: int | Iterable[int] | None = None) -> None:
    """Raises when a wait of this rank cannot end, because another rank has.

    For the inside of a polling wait: the records are looked at twice a second at most.
    """
    if _guard is not None:
        _guard.check(peers)


def _watch_exit(guard: Guard) -> None:
    """Puts the end of this process on record; MPI then waits for the other ranks.

    Python does not tell the functions it calls at exit with which code it exits, hence the
    wrapper of `sys.exit`.
    """
    codes: list[object] = []
    python_exit = sys.exit

    def exit_with(code: object = None, /) -> NoReturn:
        codes.append(code)
        python_exit(code)  # type: ignore[arg-type]

    def at_exit() -> None:
        code = codes[-1] if codes else None
        if code in (None, 0):
            guard.leave("sys.exit(0)" if codes else "its script ended")
        else:
            guard.fail(None, f"sys.exit({code!r})", code if isinstance(code, int) else 1)

    sys.exit = exit_with
    atexit.register(at_exit)


def _shared_records(rank: int, size: int, share: Callable[[str], str]) -> RankRecords | None:
    """Has rank 0 take the records of a job that has no launcher of ours; every rank joins it."""
    text = ""
    if rank == 0:
        from tarantella_pp.launch.channel.hub import Hub, HubThread

        local = any(os.environ.get(name) == str(size) for name in LOCAL_SIZES)
        hub = Hub(size, None if local else [])
        HubThread(hub)
        text = json.dumps([str(hub.whereabouts), hub.whereabouts.secret])
    try:
        line, welcome = join(Whereabouts.parse(*json.loads(share(text))), rank)
    except LaunchError as error:
        sys.stderr.write(f"tarantella: {error}; if it fails or leaves early, others may wait\n")
        return None
    return RankRecords(line, welcome.get("records"))
