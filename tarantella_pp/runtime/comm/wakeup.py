"""Wakes a rank that sleeps the moment a message for it is under way."""

from __future__ import annotations

import contextlib
import os
import select
import socket
import struct
import time
from collections.abc import Sequence
from pathlib import Path

# The largest file number that `select` takes, and one.
_SELECTABLE = 1024
_NOTE = struct.Struct("<IIIQ")


class Wakeup:
    """A socket of this rank on which other ranks of the same host ring.

    MPI can only be polled. A rank that sleeps between polls notices a message late, one that
    polls often takes the core from a rank that computes. So whoever sends a message to a rank of
    its own host also sends a datagram that announces it, which ends the other's sleep. Rings may
    get lost or come from anybody: all they do is to make a rank poll.

    Attributes:
        address: Where to ring, for the other ranks; empty where there are no such sockets.
        neighbours: How many ranks this one reaches, itself included.
        crowded: Whether these have fewer cores than they are, of those that the job may use.
        asked: Whether another rank has asked this one to poll, for a message to go over.
    """

    def __init__(self) -> None:
        self.address = ""
        self.neighbours = 1
        self.crowded = False
        self.asked = False
        self._announced: dict[tuple[int, int, int], int] = {}
        self._peers: list[bytes] = []
        self._socket: socket.socket | None = None
        with contextlib.suppress(OSError):
            own = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
            own.setblocking(False)
            own.bind("")  # Linux makes up a name that vanishes with the socket
            if own.fileno() >= _SELECTABLE:
                return
            self._socket = own
            self.address = f"{_place()} {own.getsockname().hex()} {_cores():x}"

    def connect(self, addresses: Sequence[str]) -> None:
        """Learns where to ring for each rank of the job; those elsewhere cannot be rung for."""
        # Ranks may be bound to cores of their own, or share all that the job has: what counts is
        # how many different ones they have together.
        place, cores = self.address.partition(" ")[0], 0
        for address in addresses:
            near = bool(place) and address.startswith(f"{place} ")
            self._peers.append(bytes.fromhex(address.split(" ")[1]) if near else b"")
            cores |= int(address.split(" ")[2], 16) if near else 0
        self.neighbours = max(1, sum(map(bool, self._peers)))
        self.crowded = self.neighbours > max(1, cores.bit_count())

    def reaches(self, rank: int) -> bool:
        """Whether `rank` and this rank can ring for each other."""
        return rank < len(self._peers) and bool(self._peers[rank])

    def announce(self, rank: int, group: int, source: int, tag: int, number: int) -> None:
        """Tells another rank that a message is on its way, and ends its sleep; never waits."""
        self.ring(rank, _NOTE.pack(group, source, tag, number))

    def is_announced(self, group: int, source: int, tag: int, number: int) -> bool:
        """Whether a message is known to be on its way, or here."""
        return self._announced.get((group, source, tag), -1) >= number

    def ring(self, rank: int, note: bytes = b"") -> None:
        """Ends the sleep of another rank, or its next one; never waits."""
        if self._socket is not None and self.reaches(rank):
            # A full queue means that the other has been rung for, no socket that it has ended.
            with contextlib.suppress(OSError):
                self._socket.sendto(note, self._peers[rank])

    def sleep(self, seconds: float) -> bool:
        """Sleeps until somebody rings, or for some time."""
        if self._socket is None:
            time.sleep(seconds)
            return False
        # Python's other ways to wait for a socket count in milliseconds.
        if not select.select((self._socket,), (), (), seconds)[0]:
            return False
        with contextlib.suppress(BlockingIOError):
            while True:
                self._take(self._socket.recv(_NOTE.size))
        return True

    def _take(self, note: bytes) -> None:
        if len(note) == _NOTE.size:
            group, source, tag, number = _NOTE.unpack(note)
            self._announced[group, source, tag] = number
        else:
            self.asked = True


def _cores() -> int:
    """Returns a bit for each core that this process may use; a job may have few of a host's."""
    if hasattr(os, "sched_getaffinity"):
        return sum(1 << core for core in os.sched_getaffinity(0))
    return (1 << (os.cpu_count() or 1)) - 1


def _place() -> str:
    """Returns what distinguishes the network namespaces of all hosts; sockets reach no further."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot}/{os.readlink('/proc/self/ns/net')}"
