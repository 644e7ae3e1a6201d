"""Watches over a running job, so that it ends on all ranks when it ends on one."""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import types
from collections.abc import Mapping, Sequence

from tarantella_pp.errors import LaunchError
from tarantella_pp.launch.channel.hub import Hub
from tarantella_pp.launch.channel.joining import HUB_VARIABLE, SECRET_VARIABLE
from tarantella_pp.launch.channel.rank_records import (
    ENDED,
    FINISHED,
    GONE,
    RETURNED,
    SIZE_VARIABLE,
    Record,
    find_deadlock,
    first_failure,
    headline,
)
from tarantella_pp.launch.native_log import QuietStderr
from tarantella_pp.launch.prctl import (
    adopt_orphans,
    describe_exit,
    die_with_parent,
)
from tarantella_pp.launch.processes import (
    kill_descendants,
    remove_shared_memory,
    shared_memory_of_descendants,
)

POLL_SECONDS = 0.1
_CLOSING_POLL_SECONDS = 0.02
SETTLE_SECONDS = 0.4
"""From the first failure to the end of the job: for output on its way, and earlier failures."""
DEADLOCK_SECONDS = 1.0
END_SECONDS = 3.0
"""How long the minders of ranks may take to end what is left of them."""
START_SECONDS = 60.0
"""How long after a rank the next one may start; on hosts that are the job's own, the first one
after their MPI."""
LOST_SECONDS = 5.0
"""How long the MPI launcher may take to end after one of its processes has gone without a word."""
CLOSING_SECONDS = 5.0
"""How long the MPI launcher may take to end after its ranks have."""
SHUTDOWN_SECONDS = 300.0
"""How long ranks may take to leave after the scripts of all have ended."""
GRACE_SECONDS = {signal.SIGTERM: 30.0, signal.SIGINT: 5.0, signal.SIGHUP: 30.0}
"""How long the ranks may take to end after the launcher was told to stop, or its terminal is gone.
What it was started to ignore, as `nohup` does and shells for what they put in the background, it
does ignore."""


class Exit(enum.IntEnum):
    """Exit codes of `tarantella`, besides those of a failed rank."""

    OK = 0
    FAILED = 1
    USAGE = 2
    PREEMPTED = 75
    TIMEOUT = 124
    INTERRUPTED = 130


