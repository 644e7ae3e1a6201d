"""Where the records of a job come together: in the launcher, or in rank 0 of a job without one."""

from __future__ import annotations

import contextlib
import dataclasses
import select
import socket
import threading
import time
from collections.abc import Sequence

from tarantella_pp.launch.channel import addresses, joining
from tarantella_pp.launch.channel.joining import Whereabouts
from tarantella_pp.launch.channel.line import (
    HEARTBEAT_VARIABLE,
    MOST_BYTES,
    Line,
    Message,
    heartbeat_seconds,
    keep_alive,
)
from tarantella_pp.launch.channel.rank_records import (
    FAILED,
    GONE,
    RETURNED,
    STARTED,
    Record,
)

_BACKLOG = 4096
_LOOK_SECONDS = 0.5
"""How often it is looked whether a host is silent."""


@dataclasses.dataclass(slots=True)
class _Guest:
    """A connection that has not proved yet that it belongs to the job."""

    line: Line
    nonce: str
    since: float


class Hub:
    """Takes the records of all ranks, and passes on to each what it has to know of the others.

    Only who knows the secret of the job is listened to. Records are numbered as they come, which
    no clock of another host has to do with.

    Attributes:
        whereabouts: How a rank finds it.
        records: The last record of each rank that has one.
        lost: Ranks whose connection broke, with the reason and the time.
        last_joined: When the last rank came that has come; None before the first.
    """

    def __init__(self, size: int, hosts: Sequence[str] | None = None) -> None:
        here = [addresses.LOOPBACK] if hosts is None else addresses.towards(hosts)
        self._listener = _listen(hosts is None)
        port = self._listener.getsockname()[1]
        self.whereabouts = Whereabouts(tuple(here), port, joining.new_secret())
        self.records: dict[int, Record] = {}
        self.lost: dict[int, tuple[str, float]] = {}
        self.last_joined: float | None = None
        self._size = size
        self._heartbeat = heartbeat_seconds()
        self._next_look = 0.0
        self._guests: list[_Guest] = []
        self._members: dict[int, Line] = {}
        self._stops: list[int] = []
        self._count = 0

    def poll(self, seconds: float) -> None:
        """Takes what comes, and returns when something has, or after some time."""
        lines = [*(guest.line for guest in self._guests), *self._members.values()]
        poller = select.poll()  # `select` itself takes no descriptor above 1023
        poller.register(self._listener, select.POLLIN)
        for line in lines:
            poller.register(line, select.POLLIN | (select.POLLOUT if line.unsent else 0))
        ready = {descriptor for descriptor, _ in poller.poll(1000 * seconds)}
        if self._listener.fileno() in ready:
            self._welcome_guests()
        for guest in self._guests[:]:
            self._hear_guest(guest)
        changed: list[Record] = []
        now = time.monotonic()
        for rank, line in [*self._members.items()]:
            if now > self._next_look:
                line.end_if_silent(self._heartbeat)
            if line.fileno() in ready or line.ended is not None:
                line.flush()
                changed += self._hear(rank, line)
        if now > self._next_look:
            self._next_look = now + _LOOK_SECONDS
        if changed:
            self._tell({"records": [dataclasses.asdict(record) for record in changed]})

    def request_stop(self, signal_number: int) -> None:
        """Has the minders of all ranks pass a signal on to their rank, once."""
        if signal_number not in self._stops:
            self._stops.append(signal_number)
            self._tell({"stop": signal_number})

    def end(self, seconds: float) -> None:
        """Has all ranks ended that are left, and waits until they are, for a while."""
        deadline = time.monotonic() + seconds
        self._tell({"end": True})
        while self._members and (left := deadline - time.monotonic()) > 0:
            self.poll(left)

    def close(self) -> None:
        """Closes all connections."""
        self._listener.close()
        for line in [*(guest.line for guest in self._guests), *self._members.values()]:
            line.close()

    def missing(self) -> list[int]:
        """Returns the ranks that have not been heard of."""
        return [rank for rank in range(self._size) if rank not in self.records]

    def _welcome_guests(self) -> None:
        """Accepts connections, and asks each for a proof."""
        while True:
            try:
                sock, _ = self._listener.accept()
            except OSError:  # none left, or one that has gone again
                return
            keep_alive(sock, self._heartbeat)
            guest = _Guest(
                Line(sock, joining.GREETING_BYTES), joining.new_secret(), time.monotonic()
            )
            guest.line.send({"nonce": guest.nonce})
            self._guests.append(guest)

    def _hear_guest(self, guest: _Guest) -> None:
        """Makes a member of one that proves to belong to the job."""
        for message in guest.line.receive()[:1]:
            rank, nonce = message.get("rank"), message.get("nonce")
            text, given = f"rank {rank} {guest.nonce}", message.get("proof")
            proved = joining.is_proof(given, self.whereabouts.secret, text)
            if proved and isinstance(rank, int) and rank not in self._members:
                self._guests.remove(guest)
                self._join(rank, guest.line, str(nonce))
                return
            guest.line.ended = "no rank of this job"
        if guest.line.ended is not None or time.monotonic() - guest.since > joining.JOIN_SECONDS:
            guest.line.close()
            self._guests.remove(guest)

    def _join(self, rank: int, line: Line, nonce: str) -> None:
        """Answers with a proof, and with what has happened so far."""
        line.most_bytes = MOST_BYTES
        told = [dataclasses.asdict(r) for r in self.records.values() if _matters(r, None)]
        answer = joining.proof(self.whereabouts.secret, f"hub {nonce}")
        self._members[rank] = line
        now = time.monotonic()
        self.last_joined = now
        self.lost.pop(rank, None)  # it has tried twice
        line.send({"proof": answer, "records": told, "stops": self._stops, "now": now})

    def _hear(self, rank: int, line: Line) -> list[Record]:
        """Takes what a rank says of itself; returns what others have to know of it."""
        changed: list[Record] = []
        for message in line.receive():
            if message.get("bye"):
                self._members.pop(rank, None)
                line.close()
                return changed
            record = Record.from_message(message.get("record"))
            if record is None or record.rank != rank:
                continue
            self._count += 1
            record = dataclasses.replace(record, time=time.monotonic(), order=self._count)
            before, self.records[rank] = self.records.get(rank), record
            if _matters(record, before):
                changed.append(record)
        if line.ended is not None and rank in self._members:
            del self._members[rank]
            changed += self._lose(rank, line)
            line.close()
        return changed

    def _lose(self, rank: int, line: Line) -> list[Record]:
        """Notes that a connection broke; a host that was silent for too long has failed."""
        self.lost[rank] = line.ended or "it was closed", time.monotonic()
        record = self.records.get(rank)
        if not line.timed_out or record is None or record.state in GONE:
            return []
        cause = (
            f"nothing was heard of its host for {self._heartbeat:g} s ({HEARTBEAT_VARIABLE}): "
            "the host or the link to it is dead"
        )
        self._count += 1
        failed = record.becomes(FAILED, cause=cause, exit_code=1)
        self.records[rank] = dataclasses.replace(failed, order=self._count)
        return [self.records[rank]]

    def _tell(self, message: Message) -> None:
        for line in self._members.values():
            line.send(message)


class HubThread:
    """A hub that works beside the script of rank 0."""

    def __init__(self, hub: Hub) -> None:
        self._hub = hub
        threading.Thread(target=self._work, daemon=True).start()

    def _work(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                self._hub.poll(1.0)


def _matters(record: Record, before: Record | None) -> bool:
    """Whether other ranks have to know of a record: of ends, and of waits that may be for ever."""
    if record.state == STARTED:
        return bool(record.waiting_at) or (before is not None and bool(before.waiting_at))
    return record.state in (RETURNED, FAILED) or before is None


def _listen(local: bool) -> socket.socket:
    """Returns a socket that takes connections, of this host only if it is local."""
    if local:
        listener = socket.create_server((addresses.LOOPBACK, 0), backlog=_BACKLOG)
    else:
        try:
            listener = socket.create_server(
                ("", 0), family=socket.AF_INET6, backlog=_BACKLOG, dualstack_ipv6=True
            )
        except (OSError, ValueError):  # IPv6 is turned off
            listener = socket.create_server(("", 0), backlog=_BACKLOG)
    listener.setblocking(False)
    return listener
