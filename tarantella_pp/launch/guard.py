"""Ends a job when one of its ranks fails, for MPI knows nothing of Python's exceptions.

An uncaught exception on one rank leaves the others waiting for its messages for ever. Under
`tarantella` the guard of a rank reports how it ended, and the launcher ends the job. Under plain
`mpiexec` the guard says it itself, and calls `MPI_Abort`.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from typing import Any

from tarantella_pp.cause import describe
from tarantella_pp.launch.records import FAILED, RESTARTS_VARIABLE, RETURNED, STARTED, headline

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
        self._report = report
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._noted: dict[str, Any] = {}

    def start(self) -> None:
        """Makes this the guard of this process, and hooks into uncaught exceptions."""
        global _guard
        _guard = self
        sys.excepthook = self._on_exception
        threading.excepthook = self._on_thread_exception

    def note(self, fields: dict[str, Any]) -> None:
        """Keeps fields for the record of a failure; one rank reports how far all have come."""
        self._noted |= fields
        if self.rank == 0 and self._pid == os.getpid():
            self._report(**fields)

    def fail(self, error: BaseException | None, cause: str, exit_code: int | None = None) -> None:
        """Reports that this rank has failed, as a rule with the exit code of Python itself."""
        if exit_code is None:
            exit_code = 130 if isinstance(error, KeyboardInterrupt) else 1
        details = "" if error is None else "".join(traceback.format_exception(error))
        final = getattr(error, "is_final", False)
        more = {"cause": cause, "details": details, "is_final": final, **self._noted}
        self._end(FAILED, exit_code & 0xFF or 1, **more)

    def leave(self) -> None:
        """Reports that the script of this rank has ended normally."""
        self._end(RETURNED, 0)

    def _end(self, state: str, exit_code: int, **fields: object) -> None:
        with self._lock:
            # Not in a process that the rank has forked, nor a second time.
            if self._pid == os.getpid() and self.state == STARTED:
                self.state, self.exit_code = state, exit_code
                self._report(state=state, exit_code=exit_code, **fields)

    def _on_exception(self, kind: type[BaseException], error: BaseException, trace: Any) -> None:
        if self._pid != os.getpid():
            sys.__excepthook__(kind, error, trace)
            return
        self.fail(error, describe(error))

    def _on_thread_exception(self, arguments: threading.ExceptHookArgs) -> None:
        error = arguments.exc_value
        if error is None or isinstance(error, SystemExit):
            return
        name = arguments.thread.name if arguments.thread is not None else "unknown"
        self.fail(error, describe(error, f"in thread {name}"))


def install(rank: int, size: int, abort: Callable[[int], object]) -> None:
    """Makes an uncaught exception of this rank end the job, as it does under `tarantella`."""
    if _guard is not None or size == 1:
        return

    def end_job(**record: Any) -> None:
        if record.get("state") != FAILED:
            return
        # Where all ranks have failed together, the first ends the job before the others' turn.
        time.sleep(_TURN_SECONDS * min(rank, _MOST_TURNS))
        with contextlib.suppress(OSError, ValueError):
            sys.stdout.flush()
            who = headline(rank, size, socket.gethostname(), record["cause"])
            sys.stderr.write(f"{record['details']}{who}\n")
            sys.stderr.flush()
        time.sleep(_FORWARD_SECONDS)
        abort(record["exit_code"])
        os._exit(record["exit_code"])

    Guard(rank, size, end_job).start()


def note(**fields: Any) -> None:
    """Tells the launcher, if it is to start the job again, what it must know to do so."""
    if _guard is not None and os.environ.get(RESTARTS_VARIABLE):
        _guard.note(fields)


@contextlib.contextmanager
def starting_mpi(timeout: float) -> Iterator[None]:
    """Ends a start of MPI that takes too long: it holds Python's lock until all have come."""
    if limited := timeout > 0 and sys.__stderr__ is not None:
        faulthandler.dump_traceback_later(timeout, exit=True, file=sys.__stderr__)
    try:
        yield
    finally:
        if limited:
            faulthandler.cancel_dump_traceback_later()
