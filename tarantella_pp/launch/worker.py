"""What `tarantella` starts for each rank: a keeper, and the script in a process below it.

::

    mpiexec  --  what stands for the rank  --  keeper  --  rank

The keeper passes signals on, says how the rank has ended, and ends what the rank leaves behind: on
hosts without launcher, too, where MPI may kill the process that it takes for the rank at any time.
"""

from __future__ import annotations

import contextlib
import faulthandler
import functools
import io
import logging
import os
import pathlib
import runpy
import signal
import socket
import sys
import time
import types
from collections.abc import Mapping
from typing import Any

import psutil

from tarantella_pp.cause import describe
from tarantella_pp.errors import LaunchError
from tarantella_pp.launch import processes, records
from tarantella_pp.launch.environment import LOG_ALL_VARIABLE, LOG_LEVEL_VARIABLE, OUTPUT_VARIABLE
from tarantella_pp.launch.guard import Guard
from tarantella_pp.launch.resources import take_gpu, take_share

_PASSED_ON = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2)
# Tells the keeper that MPI has killed what stands for the rank.
_ALONE = signal.SIGRTMIN
_WATCHED = (signal.SIGCHLD, _ALONE, *_PASSED_ON)
# How long the launcher may take to end the job after a rank has failed.
LINGER_SECONDS = 8.0
# Its launcher follows SIGTERM and SIGINT with a kill, so ours sends others; see `OpenMpi`.
_OF_OPEN_MPI = {signal.SIGUSR1: signal.SIGTERM, signal.SIGUSR2: signal.SIGINT}
_STANDARD_INPUT, _STANDARD_OUTPUT, _STANDARD_ERROR = 0, 1, 2
_LIBRARY = "tarantella_pp"


def main() -> int:
    """Runs `worker.py SCRIPT ARGUMENTS...` as one rank of the job described by the environment."""
    processes.die_with_parent(os.getppid())
    # Blocked before the forks: a signal in between waits until its reader is there.
    signal.pthread_sigmask(signal.SIG_BLOCK, _WATCHED)
    own = os.getpid()
    keeper = os.fork()
    return _stand_for(keeper) if keeper else _start_rank(own)


def _stand_for(keeper: int) -> int:
    """Passes signals on to the keeper, and ends as it does."""
    status = None
    while status is None:
        number = signal.sigwait(_WATCHED)
        if number == signal.SIGCHLD:
            status = processes.reap(keeper)
        else:
            os.kill(keeper, number)
    if status < 0:  # a keeper that is killed cannot say so, and MPI may miss that its rank ends
        _report(_STANDARD_ERROR, records.number_from(records.RANK_VARIABLE) or 0, status=status)
        signal.sigtimedwait(_PASSED_ON, LINGER_SECONDS)
    return 128 - status if status < 0 else status


def _start_rank(parent: int) -> int:
    os.setsid()  # signals of MPI are for what stands for the rank alone
    processes.die_with_parent(parent, _ALONE)
    size = int(os.environ[records.SIZE_VARIABLE])
    rank = 0 if size == 1 else records.number_from(records.RANK_VARIABLE)
    if rank is None:
        sys.exit(
            f"tarantella: {os.environ[records.RANK_VARIABLE]} is not set; is --mpi the MPI in use?"
        )
    keeper = os.getpid()
    records.write(_STANDARD_ERROR, rank, state=records.STARTED, host=socket.gethostname())
    if rank:  # MPICH gives the others a pipe that nobody writes to, nor closes
        os.dup2(os.open(os.devnull, os.O_RDONLY), _STANDARD_INPUT)
    else:
        _open_input()
    if child := os.fork():
        return _keep(rank, child)
    processes.die_with_parent(keeper)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _WATCHED)
    # The script may close or redirect its own.
    report = functools.partial(_report, os.dup(_STANDARD_ERROR), rank)
    words = [word if word.strip(":") else word.removeprefix(":") for word in sys.argv[1:]]
    return run_script(words, Guard(rank, size, report))


