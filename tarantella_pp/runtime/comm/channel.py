"""Messages of tensors between two ranks: nothing is copied, nothing is waited for before needed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from numpy.typing import NDArray

from tarantella_pp.runtime.comm.agreement import Agreement
from tarantella_pp.runtime.comm.buffer_pool import (
    BufferPool,
    Bytes,
    aligned_memory,
)
from tarantella_pp.runtime.comm.requests import RecvRequest, SendRequest
from tarantella_pp.runtime.comm.waiting.flight_recorder import FlightRecorder
from tarantella_pp.runtime.comm.waiting.polling import Outgoing, Waiter
from tarantella_pp.runtime.comm.waiting.progress import Progress
from tarantella_pp.runtime.comm.waiting.wakeup import Wakeup
from tarantella_pp.runtime.comm.wire_format import (
    DESCRIPTION_BYTES,
    TensorSpec,
    as_array,
    as_bytes,
    describe,
    numpy_dtype,
    pieces,
)


class Channel:
    """Sends and receives the tensors of one rank.

    Every tensor is an MPI message of its own, larger ones several: MPI keeps messages with the
    same tag in order. A datatype over all of them would make MPI copy them; packing them would
    copy them here. The first message with a tag says what it holds, and the receiver compares.

    Attributes:
        rank: This rank.
        size: Number of ranks.
    """

    def __init__(
        self,
        mpi: Any,
        comm: Any,
        world_ranks: Sequence[int],
        recorder: FlightRecorder,
        bell: Wakeup,
        group: int,
        agreement: Agreement,
        waiter: Waiter,
        progress: Progress,
    ) -> None:
        self.rank: int = comm.Get_rank()
        self.size: int = comm.Get_size()
        self.mpi_error: type[Exception] = mpi.Exception
        self.status: Any = mpi.Status()
        self.waiter = waiter
        self._progress = progress
        self._world_ranks = world_ranks
        self._comm = comm
        self._byte = mpi.BYTE
        self._recorder = recorder
        self._bell = bell
        self._group = group
        self._agreement = agreement
        self._pool = BufferPool()
        self._outgoing: list[SendRequest] = []
        self._expected: dict[int, RecvRequest] = {}
        self._posted: Counter[tuple[int, int]] = Counter()

    def peers(self, rank: int) -> tuple[int]:
        """Returns who a wait for a message from or to `rank` depends on, for the guard."""
        return (self._world_ranks[rank],)

    def is_announced(self, request: RecvRequest) -> bool:
        """Whether a message is known to be on its way."""
        return self._bell.is_announced(self._group, request.source, request.tag, request.number)

    def check(self, request: RecvRequest) -> None:
        """Refuses to wait for a message that will not come; see `Agreement.check_message`."""
        source = self._world_ranks[request.source]
        self._agreement.check_message(self.waiter, source, self._group, request.tag, request.number)

    def bytes_received(self) -> int:
        """Returns the size in bytes of the message that `status` is about."""
        return int(self.status.Get_count(self._byte))

    def empty(self, shape: tuple[int, ...], dtype: Any) -> NDArray[Any]:
        """Returns an array with any content on memory as messages are received into."""
        spec = TensorSpec(shape, dtype)
        return self._pool.take(spec.nbytes).view(numpy_dtype(dtype)).reshape(shape)

    def send(self, arrays: Sequence[Any], dest: int, tag: int, label: str) -> SendRequest:
        """Starts to send a message."""
        tensors = [as_array(array) for array in arrays]
        world_rank = self._world_ranks[dest]
        sending = SendRequest(label, dest, tag, world_rank)
        key = self._group, world_rank, tag
        number = self._agreement.sent[key]
        self._agreement.sent[key] += 1
        if number == 0:
            self._send_piece(sending, describe(tensors))
        for tensor in tensors:
            for piece in pieces(as_bytes(tensor)):
                self._send_piece(sending, piece)
        self._bell.announce(world_rank, self._group, self.rank, tag, number)
        # The receiver is on its way; what follows is not waited for.
        self._recorder.add("sending", label, world_rank, tag, sending.nbytes)
        self.progress()  # or a rank that never waits keeps all that it has sent
        self._outgoing.append(sending)
        self._progress.add_sender(self)
        return sending

    def _send_piece(self, sending: SendRequest, piece: Bytes) -> None:
        sending.add(piece, self._comm.Isend((piece, self._byte), sending.dest, sending.tag))

    def receive(
        self,
        specs: Sequence[TensorSpec],
        source: int,
        tag: int,
        label: str,
        into: Sequence[NDArray[Any]] | None = None,
    ) -> RecvRequest:
        """Makes ready to receive a message, into given contiguous memory or into memory of ours."""
        request = RecvRequest(self, specs, source, tag, label, self._posted[source, tag])
        self._posted[source, tag] += 1
        if request.number == 0:
            memory = aligned_memory(DESCRIPTION_BYTES)
            request.add_description(memory, self._comm.Irecv((memory, self._byte), source, tag))
        for i, spec in enumerate(specs):
            memory = self._pool.take(spec.nbytes) if into is None else as_bytes(into[i])
            parts = [
                (piece, self._comm.Irecv((piece, self._byte), source, tag))
                for piece in pieces(memory)
            ]
            request.add_tensor(memory.view(numpy_dtype(spec.dtype)).reshape(spec.shape), parts)
        self._recorder.add("expecting", label, self._world_ranks[source], tag, request.nbytes)
        if specs or request.number == 0:  # else there is nothing to come
            self._expected[id(request)] = request
            self._progress.expected += 1
        return request

    def received(self, request: RecvRequest) -> None:
        """Notes that a message is here."""
        world_rank = self._world_ranks[request.source]
        self._recorder.add("received", request.label, world_rank, request.tag, request.nbytes)
        del self._expected[id(request)]
        self._progress.expected -= 1

    def progress(self) -> Outgoing:
        """Lets go of what has been sent; returns receiver and bytes of each message that is not."""
        if not self._outgoing:
            return ()
        remaining = []
        for sending in self._outgoing:
            if sending.done():
                dest = sending.world_rank
                self._recorder.add("sent", sending.label, dest, sending.tag, sending.nbytes)
            else:
                remaining.append(sending)
        self._outgoing = remaining
        return [(sending.world_rank, sending.nbytes) for sending in remaining]

    def wait(self, sending: SendRequest) -> None:
        """Waits until a message has been sent."""
        if not sending.done():
            peers, check = self.peers(sending.dest), self._agreement.check_arrival
            self.waiter.until(
                sending.done,
                sending.expectation,
                peers,
                check=lambda: check(self.waiter, *peers, sending.done),
            )
        self.progress()

    def flush(self) -> None:
        """Waits until everything has been sent."""
        while self._outgoing:
            self.wait(self._outgoing[0])

    def outstanding(self) -> list[str]:
        """Returns what is on its way, one line each."""
        return [f"expected: {request}" for request in self._expected.values()] + [
            f"not yet taken: {sending}" for sending in self._outgoing
        ]
