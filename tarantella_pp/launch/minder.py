"""What looks after the process of one rank: a small one beside it, on the same host.

It imports nothing of the script's, holds no memory and does not fail with it. So it can tell how
the rank's process ended, whichever way that was, passes on signals that MPI launchers follow with
a kill, and cleans up on its host when the job ends elsewhere, or when its launcher is gone::

    launcher (hub)  <-- TCP -->  minder  <-- socket pair -->  rank
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import select
import shutil
import signal
import socket
import time

import psutil

from tarantella_pp.launch.channel.line import Line, heartbeat_seconds
from tarantella_pp.launch.channel.rank_records import (
    FAILED,
    FINISHED,
    RETURNED,
    STARTED,
    Record,
)
from tarantella_pp.launch.guard.start_watch import LAUNCHERS
from tarantella_pp.launch.prctl import adopt_orphans, signal_name
from tarantella_pp.launch.processes import (
    kill_descendants,
    remove_shared_memory,
    shared_memory_of_descendants,
    unused_shared_memory,
)

PASSED_ON = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2)
WATCHED = (signal.SIGCHLD, *PASSED_ON)
_SESSION_VARIABLE = "PMIX_SERVER_TMPDIR"
"""Where Open MPI's daemon on this host keeps files, which it leaves behind when it is cut off."""
LINGER_SECONDS = 8.0
"""How long a minder stays after its rank has failed, for the launcher to end the job."""
LEAVE_SECONDS = 10.0
"""How long the launcher may take to say that it has got everything."""
ABORT_SECONDS = 0.25
"""How long a rank may take to end by itself after it has had MPI end the job; less than the
launcher waits for what is on its way."""
_LOOK_SECONDS = 0.5
_UNUSED_SECONDS = 0.2
_DAEMONS = frozenset(LAUNCHERS) - {"prterun", "mpirun", "mpiexec"}
"""What MPIs call their process on a host other than that of the launcher."""


