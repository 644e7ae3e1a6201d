"""What `tarantella` starts for each rank: a keeper, and the script in a process below it.

::

    mpiexec  --  what stands for the rank  --  keeper  --  rank
"""

from __future__ import annotations

import contextlib
import dataclasses
import faulthandler
import functools
import io
import json
import logging
import os
import runpy
import select
import shutil
import signal
import sys
import time
import types
from collections.abc import Callable, Mapping
from typing import Any

import psutil

from tarantella_pp.errors import LaunchError
from tarantella_pp.launch import records
from tarantella_pp.launch.cause import describe
from tarantella_pp.launch.environment import (
    LOG_ALL_VARIABLE,
    LOG_LEVEL_VARIABLE,
    OUTPUT_VARIABLE,
)
from tarantella_pp.launch.guard import Guard, exit_code_of
from tarantella_pp.launch.processes import (
    adopt_orphans,
    die_with_parent,
    kill_descendants,
    remove_shared_memory,
    shared_memory_of_descendants,
    signal_name,
    unused_shared_memory,
)
from tarantella_pp.launch.records import (
    FAILED,
    FINISHED,
    LOCAL_RANK_VARIABLE,
    RANK_VARIABLE,
    RETURNED,
    SIZE_VARIABLE,
    Record,
    number_from,
    write_all,
)
from tarantella_pp.launch.resources import cores_of_starter, take_gpu, take_share

PASSED_ON = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2)
WATCHED = (signal.SIGCHLD, *PASSED_ON)
# How long the launcher may take to end the job after a rank has failed.
LINGER_SECONDS = 8.0
# Its launcher follows SIGTERM and SIGINT with a kill, so ours sends others; see `OpenMpi`.
_OF_OPEN_MPI = {signal.SIGUSR1: signal.SIGTERM, signal.SIGUSR2: signal.SIGINT}
# Where Open MPI's daemon on this host keeps files, which it leaves behind when it is cut off.
_SESSION_VARIABLE = "PMIX_SERVER_TMPDIR"
_UNUSED_SECONDS = 0.2
_STANDARD_ERROR = 2


class Keeper:
    """Looks after one rank: process `child`, which says on the pipe `reports` what becomes of it.

    The pipe `stands` closes when MPI kills the process that it takes for the rank.
    """

    def __init__(self, rank: int, child: int, reports: int, stands: int) -> None:
        self._child = child
        self._reports = reports
        self._stands = stands
        self._record = Record(rank)
        self._heard = b""
        self._stopped = False
        self._status: int | None = None
        self._start = psutil.Process().create_time() - 1.0
        of_open_mpi = os.environ.get(RANK_VARIABLE, "").startswith("OMPI")
        self._meant = _OF_OPEN_MPI if of_open_mpi else {}
        self._waking, waking = os.pipe()
        for file in (self._waking, waking, reports):
            os.set_blocking(file, False)
        adopt_orphans()
        signal.set_wakeup_fd(waking, warn_on_full_buffer=False)
        for number in WATCHED:
            signal.signal(number, lambda *_: None)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, WATCHED)

    def run(self) -> int:
        """Returns the exit code of the rank, once the launcher has had time to end the job."""
        self._tell(self._record)
        while self._status is None:
            self._wait(None)
        self._hear()
        self._conclude(self._status)
        # MPI need not notice by itself: then it has nothing to add to what the launcher says.
        deadline = time.monotonic() + (LINGER_SECONDS if self._record.state == FAILED else 0.0)
        while (left := deadline - time.monotonic()) > 0:
            self._wait(left)
        return self._record.exit_code

    def _wait(self, seconds: float | None) -> None:
        """Waits for a signal, a report or the end of MPI, and does what has to be done."""
        ready = select.select([self._waking, self._reports, self._stands], [], [], seconds)[0]
        for number in _read(self._waking):
            if number in PASSED_ON and self._status is None:
                meant = self._meant.get(signal.Signals(number), number)
                self._stopped |= meant == signal.SIGTERM
                os.kill(self._child, meant)
        self._hear()
        self._reap()
        if self._stands in ready:
            self._end_alone()

    def _hear(self) -> None:
        """Passes on what the rank says of itself."""
        *lines, self._heard = (self._heard + _read(self._reports)).split(b"\n")
        for line in lines:
            self._tell(Record(**json.loads(line)))

    def _tell(self, record: Record) -> None:
        self._record = dataclasses.replace(record, stopped=self._stopped)
        with contextlib.suppress(OSError):  # the launcher is gone
            records.write(self._record, _STANDARD_ERROR)

    def _reap(self) -> None:
        """Takes the exit codes of ended children, adopted ones included."""
        with contextlib.suppress(ChildProcessError):
            while (ended := os.waitpid(-1, os.WNOHANG))[0]:
                if ended[0] == self._child:
                    self._status = os.waitstatus_to_exitcode(ended[1])

    def _conclude(self, status: int) -> None:
        """Tells how the process of the rank ended, unless it has said so itself."""
        if self._record.state == FAILED:
            return
        if status == 0 and self._record.state == RETURNED:
            self._tell(self._record.becomes(FINISHED))
            return
        if status < 0:
            cause = f"killed by {signal_name(-status)}"
        elif status == 0:
            cause = "its process ended with exit code 0 before its script did (os._exit?)"
        else:
            cause = f"its process ended with exit code {status}"
        code = 128 - status if status < 0 else status or 1
        # So it may have been MPI that ended it, since another rank has failed.
        unexplained = status > 0 or status == -signal.SIGTERM
        self._tell(
            self._record.becomes(FAILED, cause=cause, exit_code=code, unexplained=unexplained)
        )

    def _end_alone(self) -> None:
        """Ends the rank, for MPI has killed what it knows of it, and leaves nothing behind."""
        shared = shared_memory_of_descendants()
        kill_descendants()
        remove_shared_memory(shared)
        if unused := unused_shared_memory(self._start):  # of a rank that has gone before
            time.sleep(_UNUSED_SECONDS)  # another job makes a file first, and then maps it
            remove_shared_memory(unused & unused_shared_memory(self._start))
        if folder := os.environ.get(_SESSION_VARIABLE):
            shutil.rmtree(folder, ignore_errors=True)
        os._exit(1)


