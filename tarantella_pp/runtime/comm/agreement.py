"""Calls that all ranks must make: each rank announces its own, and all compare.

A collective of MPI that one rank enters in `save` and another in `evaluate` would mix up their
data, or wait for ever. So whoever makes a call first tells every rank which, and goes on once all
have made the same. What ranks have sent so far travels with it: a rank that waits for a message
of another sees whether it will ever come, and says so instead of waiting.
"""

from __future__ import annotations

import contextlib
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import msgspec
import numpy as np

from tarantella_pp.errors import ConfigurationError
from tarantella_pp.launch.guard.cause import calling_line, describe
from tarantella_pp.runtime.comm.announcement import (
    END,
    Announcement,
    CollectiveCall,
    disagreement,
)
from tarantella_pp.runtime.comm.waiting.polling import Waiter

_TAG = 0
_PATIENCE = 5.0
"""Seconds for the others to come, too, once it is known that the calls differ."""
_RUN_USER_CODE = ("fit", "evaluate", "predict")
"""Calls in which callbacks make calls of their own."""


class Agreement:
    """The calls of this rank and what is known of those of the others.

    Attributes:
        sent: How many messages were sent: by group, rank in the job and tag.
        entered: How many collectives this rank has entered, by group.
    """

    def __init__(self, mpi: Any, comm: Any, ring: Callable[[int], object]) -> None:
        self.sent: Counter[tuple[int, int, int]] = Counter()
        self.entered: Counter[int] = Counter()
        self._mpi = mpi
        self._comm = comm
        self._ring = ring
        self._rank: int = comm.Get_rank()
        self._others = [rank for rank in range(comm.Get_size()) if rank != self._rank]
        self._number = 0
        self._calls: list[CollectiveCall] = []
        self._heard: dict[int, dict[int, Announcement]] = defaultdict(dict)
        self._ended: dict[int, Announcement] = {}
        self._outgoing: list[tuple[Any, Any]] = []
        self._broken = ""

    def where(self) -> str:
        """Returns in which call this rank is, for messages."""
        return f" in {self._calls[-1].text()}" if self._calls else ""

    @property
    def number(self) -> int:
        """How many announcements there were, which is the same on all ranks."""
        return self._number

    @contextlib.contextmanager
    def call(self, waiter: Waiter, method: str, facts: Mapping[str, Any]) -> Iterator[None]:
        """Surrounds a call that all ranks must make."""
        if self._calls and self._calls[-1].method not in _RUN_USER_CODE:
            yield  # a part of the call that was announced
            return
        told = {name: repr(value) for name, value in facts.items()}
        self._calls.append(CollectiveCall(method, calling_line() or "?", told))
        try:
            self._announce(waiter, self._calls[-1])
            yield
        finally:
            self._calls.pop()

    def breaks(self, error: BaseException) -> None:
        """Notes that this rank has left a call in a state in which it can make no other.

        The others are told at once, for they wait for what will not come.
        """
        if not self._broken:
            self._broken = f"{describe(error)}{self.where()} on rank {self._rank}"
            self._tell(self._unfinished_call(), unfinished=True)

    def check_message(self, waiter: Waiter, source: int, group: int, tag: int, number: int) -> None:
        """Refuses to wait for a message that will not come, for its sender makes another call."""
        theirs = self._next_of(source)
        if theirs is not None and all(
            (group, tag) != (g, t) or count <= number for g, t, count in theirs.sent
        ):
            self._refuse(waiter)

    def check_arrival(self, waiter: Waiter, dest: int, arrived: Callable[[], bool]) -> None:
        """Refuses to wait until a message is taken, for its receiver makes another call."""
        if self._next_of(dest) is not None and not arrived():
            self._refuse(waiter)

    def check_collective(self, waiter: Waiter, peers: Sequence[int], group: int) -> None:
        """Refuses to wait in a collective that another rank will not enter."""
        for peer in peers:
            theirs = self._next_of(peer)
            if theirs is not None and theirs.entered.get(group, 0) < self.entered[group]:
                self._refuse(waiter)

    def end(self, waiter: Waiter) -> None:
        """Tells the others that this rank's script has ended, and waits until all have."""
        self._calls.clear()
        self._tell(END, unfinished=False)

        def all_ended() -> bool:
            self._listen()
            return len(self._ended) == len(self._others) and self._delivered()

        waiter.until(all_ended, lambda: "the other ranks to end", limited=False)

    def _refuse(self, waiter: Waiter) -> None:
        """Joins the others in their announcement, with the call that cannot be finished."""
        try:
            self._announce(waiter, self._unfinished_call(), unfinished=True)
        except ConfigurationError as error:
            kind = type(error).__name__
            self._broken = self._broken or f"{kind}{self.where()} on rank {self._rank}"
            raise

    def _unfinished_call(self) -> CollectiveCall:
        return self._calls[-1] if self._calls else CollectiveCall("wait", calling_line() or "?")

    def _announce(self, waiter: Waiter, call: CollectiveCall, unfinished: bool = False) -> None:
        """Tells all ranks of a call; returns once all have told the same."""
        mine = self._tell(call, unfinished)
        since: list[float] = []

        def complete() -> bool:
            self._listen()
            said = self._said(mine)
            if len(said) > len(self._others):
                return self._delivered()
            if disagreement(said):
                since.append(time.monotonic())
            return bool(since) and time.monotonic() - since[0] > _PATIENCE

        def awaited() -> str:
            missing = [str(rank) for rank in self._others if rank not in self._said(mine)]
            return f"the other ranks to call {call.method}() (not yet: {', '.join(missing)})"

        waiter.until(complete, awaited)
        said = self._said(mine)
        for heard in self._heard.values():
            heard.pop(mine.number, None)
        reason = disagreement(said)
        if reason:
            broken = (told.broken for told in said.values() if told.broken)
            self._broken = self._broken or next(broken, "")  # which is why this rank cannot, either
            raise ConfigurationError(reason)

    def _tell(self, call: CollectiveCall, unfinished: bool) -> Announcement:
        self._number += 1
        entered = dict(self.entered)
        told = Announcement(self._number, call, unfinished, self._broken, [], entered)
        for rank in self._others:
            sent = [(g, t, n) for (g, other, t), n in self.sent.items() if other == rank]
            text = msgspec.msgpack.encode(msgspec.structs.replace(told, sent=sent))
            data = np.frombuffer(text, np.uint8)
            request = self._comm.Isend((data, self._mpi.BYTE), rank, _TAG)
            self._outgoing.append((data, request))
            self._ring(rank)
        return told

    def _delivered(self) -> bool:
        self._outgoing = [(data, request) for data, request in self._outgoing if not request.Test()]
        return not self._outgoing

    def _listen(self) -> None:
        """Takes the announcements that have arrived; never waits."""
        status = self._mpi.Status()
        while message := self._comm.Improbe(self._mpi.ANY_SOURCE, _TAG, status):
            data = np.empty(status.Get_count(self._mpi.BYTE), np.uint8)
            message.Recv((data, self._mpi.BYTE))
            told = msgspec.msgpack.decode(data.data, type=Announcement)
            if told.call == END:
                self._ended[status.source] = told
            elif told.number >= self._number:
                self._heard[status.source][told.number] = told

    def _next_of(self, rank: int) -> Announcement | None:
        """The announcement of a rank that this one has not answered yet."""
        self._listen()
        return self._heard[rank].get(self._number + 1) or self._ended.get(rank)

    def _said(self, mine: Announcement) -> dict[int, Announcement]:
        said = {self._rank: mine}
        for rank in self._others:
            theirs = self._heard[rank].get(mine.number) or self._ended.get(rank)
            if theirs is not None:
                said[rank] = theirs
        return dict(sorted(said.items()))
