"""Runs a job to its end: MPI starts the ranks, and all are ended when one has failed."""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import os
import pathlib
import queue
import signal
import subprocess
import sys
import time
import types
from collections.abc import Mapping, Sequence

import psutil

from tarantella_pp.errors import LaunchError
from tarantella_pp.launch.hosts import HostRanks
from tarantella_pp.launch.mpi_launchers import Launcher
from tarantella_pp.launch.processes import (
    adopt_orphans,
    describe_exit,
    die_with_parent,
    is_alive,
    kill_descendants,
    remove,
    shared_memory,
)
from tarantella_pp.launch.records import (
    ENDED,
    FAILED,
    FINISHED,
    SIZE_VARIABLE,
    JobStderr,
    Record,
    Records,
    headline,
)

POLL_SECONDS = 0.1
# How often remote shells are looked at, which end a moment after the ranks of their host.
LOOK_SECONDS = 1.0
# From the first failure to the end of the job: for output on its way, and earlier failures.
SETTLE_SECONDS = 0.4
# How long an MPI launcher that is asked to end a job may take.
END_SECONDS = 3.0
# How long after a rank the next one may start; on hosts that are the job's own, the first one
# after their MPI.
START_SECONDS = 60.0
# How long the MPI launcher may take to end after its ranks have.
CLOSING_SECONDS = 5.0
# How long the ranks may take to end after the launcher got a signal, or its terminal is gone.
# Ignored signals (`nohup`, jobs in the background) stay ignored.
GRACE_SECONDS = {signal.SIGTERM: 30.0, signal.SIGINT: 5.0, signal.SIGHUP: 30.0}


class Exit(enum.IntEnum):
    """Exit codes of `tarantella`, besides a failed rank's own."""

    OK = 0
    FAILED = 1
    PREEMPTED = 75
    TIMEOUT = 124
    INTERRUPTED = 130


