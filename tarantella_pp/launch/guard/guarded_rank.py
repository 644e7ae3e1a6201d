"""One rank under guard: how it ends goes on record, and so does a wait that cannot end."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
import traceback
import types
from collections.abc import Callable, Iterable, Iterator
from typing import NoReturn

from tarantella_pp.errors import CommunicationError
from tarantella_pp.launch.channel.rank_records import (
    ENDED,
    FAILED,
    RETURNED,
    STARTED,
    RankRecords,
    Record,
    find_deadlock,
    first_failed,
    first_failure,
    headline,
)
from tarantella_pp.launch.guard import blocked_call
from tarantella_pp.launch.guard.cause import calling_line, describe

LOOK_SECONDS = 0.5
"""How often records are looked at."""

FORWARD_SECONDS = 0.3
"""How long mpiexec gets to pass a rank's last words on before the job is aborted."""

ORDER_SECONDS = 1.0
"""How long rank 0 may take to say which of several ranks failed first."""

GRACE_SECONDS = 5.0
"""How long a message may still be under way from a rank whose script has ended."""

STUCK_SECONDS = 3.0
"""How long a rank sits in one MPI call, after another has ended, before it counts as waiting."""


class PeerFailedError(CommunicationError):
    """Another rank has failed, or has ended while this one waits for it.

    Attributes:
        culprit: The other rank.
    """

    def __init__(self, message: str, culprit: int) -> None:
        super().__init__(message)
        self.culprit = culprit