class Minder:
    """Looks after one rank."""

    def __init__(
        self, rank: int, child: int, hub: Line, own: Line, stands: int, launcher: int
    ) -> None:
        self._child = child
        self._hub = hub
        self._own = own
        self._stands = stands
        self._launcher = launcher
        self._record = Record.of_this_process(rank, STARTED)
        self._heartbeat = heartbeat_seconds()
        self._hub_ahead = 0.0
        self._ended_at = 0.0
        self._status: int | None = None
        self._start = psutil.Process().create_time() - 1.0
        self._waking, woken = socket.socketpair()
        for end in (self._waking, woken):
            end.setblocking(False)
        self._woken = woken
        adopt_orphans()
        signal.set_wakeup_fd(woken.fileno(), warn_on_full_buffer=False)
        for number in WATCHED:
            signal.signal(number, lambda *_: None)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, WATCHED)

    def run(self, welcome: dict[str, object]) -> Record:
        """Returns how the rank ended, once the launcher knows."""
        self._obey(welcome)
        ahead = welcome.get("ahead")
        self._hub_ahead = ahead if isinstance(ahead, float) else 0.0
        for number in _numbers(welcome.get("stops")):
            self._signal(number)
        while self._status is None:
            self._wait(_LOOK_SECONDS)
            self._reap()
        self._take_records()
        self._conclude(self._status)
        self._hub.send({"record": dataclasses.asdict(self._record)})
        if self._record.state == FAILED:
            self._linger()
        self._hub.send({"bye": True})
        self._hub.leave(LEAVE_SECONDS)
        return self._record

    def _wait(self, seconds: float) -> None:
        """Waits for a signal or a message, and does what it says."""
        lines = [self._hub, self._own]
        readers = [line.fileno() for line in lines if line.ended is None]
        writers = [line.fileno() for line in lines if line.ended is None and line.unsent]
        readers += [self._waking.fileno(), self._stands]
        ready = select.select(readers, writers, [], seconds)[0]
        for line in lines:
            line.flush()
        with contextlib.suppress(BlockingIOError):
            for number in self._waking.recv(64):
                if number in PASSED_ON:
                    self._signal(number)
        self._take_records()
        for message in self._hub.receive():
            self._obey(message)
        self._hub.end_if_silent(self._heartbeat)
        if self._stands in ready and self._hub.ended is None:
            self._note_abort()
        if self._hub.ended is not None or self._stands in ready:
            self._end_alone()

    def _take_records(self) -> None:
        """Takes what the rank says of itself, and passes it on."""
        for message in self._own.receive():
            record = Record.from_message(message.get("record"))
            if record is not None:
                self._record = record
                self._hub.send(message)

    def _obey(self, message: dict[str, object]) -> None:
        """Does what the launcher says."""
        if message.get("records"):
            self._own.send({"records": message["records"]})
        self._signal(*_numbers([message.get("stop")]))
        if message.get("end"):
            self._clean_up()
            self._hub.send({"bye": True})
            self._hub.leave(LEAVE_SECONDS)
            time.sleep(LINGER_SECONDS)  # the launcher ends all at once, so that MPI says nothing
            os._exit(self._record.exit_code or 1)

    def _signal(self, *numbers: int) -> None:
        for number in numbers:
            if self._status is None:
                os.kill(self._child, number)

    def _reap(self) -> None:
        """Takes the exit codes of ended children, adopted ones included."""
        with contextlib.suppress(ChildProcessError):
            while (ended := os.waitpid(-1, os.WNOHANG))[0]:
                if ended[0] == self._child:
                    self._ended_at = time.monotonic()
                    self._status = os.waitstatus_to_exitcode(ended[1])

    def _conclude(self, status: int) -> None:
        """Notes how the process of the rank ended, unless it has said so itself."""
        record = self._record
        if record.state == FAILED:
            return
        if status == 0 and record.state == RETURNED:
            record = record.becomes(FINISHED)
        elif status < 0:
            cause = f"killed by {signal_name(-status)}"
            record = record.becomes(FAILED, cause=cause, exit_code=128 - status)
        elif status == 0:
            cause = "its process ended with exit code 0 before its script did (os._exit?)"
            record = record.becomes(FAILED, cause=cause, exit_code=1)
        else:
            cause = f"its process ended with exit code {status}"
            record = record.becomes(FAILED, cause=cause, exit_code=status)
        if status > 0 or status == -signal.SIGTERM:
            ended_at = self._ended_at + self._hub_ahead
            record = dataclasses.replace(record, unexplained=True, ended_at=ended_at)
        self._record = record

    def _note_abort(self) -> None:
        """Tells how the rank has ended itself, if so: MPI ends all for one that calls `Abort`."""
        deadline = time.monotonic() + ABORT_SECONDS
        while self._status is None and time.monotonic() < deadline:
            time.sleep(0.01)
            self._reap()
        self._take_records()
        if self._status is not None and self._status > 0 and self._record.state != FAILED:
            self._conclude(self._status)
            self._hub.send({"record": dataclasses.asdict(self._record)})
            self._hub.flush(ABORT_SECONDS)

    def _linger(self) -> None:
        """Stays until the launcher has taken note of the failure and ends the job.

        So MPI does not notice, and has nothing to add to the message.
        """
        deadline = time.monotonic() + LINGER_SECONDS
        while (left := deadline - time.monotonic()) > 0 and self._hub.ended is None:
            self._wait(min(left, _LOOK_SECONDS))

    def _clean_up(self) -> None:
        """Ends what is left of the rank, and removes what it has shared with others."""
        shared = shared_memory_of_descendants()
        kill_descendants()
        remove_shared_memory(shared)
        if unused := unused_shared_memory(self._start):  # of a rank that has gone before
            time.sleep(_UNUSED_SECONDS)  # another job makes a file first, and then maps it
            remove_shared_memory(unused & unused_shared_memory(self._start))
        if folder := os.environ.get(_SESSION_VARIABLE):
            shutil.rmtree(folder, ignore_errors=True)

    def _end_alone(self) -> None:
        """Ends this rank, for the launcher is gone, or its host, or the link to it.

        Or MPI has killed what it knows of the rank. Where the link is dead, the MPI's own process
        on this host does not hear of it either.
        """
        self._clean_up()
        if self._hub.timed_out:
            with contextlib.suppress(psutil.Error):
                launcher = psutil.Process(self._launcher)
                if launcher.name() in _DAEMONS:
                    launcher.kill()
        os._exit(1)


def _numbers(told: object) -> list[int]:
    """Returns signals that may be passed on."""
    return [n for n in told if n in PASSED_ON] if isinstance(told, list) else []
