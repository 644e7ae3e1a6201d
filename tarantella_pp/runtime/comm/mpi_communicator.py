"""The group of several ranks: messages and collectives over MPI, all of them non-blocking."""

from __future__ import annotations

import contextlib
import zlib
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import msgspec
import numpy as np
from numpy.typing import NDArray

from tarantella_pp.errors import CommunicationError
from tarantella_pp.runtime.comm import collective_requests
from tarantella_pp.runtime.comm.agreement import Agreement
from tarantella_pp.runtime.comm.channel import Channel
from tarantella_pp.runtime.comm.collective_requests import CollectiveRequest, Steps
from tarantella_pp.runtime.comm.communicator import Communicator
from tarantella_pp.runtime.comm.requests import RecvRequest, SendRequest
from tarantella_pp.runtime.comm.waiting.background import BackgroundProgress, is_wanted
from tarantella_pp.runtime.comm.waiting.flight_recorder import FlightRecorder
from tarantella_pp.runtime.comm.waiting.polling import Limits, Waiter
from tarantella_pp.runtime.comm.waiting.progress import Progress
from tarantella_pp.runtime.comm.waiting.wakeup import Wakeup
from tarantella_pp.runtime.comm.wire_format import (
    TensorSpec,
    as_bytes,
    pieces,
)

_Json = TypeVar("_Json")
_Result = TypeVar("_Result")
_EVENTS_REPORTED = 20


