"""Calls that all ranks must make: each rank announces its own, and all compare.

A collective that one rank enters in `save` and another in `evaluate` would mix up their data, or
wait for ever. So whoever makes a call first sees to it that all ranks make the same.

Each rank tells all others its call, and how many messages it has sent them so far: a rank that
waits for one in the call before sees whether it will ever come, and says so instead of waiting.
"""

from __future__ import annotations

import contextlib
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import msgspec
import numpy as np

from tarantella_pp.cause import calling_line, describe
from tarantella_pp.errors import ConfigurationError
from tarantella_pp.runtime.comm.waiting import Waiter

_TAG = 0
# Seconds for the others to come, too, once it is known that the calls differ.
_PATIENCE = 5.0
# Calls in which callbacks make calls of their own.
_RUN_USER_CODE = ("fit", "evaluate", "predict")


class CollectiveCall(msgspec.Struct, frozen=True, array_like=True):
    """A call of one rank, as others hear of it."""

    method: str  # the method; empty for the end of the script
    place: str = ""  # file and line of the user's script
    facts: dict[str, str] = {}  # what must be the same on all ranks, as text
    failed: str = ""  # what this rank's last call ended with, if it was an error
    number: int = 0  # how many it has told of before
    # Whether the rank has been in it for long, and another one keeps it waiting
    unfinished: bool = False
    broken: str = ""  # why this rank can make no more calls; empty if it can
    # How many messages the other rank was sent so far, by group and tag
    sent: list[tuple[tuple[int, int], int]] = []

    def text(self, fact: str | None = None) -> str:
        """Names the call, with one of its facts."""
        argument = "" if fact is None else f"{fact}={self.facts.get(fact, 'nothing')}"
        return f"{self.method}({argument}) at {self.place}" if self.method else "the script's end"


