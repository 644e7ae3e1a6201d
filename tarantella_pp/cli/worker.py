"""What `tarantella` starts for each rank: a minder, and the script in a process below it.

The minder imports nothing, holds no memory and does not fail with the script, so it can tell
how the script's process ended, whichever way that was, and pass on signals that MPI launchers
follow with a kill.
"""

from __future__ import annotations

import contextlib
import faulthandler
import io
import os
import runpy
import signal
import sys
import time
import types

from tarantella_pp.cli.binding import bind_to_share
from tarantella_pp.cli.prctl import die_with_parent, signal_name
from tarantella_pp.runtime import guard
from tarantella_pp.runtime.guarded_rank import LOOK_SECONDS, Guard, describe, exit_code_of
from tarantella_pp.runtime.records import (
    DIRECTORY_VARIABLE,
    FAILED,
    FINISHED,
    RETURNED,
    SIZE_VARIABLE,
    STARTED,
    Record,
    RunDirectory,
)

OUTPUT_VARIABLE = "TNT_OUTPUT_ON_ALL_DEVICES"
RANK_VARIABLES = ("OMPI_COMM_WORLD_RANK", "PMIX_RANK", "PMI_RANK", "SLURM_PROCID")
PASSED_ON = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2)
_STANDARD_OUTPUT = 1
LINGER_SECONDS = 8.0
"""How long a failed rank stays for the launcher to end the job."""


def main() -> int:
    """Runs `worker.py SCRIPT ARGUMENTS...` as one rank of the job described by the environment.

    Returns:
        The exit code of the rank.
    """
    die_with_parent(os.getppid())
    rank, size = _rank(), int(os.environ[SIZE_VARIABLE])
    directory = RunDirectory(os.environ[DIRECTORY_VARIABLE])
    watched = {signal.SIGCHLD, *PASSED_ON}
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, watched)
    minder = os.getpid()
    child = os.fork()
    if child == 0:
        die_with_parent(minder)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        bind_to_share(os.environ)
        return run_script(sys.argv[1:], Guard(rank, size, directory, abort=None))
    record = _mind(child, rank, directory, watched)
    if record.state == FAILED:
        _linger(directory)
    return record.exit_code


def run_script(command: list[str], keeper: Guard) -> int:
    """Runs a script as `python script.py arguments` would, and puts on record how it ended.

    Args:
        command: Path of the script and its arguments.
        keeper: The guard of this rank.

    Returns:
        The exit code. A failed rank does not return: it leaves without waiting for MPI's other
        ranks.
    """
    faulthandler.enable()
    guard.adopt(keeper)
    keeper.start()
    if keeper.rank != keeper.size - 1 and os.environ.get(OUTPUT_VARIABLE) != "1":
        _silence_output()
    # Whole lines, at once: not held back until the buffer is full, and not in pieces either.
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(line_buffering=True, write_through=False)
    sys.argv = command
    sys.path[0] = os.path.dirname(os.path.abspath(command[0]))
    try:
        runpy.run_path(command[0], run_name="__main__")
    except SystemExit as exit_:
        if exit_.code not in (None, 0):
            code = exit_.code if isinstance(exit_.code, int) else 1
            keeper.fail(None, f"sys.exit({exit_.code!r})", code)
        else:
            keeper.leave(f"sys.exit({'' if exit_.code is None else 0})")
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


def _of_script(trace: types.TracebackType | None) -> types.TracebackType | None:
    """Drops the frames of this module and of runpy, with which every traceback begins."""
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


def _rank() -> int:
    """Returns the number of this rank, which every MPI launcher leaves in the environment."""
    for variable in RANK_VARIABLES:
        value = os.environ.get(variable, "")
        if value.isdigit():
            return int(value)
    return 0


def _silence_output() -> None:
    """Sends what this process and its children write to standard output nowhere."""
    with open(os.devnull, "wb") as nowhere:
        os.dup2(nowhere.fileno(), _STANDARD_OUTPUT)


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()


if __name__ == "__main__":
    sys.exit(main())
