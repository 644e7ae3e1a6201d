"""Ends a job when one of its ranks fails, for MPI knows nothing of Python's exceptions.

An uncaught exception on one rank leaves the others waiting for its messages for ever. Under
`tarantella` the guard of a rank reports how it ended, and the launcher ends the job. Under plain
`mpiexec` the guard says it itself, and calls `MPI_Abort`.
"""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import os
import socket
import sys
import threading
import time
import traceback
import types
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

from tarantella_pp.launch.cause import calling_line, describe
from tarantella_pp.launch.records import FAILED, RETURNED, STARTED, headline

# How long mpiexec gets to pass a rank's last words on before the job is aborted.
_FORWARD_SECONDS = 0.3
_TURN_SECONDS = 0.5
_MOST_TURNS = 10

_guard: Guard | None = None


class Guard:
    """Watches over one rank of a job, and reports changes of its record."""

    def __init__(self, rank: int, size: int, report: Callable[..., object]) -> None:
        self.rank = rank
        self.size = size
        self.state = STARTED
        self.exit_code = 0
        self.hidden: Any = None  # counts the lines that this rank has printed and nobody saw
        self._report = report
        self._pid = os.getpid()
        self._lock = threading.Lock()

    def start(self) -> None:
        """Makes this the guard of this process, and hooks into uncaught exceptions."""
        global _guard
        _guard = self
        sys.excepthook = self._on_exception
        threading.excepthook = self._on_thread_exception

    def fail(self, error: BaseException | None, cause: str, exit_code: int) -> None:
        """Reports that this rank has failed."""
        details = "" if error is None else "".join(traceback.format_exception(error))
        self._end(FAILED, exit_code & 0xFF or 1, cause=cause, details=details)

    def leave(self, cause: str) -> None:
        """Reports that the script of this rank has ended normally."""
        self._end(RETURNED, 0, cause=cause, met="mpi4py.MPI" in sys.modules)

    def waits_for_mpi(self, place: str) -> None:
        """Reports where this rank waits until all others start MPI; nowhere once they have."""
        if self._is_alive():
            self._report(starts_mpi=place)

    def _end(self, state: str, exit_code: int, **fields: object) -> None:
        with self._lock:
            if self._is_alive():
                self.state, self.exit_code = state, exit_code
                lines = self.hidden.lines if self.hidden is not None else 0
                self._report(
                    state=state, exit_code=exit_code, starts_mpi="", hidden_lines=lines, **fields
                )

    def _is_alive(self) -> bool:
        """Whether this is the rank itself, not a process it forked, and it has not ended."""
        return self._pid == os.getpid() and self.state == STARTED

    def _on_exception(
        self, kind: type[BaseException], error: BaseException, trace: types.TracebackType | None
    ) -> None:
        if self._pid != os.getpid():
            sys.__excepthook__(kind, error, trace)
            return
        self.fail(error, describe(error), exit_code_of(error))

    def _on_thread_exception(self, arguments: threading.ExceptHookArgs) -> None:
        error = arguments.exc_value
        if error is None or isinstance(error, SystemExit):
            return
        name = arguments.thread.name if arguments.thread is not None else "unknown"
        self.fail(error, describe(error, f"in thread {name}"), exit_code_of(error))


def install(rank: int, size: int, abort: Callable[[int], object]) -> None:
    """Makes an uncaught exception or `sys.exit(5)` of this rank end the whole job.

    To be called on every rank when MPI is first used. Does nothing under `tarantella`, which has
    done so before the script began, and in a job of one rank.
    """
    if _guard is not None or size == 1:
        return

    def end_job(**record: Any) -> None:
        if record.get("state") != FAILED:
            return
        # Where all ranks have failed together, as for an option that none of them takes, the first
        # one ends the job before the others have their turn.
        time.sleep(_TURN_SECONDS * min(rank, _MOST_TURNS))
        with contextlib.suppress(OSError, ValueError):
            sys.stdout.flush()
            who = headline(rank, size, socket.gethostname(), record["cause"])
            sys.stderr.write(f"{record['details']}{who}\n")
            sys.stderr.flush()
        time.sleep(_FORWARD_SECONDS)
        abort(record["exit_code"])
        os._exit(record["exit_code"])

    guard = Guard(rank, size, end_job)
    guard.start()
    _watch_exit(guard)


@contextlib.contextmanager
def starting_mpi(timeout: float) -> Iterator[None]:
    """Surrounds the start of MPI, which holds Python's lock until all ranks have come.

    So only a thread that is not Python's can end a wait that takes too long: faulthandler's.
    """
    if limited := timeout > 0 and sys.__stderr__ is not None:
        faulthandler.dump_traceback_later(timeout, exit=True, file=sys.__stderr__)
    if _guard is not None:
        _guard.waits_for_mpi(calling_line() or "its first use of MPI")
    try:
        yield
    finally:
        if limited:
            faulthandler.cancel_dump_traceback_later()
        if _guard is not None:
            _guard.waits_for_mpi("")


def _watch_exit(guard: Guard) -> None:
    """Has the guard learn with which code Python exits.

    Python does not tell the functions it calls at exit, hence the wrapper of `sys.exit`.
    """
    codes: list[object] = []
    python_exit = sys.exit

    def exit_with(code: object = None, /) -> NoReturn:
        codes.append(code)
        python_exit(code)  # type: ignore[arg-type]

    def at_exit() -> None:
        code = codes[-1] if codes else None
        if code not in (None, 0):
            guard.fail(None, f"sys.exit({code!r})", code if isinstance(code, int) else 1)

    sys.exit = exit_with
    atexit.register(at_exit)


def exit_code_of(error: BaseException) -> int:
    """Returns the exit code Python itself gives to an uncaught exception."""
    return 130 if isinstance(error, KeyboardInterrupt) else 1