class Guard:
    """Watches over one rank of a job.

    Attributes:
        hidden_lines: Returns the number of lines that this rank has printed and nobody saw.
    """

    def __init__(
        self,
        rank: int,
        size: int,
        records: RankRecords | None,
        abort: Callable[[int], object] | None,
    ) -> None:
        self.rank = rank
        self.size = size
        self.records = records
        self.record = Record.of_this_process(rank, STARTED)
        self.hidden_lines: Callable[[], int] = int
        self._abort = abort
        self._lock = threading.Lock()
        self._last_look = 0.0
        self._write(self.record)

    def start(self) -> None:
        """Hooks into uncaught exceptions and starts to watch for waits that cannot end."""
        sys.excepthook = self._on_exception
        threading.excepthook = self._on_thread_exception
        if self.records is not None:
            main = threading.main_thread().ident
            threading.Thread(target=self._watch, args=(main,), daemon=True).start()

    def fail(self, error: BaseException | None, cause: str, exit_code: int) -> None:
        """Puts on record that this rank has failed, and ends the job."""
        details = "" if error is None else "".join(traceback.format_exception(error))
        culprit = error.culprit if isinstance(error, PeerFailedError) else None
        with self._lock:
            if not self._is_alive():
                return
            self.record = self.record.becomes(
                FAILED,
                cause=cause,
                details=details,
                exit_code=exit_code & 0xFF or 1,
                culprit=culprit,
                hidden_lines=self.hidden_lines(),
            )
            self._write(self.record)
        if self._abort is not None:
            self._report(self._abort)

    def leave(self, cause: str) -> None:
        """Puts on record that the script of this rank has ended normally."""
        with self._lock:
            if self._is_alive():
                self.record = self.record.becomes(
                    RETURNED,
                    cause=cause,
                    waiting_at="",
                    met="mpi4py.MPI" in sys.modules,
                    hidden_lines=self.hidden_lines(),
                )
                self._write(self.record)

    @contextlib.contextmanager
    def starting_mpi(self) -> Iterator[None]:
        """Puts on record that this rank starts MPI, and waits until all others do.

        It holds Python's lock meanwhile, so that its own watch cannot look.
        """
        self._wait_at(calling_line() or "its first use of MPI", starts_mpi=True)
        try:
            yield
        finally:
            self._wait_at("")

    def check(self, peers: int | Iterable[int] | None = None) -> None:
        """Raises when a wait of this rank cannot end; see `guard.check`."""
        now = time.monotonic()
        if self.records is None or now - self._last_look < LOOK_SECONDS:
            return
        self._last_look = now
        records = self.records.read()
        failure = first_failure(records)
        if failure is not None and failure.rank != self.rank:
            if self._abort is None:
                time.sleep(GRACE_SECONDS)  # the launcher is about to end this rank
            raise PeerFailedError(f"rank {failure.rank} failed: {failure.cause}", failure.rank)
        for peer in [peers] if isinstance(peers, int) else peers or ():
            record = records.get(peer)
            if peer == self.rank or record is None or record.state not in ENDED:
                continue
            if time.monotonic() - record.time >= GRACE_SECONDS:
                raise PeerFailedError(
                    f"rank {self.rank} waits for rank {peer}, but {record.cause} there", peer
                )

    def _is_alive(self) -> bool:
        """Whether this is the rank itself, not a process it forked, and it has not ended."""
        return self.record.pid == os.getpid() and self.record.state == STARTED

    def _write(self, record: Record) -> None:
        if self.records is not None:
            self.records.write(record)

    def _on_exception(
        self, kind: type[BaseException], error: BaseException, trace: types.TracebackType | None
    ) -> None:
        if self.record.pid != os.getpid():
            sys.__excepthook__(kind, error, trace)
            return
        self.fail(error, describe(error), exit_code_of(error))

    def _on_thread_exception(self, arguments: threading.ExceptHookArgs) -> None:
        error = arguments.exc_value
        if error is None or isinstance(error, SystemExit):
            return
        name = arguments.thread.name if arguments.thread is not None else "unknown"
        self.fail(error, describe(error, f"in thread {name}"), exit_code_of(error))

    def _report(self, abort: Callable[[int], object]) -> NoReturn:
        """Ends the job, and says why if this rank is the first that failed."""
        if self.records is not None:
            self.records.wait_for_order(self.rank, ORDER_SECONDS)
        records = self.records.read() if self.records is not None else {}
        speaker = first_failed(records) or self.record
        if speaker.rank != self.rank:
            time.sleep(GRACE_SECONDS)  # the other rank is about to end this one
            abort(self.record.exit_code)
        self._end_job(first_failure(records) or self.record, abort)

    def _end_job(self, record: Record, abort: Callable[[int], object]) -> NoReturn:
        """Says why, once for the rank that failed, and ends every rank."""
        with contextlib.suppress(OSError, ValueError):
            sys.stdout.flush()
            sys.stderr.write(f"{record.details}{headline(record, self.size)}\n")
            sys.stderr.flush()
        time.sleep(FORWARD_SECONDS)
        abort(record.exit_code)
        os._exit(record.exit_code)

    def _watch(self, thread_id: int) -> None:
        """Looks, once another rank has ended, whether this one sits in an MPI call for good."""
        seen, since = (0, 0), time.monotonic()
        while self.records is not None and self._is_alive():
            time.sleep(LOOK_SECONDS)
            records = self.records.read()
            others_ended = any(r.state in ENDED for r in records.values() if r.rank != self.rank)
            if not others_ended or self.record.starts_mpi:
                continue
            now, place = blocked_call.position(thread_id), ""
            if now != seen:
                seen, since = now, time.monotonic()
            elif time.monotonic() - since >= STUCK_SECONDS:
                place = blocked_call.blocking_call(thread_id)
            self._wait_at(place)
            if self._abort is not None and place and self._speaks(records):
                deadlock = find_deadlock(records, self.size, patience=2 * LOOK_SECONDS)
                if deadlock is not None:
                    self._end_job(deadlock, self._abort)

    def _speaks(self, records: dict[int, Record]) -> bool:
        """Whether this is the first of the waiting ranks, which reports for all of them."""
        return self.rank == min((r.rank for r in records.values() if r.waiting_at), default=-1)

    def _wait_at(self, place: str, *, starts_mpi: bool = False) -> None:
        with self._lock:
            if self._is_alive() and place != self.record.waiting_at:
                changes = {"waiting_at": place, "starts_mpi": starts_mpi}
                self.record = self.record.becomes(STARTED, **changes)
                self._write(self.record)


def exit_code_of(error: BaseException) -> int:
    """Returns the exit code Python itself gives to an uncaught exception."""
    return 130 if isinstance(error, KeyboardInterrupt) else 1
