"""What `tarantella` starts for each rank: a minder, and the script in a process below it.

::

    mpiexec  --  what stands for the rank  --  minder  --  rank
"""

from __future__ import annotations

import contextlib
import faulthandler
import functools
import io
import os
import runpy
import signal
import socket
import sys
import time
import types
from collections.abc import Callable
from typing import Any

from tarantella_pp.errors import LaunchError
from tarantella_pp.launch.channel.joining import join, take_whereabouts
from tarantella_pp.launch.channel.line import Line
from tarantella_pp.launch.channel.rank_records import (
    FAILED,
    LOCAL_RANK_VARIABLE,
    RANK_VARIABLE,
    SIZE_VARIABLE,
    RankRecords,
)
from tarantella_pp.launch.guard import core_binding, failure_guard, gpus, rank_log
from tarantella_pp.launch.guard.cause import describe
from tarantella_pp.launch.guard.guarded_rank import (
    Guard,
    exit_code_of,
)
from tarantella_pp.launch.minder import LINGER_SECONDS, WATCHED, Minder
from tarantella_pp.launch.prctl import die_with_parent

OUTPUT_VARIABLE = "TNT_OUTPUT_ON_ALL_DEVICES"
_STANDARD_OUTPUT = 1


def main() -> int:
    """Runs `worker.py SCRIPT ARGUMENTS...` as one rank of the job described by the environment.

    MPI may kill this process at any time, so that it could not clean up. It only stands for the
    rank: its minder, in a session of its own, notices that and cleans up.
    """
    die_with_parent(os.getppid())
    signal.pthread_sigmask(signal.SIG_BLOCK, WATCHED)
    launcher = os.getppid()
    stands, standing = os.pipe()
    minder = os.fork()
    if minder:
        os.close(stands)
        return _stand_for(minder)
    os.setsid()
    os.close(standing)
    return _mind(stands, launcher)


def _stand_for(minder: int) -> int:
    """Passes signals on to the minder, and ends as it does."""
    while True:
        number = signal.sigwait(WATCHED)
        if number != signal.SIGCHLD:
            os.kill(minder, number)
        elif (ended := os.waitpid(minder, os.WNOHANG))[0]:
            status = os.waitstatus_to_exitcode(ended[1])
            if status < 0:  # not every MPI ends a job for an exit code
                signal.pthread_sigmask(signal.SIG_UNBLOCK, WATCHED)
                os.kill(os.getpid(), signal.SIGKILL)
            return status


def _mind(stands: int, launcher: int) -> int:
    """Joins the job, and starts the rank and looks after it."""
    size = int(os.environ[SIZE_VARIABLE])
    rank = 0 if size == 1 else _number(RANK_VARIABLE)
    if rank is None:
        sys.exit(f"tarantella: {os.environ[RANK_VARIABLE]} is not set; is --mpi the MPI in use?")
    try:
        hub, welcome = join(take_whereabouts(), rank)
    except LaunchError as error:
        sys.stderr.write(f"tarantella: rank {rank} of {size}: {error}\n")
        sys.stderr.flush()
        os.kill(os.getpid(), signal.SIGKILL)
    minder, siblings = os.getpid(), core_binding.cores_of_starter(launcher)
    minders, own = socket.socketpair()
    child = os.fork()
    if child == 0:
        die_with_parent(minder)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, WATCHED)
        minders.close()
        hub.close()
        os.close(stands)
        keeper = Guard(rank, size, RankRecords(Line(own)), abort=None)
        return run_script(sys.argv[1:], keeper, functools.partial(_take_share, size, siblings))
    own.close()
    return Minder(rank, child, hub, Line(minders), stands, launcher).run(welcome).exit_code


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
        time.sleep(LINGER_SECONDS)  # its minder ends it as soon as the launcher says so
        os._exit(keeper.record.exit_code)
    return 0


def _take_share(size: int, siblings: set[int] | None) -> None:
    """Gives this rank its part of the host's cores, and of its GPUs."""
    core_binding.take_share(os.environ, siblings)
    local_rank = None if size == 1 else _number(LOCAL_RANK_VARIABLE)
    if local_rank is not None:
        gpus.take_one(os.environ, local_rank)


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
