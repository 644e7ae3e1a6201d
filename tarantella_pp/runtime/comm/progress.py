"""What of a rank only moves while it polls, and a thread that polls while the rank computes."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Mapping

from tarantella_pp.errors import ConfigurationError
from tarantella_pp.runtime.comm.waiting import NETWORK_POLLS

# Between two rounds of polls a socket takes what the network brings meanwhile: at 10 Gbit/s
# 1.25 MB. A round takes some 20 us from the rank, also while nothing comes.
_PERIOD_SECONDS = 1e-3
# How long the thread stays awake while the rank does something else than to compute.
_PATIENCE_SECONDS = 20e-3


class Progress:
    """Moves on what this rank has begun, in whatever group, while it waits or in between."""

    def __init__(self) -> None:
        self.expected = 0  # messages that this rank is ready to receive
        # Say whether any of their messages is left; those that have none are asked no more.
        self.senders: dict[Callable[[], bool], None] = {}
        # Move a collective on, and say whether it has ended; one that has is let go.
        self.collectives: dict[Callable[[], bool], None] = {}

    def is_open(self) -> bool:
        """Whether anything is under way."""
        return bool(self.expected or self.senders or self.collectives)

    def poll(self) -> None:
        """Moves all on."""
        # A copy: a collective that ends may begin another, and whoever waits for one drops it.
        for ended in [*self.collectives]:
            if ended():
                self.collectives.pop(ended, None)
        for left in [*self.senders]:
            if not left():
                del self.senders[left]


class BackgroundProgress:
    """A thread that polls while the rank computes, and lets go before the rank goes on.

    A rank surrounds computations with this object, and leaves messages alone inside: MPI belongs to
    one thread at a time, as `MPI_THREAD_SERIALIZED` asks::

        the rank      send  F0 ............  wait  B0 ........................  send
        this thread          .  .  .  .  .          .  .  .  .  .  .  .  .  .
                             a poll each, as long as a message is under way
    """

    def __init__(self, is_open: Callable[[], bool], poll: Callable[[], object]) -> None:
        self._is_open = is_open
        self._poll = poll
        self._lock = threading.Lock()
        self._awake = threading.Event()
        self._computes = False
        self._error: BaseException | None = None
        self._thread: threading.Thread | None = None

    def __enter__(self) -> None:
        """Begins a computation."""
        if self._is_open():
            self._computes = True
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="tnt-progress", daemon=True)
                self._thread.start()
            self._awake.set()

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        """Ends a computation; raises what a poll has raised meanwhile."""
        if self._computes:
            self.stop()
        if self._error is not None and error is None:
            found, self._error = self._error, None
            raise found

    def stop(self) -> None:
        """Returns once this thread alone uses MPI; to be called again after Ctrl-C."""
        self._computes = False
        with self._lock:  # of a poll that has begun
            pass

    def _run(self) -> None:
        while True:
            self._awake.wait()
            last = time.monotonic()
            while time.monotonic() - last < _PATIENCE_SECONDS:
                time.sleep(_PERIOD_SECONDS)
                if self._move_on():
                    last = time.monotonic()
            self._awake.clear()
            if self._computes and self._is_open():  # it began before `clear`
                self._awake.set()

    def _move_on(self) -> bool:
        """Polls as long as the rank computes and something is open; returns whether it is."""
        with self._lock:
            try:
                # One poll takes little out of a socket; see `NETWORK_POLLS`.
                for _ in range(NETWORK_POLLS):
                    if not (self._computes and self._is_open()):
                        return False
                    self._poll()
            except BaseException as error:  # whoever computes raises it
                self._error = error
                self._computes = False
            return self._computes


def is_wanted(several_hosts: bool, environ: Mapping[str, str] | None = None) -> bool:
    """Whether messages are to move on while this rank computes, as `TNT_PROGRESS` may say."""
    text = (os.environ if environ is None else environ).get("TNT_PROGRESS", "").strip()
    if text not in ("", "0", "1"):
        raise ConfigurationError(
            "TNT_PROGRESS is 1 or 0: whether messages move on while a rank computes. "
            f"Received: TNT_PROGRESS={text!r}"
        )
    return several_hosts if not text else text == "1"