class MpiCommunicator(Communicator):
    """A group of several ranks, seen from one of them.

    The collectives are MPI's non-blocking ones: its blocking calls would keep the core busy.
    """

    def __init__(
        self,
        mpi: Any,
        comm: Any,
        bell: Wakeup,
        limits: Limits,
        agreement: Agreement,
        progress: Progress,
        group: int = 0,
        background: BackgroundProgress | None = None,
    ) -> None:
        self.rank = comm.Get_rank()
        self.size = comm.Get_size()
        # The upper half of the tags is for collectives, two for each of theirs.
        self.largest_tag = int(mpi.COMM_WORLD.Get_attr(mpi.TAG_UB)) // 2
        self.recorder = FlightRecorder()
        self._mpi = mpi
        self._comm = comm
        self._agreement = agreement
        self._bell = bell
        self._group = group
        self._splits = 0
        self._limits = limits
        everyone = mpi.COMM_WORLD.Get_group()
        self.world_ranks = tuple(comm.Get_group().Translate_ranks(range(self.size), everyone))
        self._progress = progress
        self._background = background
        where, number = agreement.where, self.world_ranks[self.rank]
        waiter = Waiter(number, limits, progress.poll, bell, self._report, where)
        self._channel = Channel(
            mpi, comm, self.world_ranks, self.recorder, bell, group, agreement, waiter, progress
        )

    @classmethod
    def of_world(cls, mpi: Any) -> MpiCommunicator:
        """Returns the group of all ranks of the job; all of them must call this."""
        limits = Limits.from_environment()
        bell = Wakeup()
        waiter = Waiter(mpi.COMM_WORLD.Get_rank(), limits, tuple, bell, str)
        copies = []
        everyone = range(mpi.COMM_WORLD.Get_size())
        for _ in range(2):
            copy, request = mpi.COMM_WORLD.Idup()
            waiter.until(request.Test, lambda: "all ranks to start", everyone)
            copies.append(copy)
        agreement = Agreement(mpi, copies[1], bell.ring)
        progress = Progress()
        ranks = cls(mpi, copies[0], bell, limits, agreement, progress)
        bell.connect(ranks.allgather_json(bell.address))
        ranks.several_hosts = bell.neighbours < ranks.size
        wanted = is_wanted(several_hosts=ranks.several_hosts)
        if wanted and mpi.Query_thread() >= mpi.THREAD_SERIALIZED:
            ranks._background = BackgroundProgress(progress.is_open, ranks._move_on)
        return ranks

    def send(self, arrays: Sequence[Any], dest: int, tag: int, *, label: str = "") -> SendRequest:
        """Starts to send tensors; see `Communicator.send`."""
        self._check_peer("dest", dest, tag, label)
        return self._channel.send(arrays, dest, tag, label)

    def wait_sent(self, sending: SendRequest) -> None:
        """Waits until a message has been sent; see `Communicator.wait_sent`."""
        self._channel.wait(sending)

    def post_receive(
        self, specs: Sequence[TensorSpec], source: int, tag: int, *, label: str = ""
    ) -> RecvRequest:
        """Makes ready to receive tensors; see `Communicator.post_receive`."""
        self._check_peer("source", source, tag, label)
        return self._channel.receive(specs, source, tag, label)

    def progress(self) -> None:
        """Moves on all that this rank has begun; see `Communicator.progress`."""
        self._progress.poll()

    def computing(self) -> contextlib.AbstractContextManager[None]:
        """Surrounds a computation; see `Communicator.computing`."""
        return self._background or contextlib.nullcontext()

    def flush(self) -> None:
        """Waits until everything that was sent has left this rank."""
        self._channel.flush()

    def barrier(self) -> None:
        """Waits until every rank of the group has come here."""
        self._run("barrier", self._comm.Ibarrier())

    def broadcast(self, array: NDArray[Any], root: int = 0) -> None:
        """Overwrites an array with that of rank `root`; see `Communicator.broadcast`."""
        buffer = np.ascontiguousarray(array)
        for piece in pieces(as_bytes(buffer)):
            self._run(
                f"broadcast from rank {root}", self._comm.Ibcast((piece, self._mpi.BYTE), root)
            )
        if self.rank != root and not np.may_share_memory(buffer, array):
            array[...] = buffer

    def allreduce(self, array: NDArray[Any], op: str = "sum") -> None:
        """Overwrites an array with the combination of all ranks'; see `Communicator.allreduce`."""
        array[...] = self.start_allreduce(array, op, label=f"allreduce ({op})").wait()

    def start_allreduce(
        self,
        array: NDArray[Any],
        op: str = "sum",
        *,
        wire_dtype: Any = None,
        tag: int = 0,
        label: str = "",
    ) -> CollectiveRequest[NDArray[Any]]:
        """Starts to combine arrays; see `Communicator.start_allreduce`."""
        if self.size == 1:
            return super().start_allreduce(array, op)
        tags = self._tags(tag, label)
        steps = collective_requests.allreduce(self._channel, array, op, wire_dtype, tags, label)
        return self.start(steps, label)

    def start_reduce_scatter(
        self,
        array: NDArray[Any],
        counts: Sequence[int],
        op: str = "sum",
        *,
        wire_dtype: Any = None,
        tag: int = 0,
        label: str = "",
    ) -> CollectiveRequest[NDArray[Any]]:
        """Starts to combine arrays in parts; see `Communicator.start_reduce_scatter`."""
        if self.size == 1:
            return super().start_reduce_scatter(array, counts, op)
        first, _ = self._tags(tag, label)
        steps = collective_requests.reduce_scatter(
            self._channel, array, counts, op, wire_dtype, first, label
        )
        return self.start(steps, label)

    def start_allgather(
        self,
        arrays: Sequence[NDArray[Any]],
        rows: Sequence[int] | None = None,
        *,
        tag: int = 0,
        label: str = "",
    ) -> CollectiveRequest[list[NDArray[Any]]]:
        """Starts to gather rows; see `Communicator.start_allgather`."""
        if self.size == 1:
            return super().start_allgather(arrays, rows)
        first, _ = self._tags(tag, label)
        return self.start(
            collective_requests.allgather(self._channel, arrays, rows, first, label), label
        )

    def start(self, steps: Steps[_Result], label: str) -> CollectiveRequest[_Result]:
        """Starts a collective that is made of others; see `Communicator.start`."""
        request = CollectiveRequest(steps, label, self._wait_for_collective)
        if not request.ready():
            self._progress.add_collective(request)
        return request

    def broadcast_json(self, value: _Json | None, root: int = 0) -> _Json:
        """Returns the value of rank `root`; see `Communicator.broadcast_json`."""
        data = _encode(value) if self.rank == root else np.empty(0, np.uint8)
        size = np.array([data.size], np.int64)
        self.broadcast(size, root)
        if self.rank != root:
            data = np.empty(int(size[0]), np.uint8)
        self.broadcast(data, root)
        decoded: _Json = _decode(data)
        return decoded

    def gather_json(self, value: _Json, root: int = 0) -> list[_Json] | None:
        """Returns the values of all ranks on rank `root`; see `Communicator.gather_json`."""
        values = self.allgather_json(value)
        return values if self.rank == root else None

    def allgather_json(self, value: _Json) -> list[_Json]:
        """Returns the values of all ranks; see `Communicator.allgather_json`."""
        data = _encode(value)
        sizes = np.zeros(self.size, np.int64)
        own = np.array([data.size], np.int64)
        self._run("allgather of sizes", self._comm.Iallgather(own, sizes))
        ends = np.cumsum(sizes)
        everything = np.empty(int(ends[-1]), np.uint8)
        target = (everything, (sizes, ends - sizes), self._mpi.BYTE)
        self._run("allgather", self._comm.Iallgatherv((data, self._mpi.BYTE), target))
        return [_decode(part) for part in np.split(everything, ends[:-1])]

    def split(self, color: int, key: int = 0) -> MpiCommunicator:
        """Returns the group of the ranks with the same `color`; see `Communicator.split`."""
        # MPI has no non-blocking split: let all ranks come here first.
        self.barrier()
        self._splits += 1
        group = zlib.crc32(repr((self._group, self._splits, color)).encode())
        comm = self._comm.Split(color, key)
        return MpiCommunicator(
            self._mpi, comm, self._bell, self._limits, self._agreement, self._progress, group,
            self._background,
        )  # fmt: skip

    def call(self, method: str, **facts: Any) -> contextlib.AbstractContextManager[None]:
        """Surrounds a call that all ranks must make; see `Communicator.call`."""
        return self._agreement.call(self._channel.waiter, method, facts)

    @property
    def call_number(self) -> int:
        """How many calls all ranks have made together."""
        return self._agreement.number

    def breaks(self, error: BaseException) -> None:
        """Notes that an error came in the middle of a call; see `Communicator.breaks`."""
        self._end_background()
        self._agreement.breaks(error)

    def abort(self, code: int = 1) -> None:
        """Ends all ranks of the job at once, with an exit code other than 0."""
        self._comm.Abort(code)

    def meet_before_exit(self) -> None:
        """Waits, as long as it takes, until every rank has come to the end of its script."""
        self._end_background()
        self._agreement.end(self._channel.waiter)

    def _move_on(self) -> None:
        """Moves on all that this rank has begun or expects; for the background."""
        self._progress.poll()
        self._comm.Iprobe(self._mpi.ANY_SOURCE, 0)  # has MPI look at sockets; takes no message

    def _end_background(self) -> None:
        """Makes sure that this thread alone uses MPI, also if Ctrl-C ended a computation."""
        if self._background is not None:
            self._background.stop()

    def _run(self, name: str, request: Any) -> None:
        """Waits for a collective."""
        self.recorder.add("entered", name)
        self._agreement.entered[self._group] += 1
        for peer in self.world_ranks:
            self._bell.ring(peer)
        waiter, peers = self._channel.waiter, self.world_ranks
        waiter.until(
            request.Test,
            lambda: f"the other ranks in {name}",
            peers,
            check=lambda: self._agreement.check_collective(waiter, peers, self._group),
        )
        self.recorder.add("left", name)

    def _wait_for_collective(
        self, request: CollectiveRequest[Any], meanwhile: Callable[[], bool] | None
    ) -> None:
        if not request.ready():
            self._channel.waiter.until(
                request.ready,
                request.__str__,
                [rank for rank in self.world_ranks if rank != self.world_ranks[self.rank]],
                rings=True,
                coming=request.coming,
                meanwhile=meanwhile,
                check=request.check,
            )
        self._progress.drop_collective(request)  # or its result lives until the next poll

    def _tags(self, tag: int, label: str) -> tuple[int, int]:
        """The tags of the messages of a collective."""
        if not 0 <= tag < self.largest_tag // 2:
            raise CommunicationError(
                f"The tag of a collective is a number from 0 to {self.largest_tag // 2 - 1}. "
                f"Received: tag={tag} for {label or 'a collective'}"
            )
        first = self.largest_tag + 1 + 2 * tag
        return first, first + 1

    def _report(self) -> str:
        lines = self._channel.outstanding() or ["nothing else"]
        events = self.recorder.lines(_EVENTS_REPORTED)
        return "\n  ".join(["On its way:", *lines]) + "\n  ".join(["\nLast events:", *events])

    def _check_peer(self, name: str, peer: int, tag: int, label: str) -> None:
        if peer == self.rank:
            raise CommunicationError(
                f"Rank {peer} cannot exchange messages with itself. "
                f"Received: {name}={peer} for {label or 'a message'}"
            )
        if not 0 <= peer < self.size:
            raise CommunicationError(
                f"{name} is a rank from 0 to {self.size - 1}. "
                f"Received: {name}={peer} for {label or 'a message'}"
            )
        if not 0 <= tag <= self.largest_tag:
            raise CommunicationError(
                f"A tag is a number from 0 to {self.largest_tag}, the limit of this MPI. "
                f"Received: tag={tag} for {label or 'a message'}"
            )


def _encode(value: Any) -> NDArray[np.uint8]:
    """Returns a value as bytes; MessagePack rather than JSON, which has no NaN and no bytes."""
    return np.frombuffer(msgspec.msgpack.encode(value, enc_hook=_plain), np.uint8)


def _decode(data: NDArray[np.uint8]) -> Any:
    return msgspec.msgpack.decode(data.data)


def _plain(value: Any) -> Any:
    if isinstance(value, np.generic):
        return value.item()
    raise NotImplementedError(f"Cannot send a {type(value).__name__} to other ranks: {value!r}")