def _open_input() -> None:
    """Reads on where the launcher's own input is, if MPI has been given none to hand on."""
    with contextlib.suppress(OSError, ValueError, psutil.Error):
        mpi, launcher = (above.pid for above in psutil.Process().parents()[2:4])
        if os.readlink(f"/proc/{mpi}/fd/{_STANDARD_INPUT}") == os.devnull:
            file = os.open(f"/proc/{launcher}/fd/{_STANDARD_INPUT}", os.O_RDONLY | os.O_NONBLOCK)
            os.set_blocking(file, True)
            os.dup2(file, _STANDARD_INPUT)
            info = pathlib.Path(f"/proc/{launcher}/fdinfo/{_STANDARD_INPUT}").read_text()
            os.lseek(file, int(info.split()[1]), os.SEEK_SET)  # none of a pipe


def _report(file: int, rank: int, **fields: Any) -> None:
    """Writes a record, unless the launcher is gone."""
    with contextlib.suppress(OSError):
        records.write(file, rank, **fields)


def _keep(rank: int, child: int) -> int:
    """Looks after a rank; returns its exit code once the launcher has had time to end the job."""
    processes.adopt_orphans()
    of_open_mpi = os.environ.get(records.RANK_VARIABLE, "").startswith("OMPI")
    status = None
    while status is None:
        number = signal.sigwait(_WATCHED)
        if number == signal.SIGCHLD:
            status = processes.reap(child)
        elif number == _ALONE:
            processes.remove(processes.shared_memory())
            processes.kill_descendants()
            os._exit(1)
        else:
            meant = _OF_OPEN_MPI.get(signal.Signals(number), number) if of_open_mpi else number
            if meant == signal.SIGTERM:
                _report(_STANDARD_ERROR, rank, stopped=True)
            os.kill(child, meant)
    _report(_STANDARD_ERROR, rank, status=status)
    processes.kill_descendants()
    if status:  # MPI need not notice by itself: it has nothing to add to what the launcher says
        signal.sigtimedwait([_ALONE], LINGER_SECONDS)
    return 128 - status if status < 0 else status


def run_script(command: list[str], guard: Guard) -> int:
    """Runs `script.py ...` or `-m module ...` as Python would, and reports how it ended."""
    faulthandler.enable()
    guard.start()
    if guard.rank != guard.size - 1 and os.environ.get(OUTPUT_VARIABLE) != "1":
        _hide_output()
    # Whole lines, at once: not held back until the buffer is full, and not in pieces either.
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(line_buffering=True, write_through=False)
    try:
        take_share(os.environ)
        number = records.number_from(records.LOCAL_RANK_VARIABLE) if guard.size > 1 else None
        if number is not None:
            take_gpu(os.environ, number)
        _show_log(os.environ, guard.rank)
        _run_as_main(command)
    except SystemExit as exit_:
        if exit_.code not in (None, 0):
            code = exit_.code if isinstance(exit_.code, int) else 1
            guard.fail(None, f"sys.exit({exit_.code!r})", code)
        else:
            guard.leave()
    except LaunchError as error:
        guard.fail(None, str(error))
    except BaseException as error:
        error.__traceback__ = _of_script(error.__traceback__)
        guard.fail(error, describe(error))
    else:
        guard.leave()
    if guard.state == records.FAILED:
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError):
                stream.flush()
        time.sleep(LINGER_SECONDS)  # its keeper ends it as soon as the launcher says so
        os._exit(guard.exit_code)
    return 0


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
        trace = trace and trace.tb_next
    while trace is not None and "runpy" in trace.tb_frame.f_code.co_filename:
        trace = trace.tb_next
    return trace


def _show_log(environ: Mapping[str, str], rank: int) -> None:
    """Shows what the library logs below the level of a warning, where the user asked for it."""
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


def _hide_output() -> None:
    """Sends what this process and its children write to standard output nowhere."""
    hidden = io.FileIO(os.devnull, "wb")
    os.dup2(hidden.fileno(), _STANDARD_OUTPUT)
    sys.stdout = io.TextIOWrapper(io.BufferedWriter(hidden), "utf-8", "replace")


if __name__ == "__main__":
    sys.exit(main())