# The exit code of an MPI launcher is not to be trusted: some return 0 after a rank has left in the
# middle, some never return. A job has succeeded when every rank has put on record that it has.
class JobRun:
    """Runs one job to its end, whatever end that is."""

    def __init__(
        self,
        launcher: Launcher,
        num_ranks: int,
        timeout: float | None = None,
        *,
        hosts: Sequence[HostRanks] = (),
        quiet: bool = False,
    ) -> None:
        self._launcher = launcher
        self._records = Records(num_ranks)
        self._lines: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        self._stderr = JobStderr(self._lines.put, quiet=quiet)
        self._num_ranks = num_ranks
        self._hosts = hosts
        self._shells: dict[HostRanks, psutil.Process] = {}
        self._suspects: set[HostRanks] = set()
        self._next_look = 0.0
        self._timeout = timeout
        self._stopped_by: signal.Signals | None = None
        self._passed_on = False
        self._deadline = 0.0
        self._files: set[str] = set()  # of memory that the ranks share

    def run(self, command: Sequence[str], environment: Mapping[str, str]) -> int:
        """Starts MPI's launcher, waits for the end of the job and cleans up after it."""
        adopt_orphans()
        previous = {
            number: signal.signal(number, self._on_signal)
            for number in GRACE_SECONDS
            if signal.getsignal(number) is not signal.SIG_IGN
        }
        mpi = self._start(command, environment)
        try:
            return self._wait(mpi)
        finally:
            self._end(mpi)
            for number, handler in previous.items():
                signal.signal(number, handler)

    def _start(
        self, command: Sequence[str], environment: Mapping[str, str]
    ) -> subprocess.Popen[bytes]:
        parent = os.getpid()
        try:
            return subprocess.Popen(
                list(command),
                env={**environment, SIZE_VARIABLE: str(self._num_ranks)},
                stderr=self._stderr.descriptor,
                start_new_session=True,
                preexec_fn=lambda: die_with_parent(parent),
            )
        except OSError as error:
            raise LaunchError(f"Cannot start {command[0]}: {error}") from error
        finally:
            self._stderr.start()

    def _wait(self, mpi: subprocess.Popen[bytes]) -> int:
        """Looks at the records until the job has ended or must be ended."""
        records, start, settled = self._records, time.monotonic(), False
        while True:
            self._take(POLL_SECONDS)
            gone = mpi.poll() is not None
            if gone:  # its ranks' last records may still be on their way
                self._settle(SETTLE_SECONDS)
            failure = records.first_failure() or self._on_dead_host(mpi.pid)
            if self._stopped_by is not None:
                if gone or records.all_in(*ENDED) or time.monotonic() > self._deadline:
                    return _report_stop(self._stopped_by)
                if not self._passed_on:
                    self._passed_on = True
                    self._files |= shared_memory()
                    mpi.send_signal(self._launcher.signal_for(self._stopped_by))
            elif failure is not None:
                self._settle(SETTLE_SECONDS)
                return self._report_failure(records.first_failure() or failure, mpi)
            elif records.all_in(FINISHED):
                with contextlib.suppress(subprocess.TimeoutExpired):
                    mpi.wait(CLOSING_SECONDS)
                return Exit.OK
            elif gone and not settled:  # on a busy host they take longer
                settled = True
                self._settle(CLOSING_SECONDS)
            elif gone:
                missing, what = records.missing(), "its ranks were still at work (MPI_Abort?)"
                what = f"ranks {missing} never started{self._advice()}" if missing else what
                name = pathlib.Path(str(mpi.args[0])).name  # type: ignore[index]
                _tell(f"{name} {describe_exit(mpi.returncode)}, but {what}")
                return max(mpi.returncode, Exit.FAILED)
            elif self._timeout is not None and time.monotonic() - start > self._timeout:
                _tell(f"the job was killed after {self._timeout:g} s (--timeout)")
                return Exit.TIMEOUT
            elif self._strays(start):
                return Exit.FAILED

    def _take(self, seconds: float) -> None:
        """Takes the records that have come, waiting so long at most for the first."""
        with contextlib.suppress(queue.Empty):
            self._records.take(self._lines.get(timeout=seconds))
            while True:
                self._records.take(self._lines.get_nowait())

    def _settle(self, seconds: float) -> None:
        """Takes records on their way, for a moment, or until there can be no more."""
        self._stderr.finish(seconds)
        self._take(0.0)

    def _on_dead_host(self, mpi: int) -> Record | None:
        """Returns the failure of a rank whose host is dead: MPICH does not look at its ssh."""
        now = time.monotonic()
        if self._launcher.notices_dead_hosts or not self._hosts or now < self._next_look:
            return None
        self._next_look = now + LOOK_SECONDS
        for host, shell in self._shells.items():
            left = [r for r in host.ranks if r not in self._records or not self._records[r].is_over]
            if is_alive(shell) or not left:
                continue
            # Only at the second look is it certain that no record of its ranks is on its way.
            if host in self._suspects:
                cause = f"the remote shell of its host has ended: {host.name} or the link to it is "
                cause += "dead (ssh notices after TNT_HEARTBEAT seconds), or MPI cannot start there"
                return Record(left[0], FAILED, host.name, cause, exit_code=1)
            self._suspects.add(host)
        with contextlib.suppress(psutil.Error):
            for child in psutil.Process(mpi).children():
                words = child.cmdline()
                self._shells |= {host: child for host in self._hosts if host.name in words}
        return None

    def _strays(self, start: float) -> bool:
        """Whether a rank has not come in time; then it says so."""
        missing = self._records.missing()
        if not missing or not (self._records or self._hosts):  # a batch system may have to wait
            return False
        since = time.monotonic() - start
        if (self._records.age() if self._records else since) <= START_SECONDS:
            return False
        _tell(f"ranks {missing} did not start within {START_SECONDS:g} s{self._advice()}")
        return True

    def _advice(self) -> str:
        """Returns what to do about hosts that cannot be reached, which MPI may not name."""
        missing = set(self._records.missing())
        names = ", ".join(host.name for host in self._hosts if missing.intersection(host.ranks))
        advice = f"; ssh must reach {names} without a password, and find this Python there"
        return advice if names else ""

    def _report_failure(self, failure: Record, mpi: subprocess.Popen[bytes]) -> int:
        """Says which rank failed first, and how; returns the exit code."""
        code = mpi.poll()
        if failure.unexplained and code is not None and code > 0:
            cause = f"MPI has ended the job with exit code {code} (MPI_Abort?)"
            failure = dataclasses.replace(failure, cause=cause, exit_code=code)
        if failure.stopped and failure.exit_code == Exit.PREEMPTED:  # and not by this process
            return _report_stop(signal.SIGTERM)
        line = headline(failure.rank, self._num_ranks, failure.host, failure.cause)
        _write(f"{failure.details}{line}\n")
        return failure.exit_code or Exit.FAILED

    def _end(self, mpi: subprocess.Popen[bytes]) -> None:
        """Ends MPI's launcher, with it all its processes, and kills the rest on this host."""
        self._files |= shared_memory()
        if mpi.poll() is None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._launcher.end(mpi, END_SECONDS)
        kill_descendants(END_SECONDS)
        remove(self._files)
        self._stderr.finish(CLOSING_SECONDS)
        self._take(0.0)

    def _on_signal(self, number: int, frame: types.FrameType | None) -> None:
        """Notes the first signal; the second one ends the patience with the ranks."""
        seconds = 0.0 if self._stopped_by is not None else GRACE_SECONDS[signal.Signals(number)]
        self._stopped_by = self._stopped_by or signal.Signals(number)
        self._deadline = time.monotonic() + seconds


def _report_stop(number: signal.Signals) -> int:
    _tell(f"the job was stopped by {number.name}")
    return Exit.INTERRUPTED if number == signal.SIGINT else Exit.PREEMPTED


def _tell(message: str) -> None:
    _write(f"tarantella: {message}\n")


def _write(text: str) -> None:
    """Writes to standard error; what follows is done even where nobody reads it any more."""
    with contextlib.suppress(OSError, ValueError):
        try:
            sys.stderr.write(text)
            sys.stderr.flush()
        except BrokenPipeError:  # what is left in the buffer would fail again at exit: code 120
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stderr.fileno())