def _read(file: int) -> bytes:
    """Reads all that has come, without waiting."""
    found = b""
    with contextlib.suppress(BlockingIOError):
        while piece := os.read(file, 1 << 16):
            found += piece
    return found


_LIBRARY = "tarantella_pp"
_STANDARD_OUTPUT = 1


def main() -> int:
    """Runs `worker.py SCRIPT ARGUMENTS...` as one rank of the job described by the environment.

    MPI may kill this process at any time, so that it could not clean up. It only stands for the
    rank: its keeper, in a session of its own, notices that and cleans up.
    """
    die_with_parent(os.getppid())
    # Blocked before the fork: a signal in between waits until its reader is there.
    signal.pthread_sigmask(signal.SIG_BLOCK, WATCHED)
    launcher = os.getppid()
    stands, standing = os.pipe()
    keeper = os.fork()
    if keeper:
        os.close(stands)
        return _stand_for(keeper)
    os.setsid()
    os.close(standing)
    return _keep(stands, launcher)


def _stand_for(keeper: int) -> int:
    """Passes signals on to the keeper, and ends as it does."""
    while True:
        number = signal.sigwait(WATCHED)
        if number != signal.SIGCHLD:
            os.kill(keeper, number)
        elif (ended := os.waitpid(keeper, os.WNOHANG))[0]:
            status = os.waitstatus_to_exitcode(ended[1])
            if status < 0:  # not every MPI ends a job for an exit code
                signal.pthread_sigmask(signal.SIG_UNBLOCK, WATCHED)
                os.kill(os.getpid(), signal.SIGKILL)
            return status


def _keep(stands: int, launcher: int) -> int:
    """Starts the rank and looks after it."""
    size = int(os.environ[SIZE_VARIABLE])
    rank = 0 if size == 1 else number_from(RANK_VARIABLE)
    if rank is None:
        sys.exit(f"tarantella: {os.environ[RANK_VARIABLE]} is not set; is --mpi the MPI in use?")
    keeper, siblings = os.getpid(), cores_of_starter(launcher)
    reports, reporting = os.pipe()
    child = os.fork()
    if child:
        os.close(reporting)
        return Keeper(rank, child, reports, stands).run()
    die_with_parent(keeper)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, WATCHED)
    os.close(reports)
    os.close(stands)

    def report(record: Record) -> None:
        with contextlib.suppress(OSError):
            write_all(reporting, f"{record.to_json()}\n".encode())

    guard = Guard(rank, size, report)
    return run_script(sys.argv[1:], guard, functools.partial(_take_share, size, siblings))


