"""What looks after the process of one rank: a small one beside it, on the same host.

It imports nothing of the script's, holds no memory and does not fail with it. So it can tell how
the rank's process ended, whichever way that was, passes on signals that MPI launchers follow with
a kill, and cleans up when MPI kills what it knows of the rank, or the launcher is gone.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import select
import shutil
import signal
import time

import psutil

from tarantella_pp.launch import records
from tarantella_pp.launch.processes import (
    adopt_orphans,
    kill_descendants,
    remove_shared_memory,
    shared_memory_of_descendants,
    signal_name,
    unused_shared_memory,
)
from tarantella_pp.launch.records import FAILED, FINISHED, RANK_VARIABLE, RETURNED, Record

PASSED_ON = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2)
WATCHED = (signal.SIGCHLD, *PASSED_ON)
LINGER_SECONDS = 8.0
"""How long the launcher may take to end the job after a rank has failed."""
_OF_OPEN_MPI = {signal.SIGUSR1: signal.SIGTERM, signal.SIGUSR2: signal.SIGINT}
"""Its launcher follows SIGTERM and SIGINT with a kill, so ours sends others; see `OpenMpi`."""
_SESSION_VARIABLE = "PMIX_SERVER_TMPDIR"
"""Where Open MPI's daemon on this host keeps files, which it leaves behind when it is cut off."""
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
    """Returns what is there to be read at once."""
    found = b""
    with contextlib.suppress(BlockingIOError):
        while piece := os.read(file, 1 << 16):
            found += piece
    return found
