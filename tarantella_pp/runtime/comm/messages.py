"""Messages of tensors between two ranks: nothing is copied, nothing is waited for before needed."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tarantella_pp.errors import CommunicationError
from tarantella_pp.runtime.comm import waiting
from tarantella_pp.runtime.comm.agreement import Agreement
from tarantella_pp.runtime.comm.buffers import (
    Bytes,
    TensorSpec,
    aligned_memory,
    as_array,
    as_bytes,
    pieces,
)


@dataclass
class Process:
    """What all groups of a rank share."""

    mpi: Any
    wakeup: waiting.Wakeup
    limits: waiting.Limits
    agreement: Agreement
    progress: waiting.Progress
    background: waiting.BackgroundProgress | None = None

    def end_background(self) -> None:
        """Makes sure that this thread alone uses MPI, also if Ctrl-C ended a computation."""
        if self.background is not None:
            self.background.stop()


@dataclass(eq=False, slots=True)
class SendRequest:
    """A message on its way out; keeps its memory alive until MPI has read all of it."""

    channel: Channel
    label: str
    tag: int
    world_rank: int
    memory: list[Bytes]  # in pieces
    requests: list[Any]  # one for each

    def done(self) -> bool:
        """Whether the memory may change again."""
        # MPI finishes messages to one rank in order, nearly always: if the last piece has gone, all
        # have.
        while self.requests:
            if not self.requests[-1].Test():
                return False
            self.requests.pop()
        self.memory.clear()
        return True

    def wait(self) -> None:
        """Waits until MPI has read all of it."""
        channel, check = self.channel, self.channel.process.agreement.check_arrival
        channel.waiter.until(
            self.done,
            lambda: f"the arrival of {self}",
            (self.world_rank,),
            rings=False,
            check=lambda: check(channel.waiter, self.world_rank, self.done),
        )
        channel.all_sent()

    def __str__(self) -> str:
        return f"{self.label or 'a message'} to rank {self.world_rank} (tag {self.tag})"


@dataclass(eq=False, slots=True)
class RecvRequest:
    """A message that this rank is ready to receive, into given memory or into memory of ours."""

    channel: Channel
    label: str
    tag: int
    world_rank: int
    source: int  # the same rank by its number in the group
    specs: Sequence[TensorSpec]
    into: Sequence[NDArray[Any]] | None
    number: int  # of messages with this tag that were expected from it before
    _arrays: list[NDArray[Any]] = field(default_factory=list)
    # Pieces that are not here yet, each with its request
    _parts: deque[tuple[Bytes, Any]] = field(default_factory=deque)

    def __post_init__(self) -> None:
        for i, spec in enumerate(self.specs):
            memory = aligned_memory(spec.nbytes) if self.into is None else as_bytes(self.into[i])
            for piece in pieces(memory):
                request = self.channel.comm.Irecv((piece, self.channel.byte), self.source, self.tag)
                self._parts.append((piece, request))
            self._arrays.append(memory.view(np.dtype(spec.dtype)).reshape(spec.shape))

    @property
    def is_here(self) -> bool:
        """Whether the whole message was here when it was last looked for."""
        return not self._parts

    def ready(self) -> bool:
        """Whether the whole message is here; never waits."""
        while self._parts:
            memory, request = self._parts[0]
            try:
                if not request.Test(self.channel.status):
                    return False
            except self.channel.mpi_error as error:
                raise self._mismatch(f"more than {memory.size} bytes at once ({error})") from error
            got = int(self.channel.status.Get_count(self.channel.byte))
            if got != memory.size:
                raise self._mismatch(f"{got} bytes where {memory.size} were expected")
            self._parts.popleft()
            if not self._parts:
                self.channel.received(self)
        return True

    def wait(self) -> list[NDArray[Any]]:
        """Waits for the message."""
        self.channel.waiter.until(self.ready, self.__str__, (self.world_rank,), check=self.check)
        return self._arrays

    def check(self) -> None:
        """Refuses to wait for the message if it will not come; see `Agreement.check_message`."""
        channel = self.channel
        channel.process.agreement.check_message(
            channel.waiter, self.world_rank, channel.group, self.tag, self.number
        )

    def _mismatch(self, got: str) -> CommunicationError:
        expected, nbytes = " ".join(map(str, self.specs)), sum(spec.nbytes for spec in self.specs)
        own = self.channel.world_ranks[self.channel.rank]
        return CommunicationError(
            f"Rank {own} expects {self} to hold {expected} ({nbytes} bytes), "
            f"but rank {self.world_rank} sent {got}."
        )

    def __str__(self) -> str:
        return f"{self.label or 'a message'} from rank {self.world_rank} (tag {self.tag})"


class Channel:
    """Sends and receives the tensors of one rank, among the ranks of a group.

    Every tensor is an MPI message of its own, larger ones several: MPI keeps messages with the
    same tag in order. A datatype over all of them would make MPI copy them; packing them would
    copy them here.
    """

    def __init__(self, process: Process, comm: Any, group: int) -> None:
        mpi = process.mpi
        self.process = process
        self.comm = comm
        self.group = group
        self.rank: int = comm.Get_rank()
        self.size: int = comm.Get_size()
        everyone = mpi.COMM_WORLD.Get_group()
        self.world_ranks = tuple(comm.Get_group().Translate_ranks(range(self.size), everyone))
        self.byte = mpi.BYTE
        self.mpi_error: type[Exception] = mpi.Exception
        self.status: Any = mpi.Status()
        self.waiter = waiting.Waiter(
            self.world_ranks[self.rank],
            process.limits,
            process.progress.poll,
            process.wakeup,
            self.report,
            process.agreement.where,
        )
        self._outgoing: list[SendRequest] = []
        self._expected: dict[int, RecvRequest] = {}
        self._posted: Counter[tuple[int, int]] = Counter()

    @property
    def others(self) -> list[int]:
        """The other ranks, the next one first: not all of them send to one at once."""
        return [(self.rank + step) % self.size for step in range(1, self.size)]

    def send(self, arrays: Sequence[Any], dest: int, tag: int, *, label: str = "") -> SendRequest:
        """Starts to send tensors to another rank; do not change them before they have arrived."""
        memory = [piece for array in arrays for piece in pieces(as_bytes(as_array(array)))]
        world_rank = self.world_ranks[dest]
        self.process.agreement.sent[world_rank][self.group, tag] += 1
        requests = [self.comm.Isend((piece, self.byte), dest, tag) for piece in memory]
        sending = SendRequest(self, label, tag, world_rank, memory, requests)
        self.process.wakeup.ring(world_rank)
        # The receiver is on its way; what follows is not waited for.
        self.all_sent()  # or a rank that never waits keeps all that it has sent
        self._outgoing.append(sending)
        self.process.progress.follow(self.all_sent)
        return sending

    def post_receive(
        self,
        specs: Sequence[TensorSpec],
        source: int,
        tag: int,
        *,
        label: str = "",
        into: Sequence[NDArray[Any]] | None = None,
    ) -> RecvRequest:
        """Makes ready to receive the tensors of one message, into given memory or ours."""
        number, rank = self._posted[source, tag], self.world_ranks[source]
        request = RecvRequest(self, label, tag, rank, source, specs, into, number)
        self._posted[source, tag] += 1
        if specs:  # a message without tensors is nothing at all
            self._expected[id(request)] = request
            self.process.progress.expected += 1
        return request

    def received(self, request: RecvRequest) -> None:
        """Notes that a message is here."""
        del self._expected[id(request)]
        self.process.progress.expected -= 1

    def all_sent(self) -> bool:
        """Lets go of what has been sent; returns whether nothing is left."""
        if self._outgoing:
            self._outgoing = [sending for sending in self._outgoing if not sending.done()]
        return not self._outgoing

    def flush(self) -> None:
        """Waits until everything has been sent."""
        while self._outgoing:
            self._outgoing[0].wait()

    def report(self) -> str:
        """Names the messages on their way, one a line."""
        expected = [f"expected: {request}" for request in self._expected.values()]
        sent = [f"not yet taken: {sending}" for sending in self._outgoing]
        return "\n  ".join(["On its way:", *(expected + sent or ["nothing else"])])
