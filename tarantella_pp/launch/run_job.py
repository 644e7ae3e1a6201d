"""Runs a job to its end: MPI starts the ranks, and all are ended when one has failed.

Where restarts are left, the job is then started again, and goes on from its last checkpoint.
"""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import itertools
import os
import pathlib
import queue
import signal
import subprocess
import sys
import time
import types
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import psutil

from tarantella_pp.errors import LaunchError
from tarantella_pp.launch import processes
from tarantella_pp.launch.hosts import HostRanks
from tarantella_pp.launch.mpi_launchers import Launcher
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
# How often in a row a job may fail in the same way, in the same step, before it is given up.
MOST_ALIKE = 3


class Exit(enum.IntEnum):
    """Exit codes of `tarantella`, besides a failed rank's own."""

    OK = 0
    FAILED = 1
    PREEMPTED = 75
    TIMEOUT = 124
    INTERRUPTED = 130
    BROKEN_PIPE = 141


@dataclasses.dataclass(frozen=True, slots=True)
class Attempt:
    """A job as it is to be started."""

    command: Sequence[str]  # MPI's launcher and all that it is given
    environment: Mapping[str, str]
    num_ranks: int
    hosts: Sequence[HostRanks] = ()
    variables: Mapping[str, str] = dataclasses.field(default_factory=dict)  # not the user's

    def __str__(self) -> str:
        """Returns which ranks are where."""
        return ", ".join(map(str, self.hosts)) or f"{self.num_ranks} ranks"


@dataclasses.dataclass(frozen=True, slots=True)
class Failure:
    """How an attempt has failed; equal ones look alike."""

    cause: str
    step: int | None
    text: str = dataclasses.field(compare=False)  # what a user reads of it, with the rank


def run_job(
    launcher: Launcher,
    attempts: Iterable[Attempt],
    *,
    restarts: int = 0,
    timeout: float | None = None,
    quiet: bool = False,
) -> int:
    """Runs a job to its end, by another attempt where one has failed; returns the exit code."""
    processes.adopt_orphans()
    code, failures, stop, start = 1, list[Failure](), Stop(), time.monotonic()
    with stop.noted():
        for attempt in itertools.islice(attempts, restarts + 1):
            if stop.number is not None:
                break
            if failures:
                _tell(f"restart {len(failures)} of {restarts}: {attempt}")
            job = JobRun(launcher, attempt, stop, quiet=quiet)
            code = job.run(start, timeout)
            if job.failure is None:
                return code
            failures.append(job.failure)
            if failures[-MOST_ALIKE:] == MOST_ALIKE * [job.failure]:
                where = "" if job.failure.step is None else f" in step {job.failure.step + 1}"
                _tell(f"the same failure {MOST_ALIKE} times{where}: no restart helps. The first:")
                _write(failures[-MOST_ALIKE].text)
                return code
        if stop.number is not None:  # before an attempt, or while hosts were asked for it
            return _report_stop(stop.number)
        if len(failures) <= restarts:
            _tell("no host of the job answers any more")
    return code


class Stop:
    """The first signal that has asked this process to end its job, and until when ranks may."""

    def __init__(self) -> None:
        self.number: signal.Signals | None = None
        self.deadline = 0.0

    @contextlib.contextmanager
    def noted(self) -> Iterator[None]:
        """Notes signals while a job runs."""
        handlers: dict[signal.Signals, Any] = dict.fromkeys(GRACE_SECONDS, self._on_signal)
        # A hint for scripts, which batch systems may send here, too. SIG_IGN would be inherited.
        handlers[signal.SIGUSR1] = lambda *_: None
        previous = {
            number: signal.signal(number, handler)
            for number, handler in handlers.items()
            if signal.getsignal(number) is not signal.SIG_IGN
        }
        try:
            yield
        finally:
            for number, handler in previous.items():
                signal.signal(number, handler)

    def _on_signal(self, number: int, frame: types.FrameType | None) -> None:
        """Notes the first signal; the second one ends the patience with the ranks."""
        seconds = 0.0 if self.number is not None else GRACE_SECONDS[signal.Signals(number)]
        self.number = self.number or signal.Signals(number)
        self.deadline = time.monotonic() + seconds