class Supervisor:
    """Runs one job to its end, whatever end that is.

    The exit code of an MPI launcher is not to be trusted: some return 0 after a rank has left in
    the middle, some never return. A job has succeeded when every rank has put on record that
    it has; it has failed as soon as one rank has, and then all that is left of it is killed.
    """

    def __init__(
        self,
        num_ranks: int,
        timeout: float | None = None,
        hosts: Sequence[str] | None = None,
        *,
        quiet: bool = False,
    ) -> None:
        self._hub = Hub(num_ranks, hosts)
        self.whereabouts = self._hub.whereabouts
        self.folder = tempfile.mkdtemp(prefix="tarantella-")
        self._stderr = QuietStderr() if quiet else None
        self._num_ranks = num_ranks
        self._own_hosts = bool(hosts)
        self._name = "mpiexec"
        self._timeout = timeout
        self._stopped_by: signal.Signals | None = None
        self._deadline: float | None = None

    def __enter__(self) -> Supervisor:
        return self

    def __exit__(self, *unused: object) -> None:
        self._hub.close()
        shutil.rmtree(self.folder, ignore_errors=True)

    def run(self, command: Sequence[str], environment: Mapping[str, str]) -> int:
        """Starts the MPI launcher, waits for the end of the job and cleans up after it."""
        adopt_orphans()
        previous = {
            number: signal.signal(number, self._on_signal)
            for number in GRACE_SECONDS
            if signal.getsignal(number) is not signal.SIG_IGN
        }
        try:
            return self._wait(self._start(command, environment))
        finally:
            _tell_hidden(self._hub.records)
            self._hub.end(END_SECONDS)
            leftovers = shared_memory_of_descendants()
            kill_descendants()
            if self._stderr is not None:
                self._stderr.finish()
            remove_shared_memory(leftovers)
            for number, handler in previous.items():
                signal.signal(number, handler)

    def _start(
        self, command: Sequence[str], environment: Mapping[str, str]
    ) -> subprocess.Popen[bytes]:
        parent = os.getpid()
        self._name = pathlib.Path(command[0]).name
        variables = {
            **environment,
            HUB_VARIABLE: str(self.whereabouts),
            SECRET_VARIABLE: self.whereabouts.secret,
            SIZE_VARIABLE: str(self._num_ranks),
        }
        try:
            launcher = subprocess.Popen(
                list(command),
                env=variables,
                stderr=None if self._stderr is None else self._stderr.descriptor,
                start_new_session=True,
                preexec_fn=lambda: die_with_parent(parent),
            )
        except OSError as error:
            raise LaunchError(f"Cannot start {command[0]}: {error}") from error
        finally:
            if self._stderr is not None:
                self._stderr.start()
        return launcher

    def _wait(self, launcher: subprocess.Popen[bytes]) -> int:
        """Looks at the records until the job has ended or must be ended."""
        start = time.monotonic()
        while True:
            self._hub.poll(POLL_SECONDS)
            records = self._hub.records
            gone = launcher.poll() is not None
            failure = first_failure(records) or find_deadlock(
                records, self._num_ranks, DEADLOCK_SECONDS
            )
            if self._stopped_by is not None:
                if gone or self._all(records, ENDED) or self._must_stop(self._stopped_by):
                    return self._report_stop(self._stopped_by)
            elif failure is not None:
                self._settle()
                return self._report_failure(first_failure(records) or failure, launcher)
            elif self._all(records, (FINISHED,)):
                return self._close(launcher)
            elif gone:
                self._settle()
                return self._report_loss(launcher, records)
            elif self._all(records, ENDED) and _age(records) > SHUTDOWN_SECONDS:
                stuck = sorted(rank for rank in records if records[rank].state == RETURNED)
                _tell(
                    f"ranks {stuck} did not leave within {SHUTDOWN_SECONDS:g} s of the end of "
                    "every script, and were killed: MPI waits for a message or a collective call "
                    "that another rank has left out"
                )
                return Exit.FAILED
            elif self._timeout is not None and time.monotonic() - start > self._timeout:
                _tell(f"the job was killed after {self._timeout:g} s (--timeout)")
                return Exit.TIMEOUT
            elif self._strays(start):
                return Exit.FAILED

    def _settle(self) -> None:
        """Takes what is on its way, for a moment."""
        end = time.monotonic() + SETTLE_SECONDS
        while (left := end - time.monotonic()) > 0:
            self._hub.poll(left)

    def _strays(self, start: float) -> bool:
        """Whether a rank has not come, or has gone without a word; then it says so."""
        now, joined = time.monotonic(), self._hub.last_joined
        missing = self._hub.missing()
        if joined is None and self._own_hosts:  # a batch system may have others wait
            joined = start
        if missing and joined is not None and now - joined > START_SECONDS:
            _tell(
                f"ranks {missing} did not start within {START_SECONDS:g} s, or their hosts cannot "
                f"reach the launcher ({self.whereabouts})"
            )
            return True
        for rank, (why, since) in self._hub.lost.items():
            record = self._hub.records.get(rank)
            if now - since > LOST_SECONDS and (record is None or record.state not in GONE):
                host = "" if record is None else f" on host {record.host}"
                _tell(f"rank {rank} of {self._num_ranks}{host}: its connection broke ({why})")
                return True
        return False

    def _all(self, records: Mapping[int, Record], states: Sequence[str]) -> bool:
        """Whether every rank is in one of `states`."""
        return sum(record.state in states for record in records.values()) >= self._num_ranks

    def _close(self, launcher: subprocess.Popen[bytes]) -> int:
        """Lets the MPI launcher end, and pass on the last output, after a success."""
        end = time.monotonic() + CLOSING_SECONDS
        while launcher.poll() is None:
            self._hub.poll(_CLOSING_POLL_SECONDS)  # minders leave once they are answered
            if time.monotonic() > end:
                _tell(f"{self._name} did not end after its ranks had; killed")
                break
        return Exit.OK

    def _report_failure(self, failure: Record, launcher: subprocess.Popen[bytes]) -> int:
        """Says which rank failed first, and how; returns the exit code."""
        code = launcher.poll()
        if failure.unexplained and code is not None and code > 0:
            cause = f"MPI has ended the job with exit code {code} (MPI_Abort?)"
            failure = dataclasses.replace(failure, cause=cause, exit_code=code)
        if failure.exit_code == Exit.PREEMPTED:  # it was told to end, and not by the launcher
            return self._report_stop(signal.SIGTERM)
        if failure.details:
            _write(failure.details)
        _tell(headline(failure, self._num_ranks))
        return failure.exit_code or Exit.FAILED

    def _report_loss(self, launcher: subprocess.Popen[bytes], records: dict[int, Record]) -> int:
        """Explains why the MPI launcher ended; returns the exit code."""
        failure = first_failure(records)
        if failure is not None:
            return self._report_failure(failure, launcher)
        if self._all(records, (FINISHED,)):
            return Exit.OK
        missing = [rank for rank in range(self._num_ranks) if rank not in records]
        what = "its ranks were still at work (MPI_Abort?)"
        if missing:
            what = f"ranks {missing} never started"
        _tell(f"{self._name} {describe_exit(launcher.returncode)}, but {what}")
        return max(launcher.returncode, Exit.FAILED)

    def _on_signal(self, number: int, frame: types.FrameType | None) -> None:
        """Notes the first signal; the second one ends the patience with the ranks."""
        seconds = 0.0 if self._stopped_by is not None else GRACE_SECONDS[signal.Signals(number)]
        self._stopped_by = self._stopped_by or signal.Signals(number)
        self._deadline = time.monotonic() + seconds

    def _must_stop(self, number: signal.Signals) -> bool:
        """Passes the signal on to the ranks; whether their time to end on their own is over."""
        self._hub.request_stop(signal.SIGINT if number == signal.SIGINT else signal.SIGTERM)
        return self._deadline is not None and time.monotonic() > self._deadline

    def _report_stop(self, number: signal.Signals) -> int:
        _tell(f"the job was stopped by {number.name}")
        return Exit.INTERRUPTED if number == signal.SIGINT else Exit.PREEMPTED


def _tell_hidden(records: Mapping[int, Record]) -> None:
    """Mentions lines that were printed and not shown."""
    ranks = sorted(rank for rank, record in records.items() if record.hidden_lines)
    lines = sum(record.hidden_lines for record in records.values())
    if ranks:
        who = f"rank {ranks[0]}" if len(ranks) == 1 else f"{len(ranks)} ranks other than the last"
        what = "1 line that is" if lines == 1 else f"{lines} lines that are"
        _tell(f"{who} printed {what} not shown; --output-on-all-devices shows all")


def _age(records: Mapping[int, Record]) -> float:
    """Returns the seconds since the last rank came into its present state."""
    return time.monotonic() - max(record.time for record in records.values())


def _tell(message: str) -> None:
    """Writes one line of the launcher's own to standard error."""
    prefix = "" if message.startswith("tarantella: ") else "tarantella: "
    _write(f"{prefix}{message}\n")


def _write(text: str) -> None:
    """Writes to standard error; what follows is done even where nobody reads it any more."""
    with contextlib.suppress(OSError, ValueError):
        sys.stderr.write(text)
        sys.stderr.flush()
