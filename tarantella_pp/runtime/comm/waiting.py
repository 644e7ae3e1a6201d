"""Waiting for other ranks without taking the core from a rank that computes; polls meanwhile."""

from __future__ import annotations

import contextlib
import logging
import os
import select
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tarantella_pp.errors import CommunicationError, ConfigurationError
from tarantella_pp.launch.environment import seconds_from

_LOG = logging.getLogger(__name__)
# The largest file number that `select` takes, and one.
_SELECTABLE = 1024


class Wakeup:
    """A socket of this rank on which other ranks of the same host ring.

    Whoever sends a message to a rank of its own host also sends an empty datagram, which ends the
    other's sleep between two polls. Rings may get lost, or come from anybody.
    """

    def __init__(self) -> None:
        # Where others ring, on which host, and the cores that this process may use (a job may have
        # few of a host's); empty where there are no such sockets
        self.address: list[Any] = []
        self.neighbours = 1  # how many ranks this one reaches, itself included
        self.crowded = False  # whether these have fewer cores than they are
        self._peers: list[bytes] = []
        self._socket: socket.socket | None = None
        with contextlib.suppress(OSError):
            own = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
            own.setblocking(False)
            own.bind("")  # Linux makes up a name that vanishes with the socket
            if own.fileno() >= _SELECTABLE:
                return
            self._socket = own
            self.address = [own.getsockname(), _place(), sorted(os.sched_getaffinity(0))]

    def connect(self, addresses: Sequence[list[Any]]) -> None:
        """Learns where to ring for each rank of the job; those elsewhere cannot be rung for."""
        # Ranks may be bound to cores of their own, or share all that the job has: what counts is
        # how many different ones they have together.
        used: set[int] = set()
        for address in addresses:
            near = bool(self.address) and address[1:2] == self.address[1:2]
            self._peers.append(address[0] if near else b"")
            used.update(address[2] if near else ())
        self.neighbours = max(1, sum(map(bool, self._peers)))
        self.crowded = self.neighbours > max(1, len(used))

    def reaches(self, rank: int) -> bool:
        """Whether `rank` and this rank can ring for each other."""
        return rank < len(self._peers) and bool(self._peers[rank])

    def ring(self, rank: int) -> None:
        """Ends the sleep of another rank, or its next one; never waits."""
        if self._socket is not None and self.reaches(rank):
            # A full queue means that the other has been rung for, no socket that it has ended.
            with contextlib.suppress(OSError):
                self._socket.sendto(b"", self._peers[rank])

    def sleep(self, seconds: float) -> bool:
        """Sleeps for some time, or until somebody rings."""
        if self._socket is None:
            time.sleep(seconds)
            return False
        # Python's other ways to wait for a socket count in milliseconds.
        if not select.select((self._socket,), (), (), seconds)[0]:
            return False
        with contextlib.suppress(BlockingIOError):
            while True:
                self._socket.recv(1)
        return True