# The exit code of an MPI launcher is not to be trusted: some return 0 after a rank has left in the
# middle, some never return. A job has succeeded when every rank has put on record that it has.
class JobRun:
    """Runs one attempt to its end, whatever end that is."""

    def __init__(self, launcher: Launcher, attempt: Attempt, stop: Stop, *, quiet: bool) -> None:
        self.failure: Failure | None = None  # one after which another attempt may succeed
        self._launcher = launcher
        self._attempt = attempt
        self._stop = stop
        self._records = Records(attempt.num_ranks)
        self._lines: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        self._stderr = JobStderr(self._lines.put, quiet=quiet)
        self._hosts = attempt.hosts
        self._shells: dict[HostRanks, psutil.Process] = {}
        self._suspects: set[HostRanks] = set()
        self._next_look = 0.0
        self._passed_on = False
        self._files: set[str] = set()  # of memory that the ranks share

    def run(self, start: float, timeout: float | None = None) -> int:
        """Starts MPI's launcher, waits for the end of the job and cleans up after it."""
        mpi = self._start()
        try:
            return self._wait(mpi, start, timeout)
        finally:
            self._end(mpi)

    def _start(self) -> subprocess.Popen[bytes]:
        parent, command, size = os.getpid(), self._attempt.command, self._attempt.num_ranks
        by_mpi = self._launcher.hands_on_input or self._hosts or not sys.stdin or os.isatty(0)
        try:
            return subprocess.Popen(
                list(command),
                env={**self._attempt.environment, SIZE_VARIABLE: str(size)},
                stdin=None if by_mpi else subprocess.DEVNULL,  # then rank 0 opens ours
                stderr=self._stderr.descriptor,
                start_new_session=True,
                preexec_fn=lambda: processes.die_with_parent(parent),
            )
        except OSError as error:
            raise LaunchError(f"Cannot start {command[0]}: {error}") from error
        finally:
            self._stderr.start()

    def _wait(self, mpi: subprocess.Popen[bytes], start: float, timeout: float | None) -> int:
        """Looks at the records until the job has ended or must be ended."""
        records, stop, begin, settled = self._records, self._stop, time.monotonic(), False
        while True:
            self._take(POLL_SECONDS)
            gone = mpi.poll() is not None
            if gone:  # its ranks' last records may still be on their way
                self._settle(SETTLE_SECONDS)
            failure = records.first_failure() or self._on_dead_host(mpi.pid)
            if stop.number is not None:
                if gone or records.all_in(*ENDED) or time.monotonic() > stop.deadline:
                    return _report_stop(stop.number)
                if not self._passed_on:
                    self._passed_on = True
                    self._files |= processes.shared_memory()
                    interrupted, own = stop.number == signal.SIGINT, self._launcher
                    mpi.send_signal(own.interrupt if interrupted else own.terminate)
            elif mpi.returncode == -signal.SIGPIPE:  # as behind `| head`
                _tell("the job was ended, for nobody reads its output any more")
                return Exit.BROKEN_PIPE
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
                missing, what = records.missing(), "its ranks were at work (MPI_Abort? Full disk?)"
                what = f"ranks {missing} never started{self._advice()}" if missing else what
                name = pathlib.Path(str(mpi.args[0])).name  # type: ignore[index]
                ended = processes.describe_exit(mpi.returncode)
                self._fail(f"tarantella: {name} {ended}, but {what}\n")
                return max(mpi.returncode, Exit.FAILED)
            elif timeout is not None and time.monotonic() - start > timeout:
                _tell(f"the job was killed after {timeout:g} s (--timeout)")
                return Exit.TIMEOUT
            elif self._strays(begin):
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
        over = {rank for rank, it in self._records.items() if it.state in (FINISHED, FAILED)}
        for host, shell in self._shells.items():
            left = [rank for rank in host.ranks if rank not in over]
            if processes.is_alive(shell) or not left:
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
        if time.monotonic() - (self._records.last if self._records else start) <= START_SECONDS:
            return False
        late = f"ranks {missing} did not start within {START_SECONDS:g} s{self._advice()}"
        self._fail(f"tarantella: {late}\n")
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
        line = headline(failure.rank, self._attempt.num_ranks, failure.host, failure.cause)
        self._fail(f"{failure.details}{line}\n", failure)
        return failure.exit_code or Exit.FAILED

    def _fail(self, text: str, record: Record | None = None) -> None:
        """Says how the attempt has failed, and keeps it unless another attempt would not help."""
        _write(text)
        first = self._records.get(0)
        step = None if first is None else first.step
        if record is None:
            self.failure = Failure(text, step, text)
        elif record.exit_code != Exit.PREEMPTED and not record.is_final:
            step = step if record.step is None else record.step
            # All ranks may fail alike, in other words, any of them first; a kill is of one rank.
            cause = record.cause.partition(":")[0] if record.details else record.cause
            which = f"rank {record.rank}: " if record.exit_code > 128 else ""
            self.failure = Failure(which + cause, step, text)

    def _end(self, mpi: subprocess.Popen[bytes]) -> None:
        """Ends MPI's launcher, with it all its processes, and kills the rest on this host."""
        self._files |= processes.shared_memory()
        if mpi.poll() is None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._launcher.end(mpi, END_SECONDS)
        processes.kill_descendants(END_SECONDS)
        processes.remove(self._files)
        self._stderr.finish(CLOSING_SECONDS)
        self._take(0.0)


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