def run_script(command: list[str], guard: Guard, prepare: Callable[[], None]) -> int:
    """Runs `script.py ...` or `-m module ...` as Python would, and reports how it ended."""
    faulthandler.enable()
    guard.start()
    if guard.rank != guard.size - 1 and os.environ.get(OUTPUT_VARIABLE) != "1":
        guard.hidden_lines = _hide_output().count
    # Whole lines, at once: not held back until the buffer is full, and not in pieces either.
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(line_buffering=True, write_through=False)
    try:
        prepare()
        _show_log(os.environ, guard.rank)
        _run_as_main(command)
    except SystemExit as exit_:
        if exit_.code not in (None, 0):
            code = exit_.code if isinstance(exit_.code, int) else 1
            guard.fail(None, f"sys.exit({exit_.code!r})", code)
        else:
            guard.leave(f"sys.exit({'' if exit_.code is None else 0})")
    except LaunchError as error:
        guard.fail(None, str(error), 1)
    except BaseException as error:
        error.__traceback__ = _of_script(error.__traceback__)
        guard.fail(error, describe(error), exit_code_of(error))
    else:
        guard.leave("its script ended")
    if guard.record.state == FAILED:
        _flush()
        time.sleep(LINGER_SECONDS)  # its keeper ends it as soon as the launcher says so
        os._exit(guard.record.exit_code)
    return 0


def _take_share(size: int, siblings: set[int] | None) -> None:
    """Gives this rank its part of the host's cores, and of its GPUs."""
    take_share(os.environ, siblings)
    local_rank = None if size == 1 else number_from(LOCAL_RANK_VARIABLE)
    if local_rank is not None:
        take_gpu(os.environ, local_rank)


def _run_as_main(command: list[str]) -> None:
    """Runs a script, which imports what lies beside it, or a module, as from this folder."""
    if command[0] == "-m":
        sys.argv = command[1:]
        sys.path[0] = os.getcwd()
        runpy.run_module(command[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = command
        sys.path[0] = os.path.dirname(os.path.abspath(command[0]))
        runpy.run_path(command[0], run_name="__main__")


def _of_script(trace: types.TracebackType | None) -> types.TracebackType | None:
    """Drops the frames of this module and of runpy, with which every traceback begins."""
    for _ in range(2):
        trace = trace.tb_next if trace is not None else None
    while trace is not None and "runpy" in trace.tb_frame.f_code.co_filename:
        trace = trace.tb_next
    return trace


def _show_log(environ: Mapping[str, str], rank: int) -> None:
    """Shows what the library logs below the level of a warning, where the user asked for it.

    Warnings and errors are shown on all ranks as Python does, unless the script says otherwise.
    """
    level = environ.get(LOG_LEVEL_VARIABLE, "WARNING")
    logger = logging.getLogger(_LIBRARY)
    if level == "ERROR":
        logger.setLevel(level)
    elif level in ("DEBUG", "INFO") and (rank == 0 or environ.get(LOG_ALL_VARIABLE) == "1"):
        handler = logging.StreamHandler(sys.stderr)
        handler.setFormatter(logging.Formatter(f"rank {rank}: %(message)s"))
        # A script that sets up logging of its own shows it there.
        handler.addFilter(lambda record: not logging.getLogger().handlers)
        logger.addHandler(handler)
        logger.setLevel(level)


class _HiddenOutput(io.RawIOBase):
    """What counts the lines that are written to it, and keeps none."""

    def __init__(self) -> None:
        super().__init__()
        self._lines = 0

    def count(self) -> int:
        """Returns the number of lines so far."""
        return self._lines

    def writable(self) -> bool:
        """Whether it can be written to."""
        return True

    def fileno(self) -> int:
        """Returns a descriptor for children of the process, whose lines are not counted."""
        return _STANDARD_OUTPUT

    def write(self, data: Any, /) -> int:
        """Counts the ends of lines."""
        text = bytes(data)
        self._lines += text.count(b"\n")
        return len(text)


def _hide_output() -> _HiddenOutput:
    """Sends what this process and its children write to standard output nowhere."""
    with open(os.devnull, "wb") as nowhere:
        os.dup2(nowhere.fileno(), _STANDARD_OUTPUT)
    hidden = _HiddenOutput()
    sys.stdout = io.TextIOWrapper(io.BufferedWriter(hidden), "utf-8", "replace")
    return hidden


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()


if __name__ == "__main__":
    sys.exit(main())