def _place() -> str:
    """Returns what distinguishes the network namespaces of all hosts; sockets reach no further."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot}/{os.readlink('/proc/self/ns/net')}"


# Who waits for whom: a receive for the rank that sends, the end of a step for the sends that are
# still under way, a collective call for all. A send leaves in the background; only who is ahead by
# as much as `send_window` allows waits there.
#
#     rank 0   F0 F1 F2 ~~~~~~~~~~~~~ B0           ~  waits for the gradient of micro-batch 0
#                \                   /
#     rank 1   ~~~ F0 ........... B0 sends, rings  ~  waits for the activation of micro-batch 0
#
#     one wait   poll poll poll | sleep . sleep .. sleep .... ring, poll: done
#                1 ms at most     longer and longer; a ring begins anew; every 50 ms:
#                                 has a rank ended? is it too long?
#
# MPI's own waits never give up the core. Here the first moments of a wait poll, each time letting
# whoever else wants the core have it, and only while nobody does: a yield that takes longer than
# _CONTENDED_SECONDS means that somebody else has computed meanwhile. Then the process sleeps
# between polls. Where ranks share cores even short polling is felt by those that compute.
_SPIN_SECONDS, _SPIN_SECONDS_SHARED = 1e-3, 50e-6
_CONTENDED_SECONDS = 30e-6
_CHECK_SECONDS = 0.05
# A sleep as a share of the wait so far, which is how much later at most its end is noticed; and
# the longest in seconds. Who is rung for polls for safety only, and where MPI may not read another
# process's memory: then a message goes over in parts while both ranks poll.
_RUNG_FOR, _NOT_RUNG_FOR = (0.25, 5e-3), (0.05, 1e-3)
# A poll takes some 100 KB at most out of a network (16 segments of 8 KiB with UCX), and 10 Gbit/s
# bring 1.25 MB in a millisecond: so a rank polls this often in a row, which takes some
# microseconds where nothing has come.
NETWORK_POLLS = 16


@dataclass(frozen=True, slots=True)
class Limits:
    """How long a wait may take."""

    warn: float = 60.0  # seconds until a wait is logged as a warning; 0 for never
    timeout: float = 1800.0  # seconds until a wait ends the run; 0 for never

    @classmethod
    def from_environment(cls, environ: Mapping[str, str] = os.environ) -> Limits:
        """Reads the limits from `TNT_WARN` and `TNT_TIMEOUT`."""
        return cls(
            seconds_from(environ, "TNT_WARN", 60.0), seconds_from(environ, "TNT_TIMEOUT", 1800.0)
        )


@dataclass(frozen=True, slots=True)
class Waiter:
    """Waits for conditions that other ranks bring about."""

    rank: int
    limits: Limits
    between: Callable[[], object]
    wakeup: Wakeup
    report: Callable[[], str]
    where: Callable[[], str]

    def until(
        self,
        done: Callable[[], bool],
        what: Callable[[], str],
        peers: Sequence[int] = (),
        *,
        rings: bool = True,
        limited: bool = True,
        check: Callable[[], None] | None = None,
    ) -> None:
        """Returns as soon as `done()` is true, for which `peers` ring if they can.

        `check()` raises if the wait is in vain.
        """
        if done() or self._spin(done):
            return
        near = all(map(self.wakeup.reaches, peers))
        polls = 1 if near else NETWORK_POLLS
        share, longest = _RUNG_FOR if near and peers and rings else _NOT_RUNG_FOR
        limits = self.limits if limited else Limits(self.limits.warn, 0.0)
        start, warn, next_check = time.perf_counter(), limits.warn, _CHECK_SECONDS
        since = start  # of the last ring
        while not any(done() for _ in range(polls)):
            now = time.perf_counter()
            waited = now - start
            if waited >= next_check:
                next_check = waited + _CHECK_SECONDS
                if check is not None:
                    check()
                if 0 < warn <= waited:
                    warn, where = 0.0, self.where()
                    _LOG.warning(
                        "rank %d has waited %.0f s%s for %s", self.rank, waited, where, what()
                    )
                if 0 < limits.timeout <= waited:
                    raise CommunicationError(
                        f"Rank {self.rank} waited {waited:.1f} s{self.where()} for {what()} and "
                        f"gives up (TNT_TIMEOUT={limits.timeout:g}; 0 waits for ever).\n"
                        f"{self.report()}"
                    )
            self.between()
            if self.wakeup.sleep(min((now - since) * share, longest)):
                since = time.perf_counter()

    def _spin(self, done: Callable[[], bool]) -> bool:
        """Polls for a moment, as long as nobody else wants the core."""
        seconds = _SPIN_SECONDS_SHARED if self.wakeup.crowded else _SPIN_SECONDS
        end = time.perf_counter() + seconds
        while (now := time.perf_counter()) < end:
            os.sched_yield()
            contended = time.perf_counter() - now > _CONTENDED_SECONDS
            if done():
                return True
            if contended:
                return False
        return False


class Progress:
    """Moves on what this rank has begun, in whatever group, while it waits or in between."""

    def __init__(self) -> None:
        self.expected = 0  # messages that this rank is ready to receive
        self._begun: dict[Callable[[], bool], None] = {}  # sends and collectives

    def is_open(self) -> bool:
        """Whether anything is under way."""
        return bool(self.expected or self._begun)

    def follow(self, has_ended: Callable[[], bool]) -> None:
        """Moves something on with each poll, by asking whether it has ended, until it has."""
        self._begun[has_ended] = None

    def let_go(self, has_ended: Callable[[], bool]) -> None:
        """Forgets something that has ended."""
        self._begun.pop(has_ended, None)

    def poll(self) -> None:
        """Moves all on."""
        # A copy: a collective that ends may begin another, and whoever waits for one drops it.
        for has_ended in [*self._begun]:
            if has_ended():
                self.let_go(has_ended)


# Between two rounds of polls a socket takes what the network brings meanwhile: at 10 Gbit/s
# 1.25 MB. A round takes some 20 us from the rank, also while nothing comes.
_PERIOD_SECONDS = 1e-3
# How long the thread stays awake while the rank does something else than to compute.
_PATIENCE_SECONDS = 20e-3


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
