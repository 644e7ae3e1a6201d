"""What `tarantella` starts for each rank: a minder, and the script in a process below it.

The minder imports nothing, holds no memory and does not fail with the script, so it can tell
how the script's process ended, whichever way that was, and pass on signals that MPI launchers
follow with a kill.
"""

from __future__ import annotations

import contextlib
import faulthandler
import functools
import io
import os
import runpy
import shutil
import signal
import sys
import tempfile
import time
import types
from collections.abc import Callable
from typing import Any

from tarantella_pp.errors import LaunchError
from tarantella_pp.launch import core_binding, rank_log
from tarantella_pp.launch.guard import failure_guard, gpus
from tarantella_pp.launch.guard.cause import describe
from tarantella_pp.launch.guard.guarded_rank import (
    LOOK_SECONDS,
    Guard,
    exit_code_of,
)
from tarantella_pp.launch.guard.rank_records import (
    DIRECTORY_VARIABLE,
    FAILED,
    FINISHED,
    LOCAL_RANK_VARIABLE,
    RANK_VARIABLE,
    RETURNED,
    SIZE_VARIABLE,
    STARTED,
    Record,
    RunDirectory,
    headline,
)
from tarantella_pp.launch.prctl import die_with_parent, signal_name

OUTPUT_VARIABLE = "TNT_OUTPUT_ON_ALL_DEVICES"
PASSED_ON = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2)
_STANDARD_OUTPUT = 1
LINGER_SECONDS = 8.0
"""How long a failed rank stays for the launcher to end the job."""


def main() -> int:
    """Runs `worker.py SCRIPT ARGUMENTS...` as one rank of the job described by the environment."""
    die_with_parent(os.getppid())
    size = int(os.environ[SIZE_VARIABLE])
    rank = 0 if size == 1 else _number(RANK_VARIABLE)
    if rank is None:
        sys.exit(f"tarantella: {os.environ[RANK_VARIABLE]} is not set; is --mpi the MPI in use?")
    seen = os.path.isdir(os.environ[DIRECTORY_VARIABLE])
    # What the launcher cannot read, for this host does not see its folder, the minder still can.
    directory = RunDirectory(os.environ[DIRECTORY_VARIABLE] if seen else tempfile.mkdtemp())
    watched = {signal.SIGCHLD, *PASSED_ON}
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, watched)
    minder = os.getpid()
    siblings = _cores_of(os.getppid())
    child = os.fork()
    if child == 0:
        die_with_parent(minder)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        keeper = Guard(rank, size, directory, abort=None)
        return run_script(sys.argv[1:], keeper, functools.partial(_take_share, size, siblings))
    record = _mind(child, rank, directory, watched)
    if not seen:
        shutil.rmtree(directory.path, ignore_errors=True)
        if record.state == FAILED:
            sys.stderr.write(f"{record.details}{headline(record, size)}\n")
    elif record.state == FAILED:
        _linger(directory)
    return record.exit_code


def run_script(command: list[str], keeper: Guard, prepare: Callable[[], None]) -> int:
    """Runs `script.py ...` or `-m module ...` as Python would, and puts on record how it ended."""
    faulthandler.enable()
    failure_guard.adopt(keeper)
    keeper.start()
    if keeper.rank != keeper.size - 1 and os.environ.get(OUTPUT_VARIABLE) != "1":
        keeper.hidden_lines = _hide_output().count
    # Whole lines, at once: not held back until the buffer is full, and not in pieces either.
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(line_buffering=True, write_through=False)
    try:
        prepare()
        rank_log.show(os.environ, keeper.rank)
        _run_as_main(command)
    except SystemExit as exit_:
        if exit_.code not in (None, 0):
            code = exit_.code if isinstance(exit_.code, int) else 1
            keeper.fail(None, f"sys.exit({exit_.code!r})", code)
        else:
            keeper.leave(f"sys.exit({'' if exit_.code is None else 0})")
    except LaunchError as error:
        keeper.fail(None, str(error), 1)
    except BaseException as error:
        error.__traceback__ = _of_script(error.__traceback__)
        keeper.fail(error, describe(error), exit_code_of(error))
    else:
        keeper.leave("its script ended")
    if keeper.record.state == FAILED:
        _flush()
        _linger(RunDirectory(os.environ[DIRECTORY_VARIABLE]))
        os._exit(keeper.record.exit_code)
    return 0


def _take_share(size: int, siblings: set[int] | None) -> None:
    """Gives this rank its part of the host's cores, and of its GPUs."""
    core_binding.take_share(os.environ, siblings)
    local_rank = None if size == 1 else _number(LOCAL_RANK_VARIABLE)
    if local_rank is not None:
        gpus.take_one(os.environ, local_rank)


def _cores_of(pid: int) -> set[int] | None:
    """Returns the cores that another process may run on, where that can be told."""
    if not hasattr(os, "sched_getaffinity"):
        return None
    try:
        return os.sched_getaffinity(pid)
    except OSError:
        return None


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


def _mind(child: int, rank: int, directory: RunDirectory, watched: set[signal.Signals]) -> Record:
    """Waits for the rank, passing on signals, and returns how it ended, put on record."""
    passed_on: set[int] = set()
    while True:
        received = signal.sigtimedwait(watched, LOOK_SECONDS)
        if received is not None and received.si_signo != signal.SIGCHLD:
            os.kill(child, received.si_signo)
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            return _conclude(child, rank, directory, os.waitstatus_to_exitcode(status))
        for number in directory.stop_requests() - passed_on:
            passed_on.add(number)
            os.kill(child, number)


def _conclude(child: int, rank: int, directory: RunDirectory, status: int) -> Record:
    """Puts on record how the process of the rank ended, unless it has said so itself."""
    record = directory.read().get(rank) or Record.of_this_process(rank, STARTED)
    if record.state == FAILED:
        return record
    if status == 0 and record.state == RETURNED:
        record = record.becomes(FINISHED)
    elif status < 0:
        record = record.becomes(
            FAILED, cause=f"killed by {signal_name(-status)}", exit_code=128 - status
        )
    elif status == 0:
        cause = "its process ended with exit code 0 before its script did (os._exit?)"
        record = record.becomes(FAILED, cause=cause, exit_code=1)
    else:
        cause = f"its process ended with exit code {status}"
        record = record.becomes(FAILED, cause=cause, exit_code=status)
    directory.write(record)
    return record


def _linger(directory: RunDirectory) -> None:
    """Stays until the launcher has read the failure and ends the job, all ranks at once.

    So MPI does not notice, and has nothing to add to the message; and what the rank shares with
    the others is still known when it comes to cleaning up.
    """
    deadline = time.monotonic() + LINGER_SECONDS
    while directory.path.exists() and time.monotonic() < deadline:
        time.sleep(0.1)


def _number(pointer: str) -> int | None:
    """Returns a number that the MPI launcher gave this process, in the variable named by another.

    The launcher in use counts, for those of other jobs leave their variables to a shell.
    """
    value = os.environ.get(os.environ[pointer], "")
    return int(value) if value.isdigit() else None


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