class Agreement:
    """This rank's calls, and the others' as far as they are known."""

    def __init__(self, mpi: Any, comm: Any, ring: Callable[[int], object]) -> None:
        # How many messages each rank was sent, by group and tag
        self.sent: defaultdict[int, Counter[tuple[int, int]]] = defaultdict(Counter)
        self.number = 0  # of calls; the same on all ranks
        self._mpi = mpi
        self._comm = comm
        self._ring = ring
        self._rank: int = comm.Get_rank()
        self._size: int = comm.Get_size()
        self._others = [rank for rank in range(self._size) if rank != self._rank]
        self._calls: list[CollectiveCall] = []
        self._heard: dict[int, dict[int, CollectiveCall]] = defaultdict(dict)
        self._ended: dict[int, CollectiveCall] = {}
        self._outgoing: list[tuple[Any, Any]] = []
        self._broken = ""
        self._failed = ""
        self._alone = ""  # what runs on this rank only

    def where(self) -> str:
        """Returns in which call this rank is, for messages."""
        return f" in {self._calls[-1].text()}" if self._calls else ""

    @contextlib.contextmanager
    def call(self, waiter: Waiter, method: str, facts: Mapping[str, Any]) -> Iterator[None]:
        """Surrounds a call that all ranks must make."""
        if self._calls and self._calls[-1].method not in _RUN_USER_CODE:
            yield  # a part of the call that was announced
            return
        if self._alone:
            raise ConfigurationError(
                f"{self._alone} runs on one rank, and calls {method}(), which takes all ranks. "
                "Pass it on all ranks, without OnOneRank, or leave the call out."
            )
        texts = {name: repr(value) for name, value in facts.items()}
        failed, self._failed = self._failed, ""
        self._calls.append(CollectiveCall(method, calling_line() or "?", texts, failed))
        try:
            self._announce(waiter, self._calls[-1])
            try:
                yield
            except BaseException as error:  # which the script may catch, and make another call
                self.failed(method, error)
                raise
        finally:
            self._calls.pop()

    def failed(self, method: str, error: BaseException) -> None:
        """Notes what a call has ended with, in case that other ranks are still in it."""
        self._failed = f"{method}() ended with {describe(error)}"

    @contextlib.contextmanager
    def alone(self, who: str) -> Iterator[None]:
        """Surrounds code that only this rank runs, in which no call of all ranks may be made."""
        self._alone = who
        try:
            yield
        finally:
            self._alone = ""

    def breaks(self, error: BaseException) -> None:
        """Notes, and tells the others at once, that this rank can make no other call."""
        # The first error is the cause; those that follow come of it.
        if not self._broken:
            self._broken = f"{describe(error)}{self.where()} on rank {self._rank}"
            self._tell(self._unfinished_call(), unfinished=True)

    def check_message(self, waiter: Waiter, source: int, group: int, tag: int, number: int) -> None:
        """Refuses to wait for a message that will not come, for its sender makes another call."""
        theirs = self._next_of(source)
        if theirs is not None and dict(theirs.sent).get((group, tag), 0) <= number:
            self._refuse(waiter)

    def check_arrival(self, waiter: Waiter, dest: int, arrived: Callable[[], bool]) -> None:
        """Refuses to wait until a message is taken, for its receiver makes another call."""
        if self._next_of(dest) is not None and not arrived():
            self._refuse(waiter)

    def end(self, waiter: Waiter) -> None:
        """Tells the others that this rank's script has ended, and waits until all have."""
        self._calls.clear()
        self._tell(CollectiveCall(""))

        def all_ended() -> bool:
            self._listen()
            return len(self._ended) == len(self._others) and self._delivered()

        def awaited() -> str:
            return f"ranks {sorted({*self._others} - {*self._ended})} to end"

        waiter.until(all_ended, awaited, limited=False)

    def _refuse(self, waiter: Waiter) -> None:
        """Joins the others in their call, with the call that cannot be finished."""
        try:
            self._announce(waiter, self._unfinished_call(), unfinished=True)
        except ConfigurationError as error:
            kind = type(error).__name__
            self._broken = self._broken or f"{kind}{self.where()} on rank {self._rank}"
            raise

    def _unfinished_call(self) -> CollectiveCall:
        return self._calls[-1] if self._calls else CollectiveCall("wait", calling_line() or "?")

    def _announce(self, waiter: Waiter, call: CollectiveCall, unfinished: bool = False) -> None:
        """Returns once all ranks have announced the same call."""
        mine = self._tell(call, unfinished)
        since = 0.0

        def complete() -> bool:
            nonlocal since
            self._listen()
            said = self._said(mine)
            if len(said) == self._size:
                return self._delivered()
            # Who is late must be named.
            since = since or (time.monotonic() if disagreement(said) else 0.0)
            return since > 0 and time.monotonic() - since > _PATIENCE

        def awaited() -> str:
            missing = [str(rank) for rank in self._others if rank not in self._said(mine)]
            return f"the other ranks to call {call.method}() (not yet: {', '.join(missing)})"

        waiter.until(complete, awaited)
        said = self._said(mine)
        for late in [number for number in self._heard if number <= self.number]:
            del self._heard[late]
        if reason := disagreement(said):
            broken = (one.broken for one in said.values() if one.broken)
            self._broken = self._broken or next(broken, "")  # which is why this rank cannot, either
            raise ConfigurationError(reason)

    def _tell(self, call: CollectiveCall, unfinished: bool = False) -> CollectiveCall:
        """Tells all ranks what this one does, and what it has sent them."""
        self.number += 1
        mine = msgspec.structs.replace(
            call, number=self.number, unfinished=unfinished, broken=self._broken
        )
        for rank in self._others:
            told = msgspec.structs.replace(mine, sent=[*self.sent[rank].items()])
            data = np.frombuffer(msgspec.msgpack.encode(told), np.uint8)
            self._outgoing.append((data, self._comm.Isend((data, self._mpi.BYTE), rank, _TAG)))
            self._ring(rank)
        return mine

    def _delivered(self) -> bool:
        self._outgoing = [(data, request) for data, request in self._outgoing if not request.Test()]
        return not self._outgoing

    def _listen(self) -> None:
        """Takes the calls that have arrived; never waits."""
        status = self._mpi.Status()
        while arrived := self._comm.Improbe(self._mpi.ANY_SOURCE, _TAG, status):
            data = np.empty(status.Get_count(self._mpi.BYTE), np.uint8)
            arrived.Recv((data, self._mpi.BYTE))
            message = msgspec.msgpack.decode(data.data, type=CollectiveCall)
            if message.method:
                self._heard[message.number][status.source] = message
            else:
                self._ended[status.source] = message

    def _next_of(self, rank: int) -> CollectiveCall | None:
        """The call of a rank that this one has not answered yet."""
        self._listen()
        return self._heard.get(self.number + 1, {}).get(rank) or self._ended.get(rank)

    def _said(self, mine: CollectiveCall) -> dict[int, CollectiveCall]:
        """What is known of all ranks."""
        # A rank that has ended since took part in this call: it has said so before.
        ended = {rank: one for rank, one in self._ended.items() if one.number <= mine.number}
        heard = self._heard.get(mine.number, {})
        return dict(sorted({**ended, **heard, self._rank: mine}.items()))


def disagreement(said: Mapping[int, CollectiveCall]) -> str:
    """Says how the calls of ranks differ, or why none of them can be made."""
    for one in said.values():
        if one.broken:
            return (
                f"No more calls are possible after {one.broken}: it came in the middle of a call, "
                "and what the other ranks have sent or trained meanwhile is not known. Start the "
                "script again, from what was saved last."
            )
    names = {one.method for one in said.values()}
    if len(names) > 1 or any(one.unfinished for one in said.values()):
        texts = {
            rank: one.text()
            + (", not finished," if one.unfinished else "")
            + (f" after {one.failed}" if one.failed else "")
            for rank, one in said.items()
        }
        return _refusal(
            texts,
            "Methods of a PipelineModel and `tnt.barrier()` take all ranks: none may stand behind "
            "`if tnt.is_master_rank()`, or in a callback that only some ranks have.",
        )
    for fact in sorted({name for one in said.values() for name in one.facts}):
        if len({one.facts.get(fact) for one in said.values()}) > 1:
            return _refusal(
                {rank: one.text(fact) for rank, one in said.items()},
                f"Give all ranks the same {fact}: it must follow neither from the rank nor from "
                "chance, as the names of `tempfile` do.",
            )
    return ""


def _refusal(texts: Mapping[int, str], advice: str) -> str:
    ranks: dict[str, list[str]] = {}
    for rank, text in texts.items():
        ranks.setdefault(text, []).append(str(rank))
    received = "; ".join(
        f"{text} on rank{'s' if len(numbers) > 1 else ''} {', '.join(numbers)}"
        for text, numbers in ranks.items()
    )
    return f"All ranks must make the same calls. Received: {received}. {advice}"
