"""The group of several ranks over MPI, and how a job begins; the one file that imports mpi4py."""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import zlib
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import msgspec
import numpy as np
from numpy.typing import NDArray

from tarantella_pp.errors import CommunicationError, LaunchError
from tarantella_pp.launch import guard
from tarantella_pp.launch.environment import Launch, detect_launch
from tarantella_pp.launch.records import SIZE_VARIABLE
from tarantella_pp.launch.resources import take_gpu
from tarantella_pp.runtime.comm import collectives
from tarantella_pp.runtime.comm.agreement import Agreement
from tarantella_pp.runtime.comm.buffers import TensorSpec, as_bytes, pieces
from tarantella_pp.runtime.comm.collectives import CollectiveRequest, Steps
from tarantella_pp.runtime.comm.group import Communicator
from tarantella_pp.runtime.comm.messages import Channel, Process, RecvRequest, SendRequest
from tarantella_pp.runtime.comm.progress import BackgroundProgress, Progress, is_wanted
from tarantella_pp.runtime.comm.waiting import FlightRecorder, Limits, Waiter, Wakeup

__all__ = ["Communicator", "TensorSpec", "world"]

_LOG = logging.getLogger(__name__)
_Json = TypeVar("_Json")
_Result = TypeVar("_Result")
_EVENTS_REPORTED = 20


class MpiCommunicator(Communicator):
    """A group of several ranks, seen from one of them.

    The collectives are MPI's non-blocking ones: its blocking calls would keep the core busy.
    """

    def __init__(self, process: Process, comm: Any, group: int = 0) -> None:
        mpi = process.mpi
        self.rank = comm.Get_rank()
        self.size = comm.Get_size()
        # The upper half of the tags is for collectives, two for each of theirs.
        self.largest_tag = int(mpi.COMM_WORLD.Get_attr(mpi.TAG_UB)) // 2
        self.recorder = FlightRecorder()
        self._process = process
        self._comm = comm
        self._group = group
        self._splits = 0
        everyone = mpi.COMM_WORLD.Get_group()
        self.world_ranks = tuple(comm.Get_group().Translate_ranks(range(self.size), everyone))
        self._waiter = Waiter(
            self.world_ranks[self.rank],
            process.limits,
            process.progress.poll,
            process.wakeup,
            self._report,
            process.agreement.where,
        )
        self._channel = Channel(process, comm, group, self.world_ranks, self.recorder, self._waiter)

    @classmethod
    def of_world(cls, mpi: Any) -> MpiCommunicator:
        """Returns the group of all ranks of the job; all of them must call this."""
        limits = Limits.from_environment()
        wakeup = Wakeup()
        waiter = Waiter(mpi.COMM_WORLD.Get_rank(), limits, tuple, wakeup, str)
        copies = []
        everyone = range(mpi.COMM_WORLD.Get_size())
        # One copy for tensors, one for announcements: their tags cannot mix, nor with those of a
        # user who calls MPI.
        for _ in range(2):
            copy, request = mpi.COMM_WORLD.Idup()
            waiter.until(request.Test, lambda: "all ranks to start", everyone)
            copies.append(copy)
        agreement, progress = Agreement(mpi, copies[1], wakeup.ring), Progress()
        process = Process(mpi, wakeup, limits, agreement, progress)
        ranks = cls(process, copies[0])
        wakeup.connect(ranks.allgather_json(wakeup.address))
        ranks.several_hosts = wakeup.neighbours < ranks.size
        wanted = is_wanted(several_hosts=ranks.several_hosts)
        if wanted and mpi.Query_thread() >= mpi.THREAD_SERIALIZED:
            process.background = BackgroundProgress(progress.is_open, ranks._move_on)
        return ranks

    def send(self, arrays: Sequence[Any], dest: int, tag: int, *, label: str = "") -> SendRequest:
        self._check_peer("dest", dest, tag, label)
        return self._channel.send(arrays, dest, tag, label)

    def wait_sent(self, sending: SendRequest) -> None:
        self._channel.wait(sending)

    def post_receive(
        self, specs: Sequence[TensorSpec], source: int, tag: int, *, label: str = ""
    ) -> RecvRequest:
        self._check_peer("source", source, tag, label)
        return self._channel.receive(specs, source, tag, label)

    def progress(self) -> None:
        self._process.progress.poll()

    def computing(self) -> contextlib.AbstractContextManager[None]:
        return self._process.background or contextlib.nullcontext()

    def flush(self) -> None:
        self._channel.flush()

    def barrier(self) -> None:
        self._run("barrier", self._comm.Ibarrier())

    def broadcast(self, array: NDArray[Any], root: int = 0) -> None:
        buffer = np.ascontiguousarray(array)
        # Counts of MPI have 32 bits.
        for piece in pieces(as_bytes(buffer)):
            request = self._comm.Ibcast((piece, self._process.mpi.BYTE), root)
            self._run(f"broadcast from rank {root}", request)
        if self.rank != root and not np.may_share_memory(buffer, array):
            array[...] = buffer

    def allreduce(self, array: NDArray[Any], op: str = "sum") -> None:
        array[...] = self.start_allreduce(array, op, label=f"allreduce ({op})").wait()

    def start_allreduce(
        self,
        array: NDArray[Any],
        op: str = "sum",
        *,
        sent_as: Any = None,
        tag: int = 0,
        label: str = "",
    ) -> CollectiveRequest[NDArray[Any]]:
        if self.size == 1:
            return super().start_allreduce(array, op)
        tags = self._tags(tag, label)
        steps = collectives.allreduce(self._channel, array, op, sent_as, tags, label)
        return self.start(steps, label)

    def start_reduce_scatter(
        self,
        array: NDArray[Any],
        counts: Sequence[int],
        op: str = "sum",
        *,
        sent_as: Any = None,
        tag: int = 0,
        label: str = "",
    ) -> CollectiveRequest[NDArray[Any]]:
        if self.size == 1:
            return super().start_reduce_scatter(array, counts, op)
        first, _ = self._tags(tag, label)
        steps = collectives.reduce_scatter(self._channel, array, counts, op, sent_as, first, label)
        return self.start(steps, label)

    def start_allgather(
        self,
        arrays: Sequence[NDArray[Any]],
        rows: Sequence[int] | None = None,
        *,
        tag: int = 0,
        label: str = "",
    ) -> CollectiveRequest[list[NDArray[Any]]]:
        if self.size == 1:
            return super().start_allgather(arrays, rows)
        first, _ = self._tags(tag, label)
        return self.start(collectives.allgather(self._channel, arrays, rows, first, label), label)

    def start(self, steps: Steps[_Result], label: str) -> CollectiveRequest[_Result]:
        request = CollectiveRequest(steps, label, self._wait_for_collective)
        if not request.ready():
            self._process.progress.add_collective(request.has_ended)
        return request

    def broadcast_json(self, value: _Json | None, root: int = 0) -> _Json:
        data = _encode(value) if self.rank == root else np.empty(0, np.uint8)
        size = np.array([data.size], np.int64)
        self.broadcast(size, root)
        if self.rank != root:
            data = np.empty(int(size[0]), np.uint8)
        self.broadcast(data, root)
        decoded: _Json = _decode(data)
        return decoded

    def allgather_json(self, value: _Json) -> list[_Json]:
        data = _encode(value)
        sizes = np.zeros(self.size, np.int64)
        own = np.array([data.size], np.int64)
        self._run("allgather of sizes", self._comm.Iallgather(own, sizes))
        ends = np.cumsum(sizes)
        everything = np.empty(int(ends[-1]), np.uint8)
        target = (everything, (sizes, ends - sizes), self._process.mpi.BYTE)
        self._run("allgather", self._comm.Iallgatherv((data, self._process.mpi.BYTE), target))
        return [_decode(part) for part in np.split(everything, ends[:-1])]

    def split(self, color: int, key: int = 0) -> MpiCommunicator:
        # MPI has no non-blocking split: let all ranks come here first.
        self.barrier()
        self._splits += 1
        # All members must give the group the same number, and no two groups of a rank may share
        # one.
        group = zlib.crc32(repr((self._group, self._splits, color)).encode())
        comm = self._comm.Split(color, key)
        return MpiCommunicator(self._process, comm, group)

    def call(self, method: str, **facts: Any) -> contextlib.AbstractContextManager[None]:
        return self._process.agreement.call(self._waiter, method, facts)

    @property
    def call_number(self) -> int:
        return self._process.agreement.number

    def breaks(self, error: BaseException) -> None:
        self._end_background()
        self._process.agreement.breaks(error)

    def abort(self, code: int = 1) -> None:
        self._comm.Abort(code)

    def meet_before_exit(self) -> None:
        """Waits, as long as it takes, until every rank has come to the end of its script."""
        self._end_background()
        self._process.agreement.end(self._waiter)

    def _move_on(self) -> None:
        """Moves on all that this rank has begun or expects; for the background."""
        self._process.progress.poll()
        # Has MPI look at its sockets; takes no message.
        self._comm.Iprobe(self._process.mpi.ANY_SOURCE, 0)

    def _end_background(self) -> None:
        """Makes sure that this thread alone uses MPI, also if Ctrl-C ended a computation."""
        if self._process.background is not None:
            self._process.background.stop()

    def _run(self, name: str, request: Any) -> None:
        """Waits for a collective."""
        self.recorder.add("entered", name)
        self._process.agreement.entered[self._group] += 1
        # Peers may sleep in a wait of their own; MPI moves this collective only while they poll.
        for peer in self.world_ranks:
            self._process.wakeup.ring(peer)
        waiter, peers = self._waiter, self.world_ranks
        waiter.until(
            request.Test,
            lambda: f"the other ranks in {name}",
            peers,
            check=lambda: self._process.agreement.check_collective(waiter, peers, self._group),
        )
        self.recorder.add("left", name)

    def _wait_for_collective(
        self, request: CollectiveRequest[Any], meanwhile: Callable[[], bool] | None
    ) -> None:
        if not request.ready():
            self._waiter.until(
                request.ready,
                request.__str__,
                [rank for rank in self.world_ranks if rank != self.world_ranks[self.rank]],
                coming=request.coming,
                meanwhile=meanwhile,
                check=request.check,
            )
        # Or its result would live until the next poll.
        self._process.progress.drop_collective(request.has_ended)

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


_world: Communicator | None = None


def world() -> Communicator:
    """Returns the group of all ranks of the job; starts MPI if the job has several.

    The first call of a job with several ranks returns once all ranks have made it.
    """
    global _world
    if _world is None:
        launch = detect_launch()
        _world = Communicator() if launch is None or launch.size == 1 else _join(launch)
    return _world


def _join(launch: Launch) -> Communicator:
    """Starts MPI and returns the communicator of all ranks."""
    with guard.starting_mpi(Limits.from_environment().timeout):
        mpi = _import_mpi(launch)
    size = mpi.COMM_WORLD.Get_size()
    if size == 1:
        if launch.size is None:
            return Communicator()
        raise LaunchError(
            f"{launch}, but MPI sees each of them as a job of its own: the launcher belongs to "
            "another MPI than the library that mpi4py uses "
            f"({mpi.Get_library_version().splitlines()[0]}). Start the job with "
            "`tarantella -n <ranks> -- <script>`, or with the mpiexec of that MPI; under Slurm "
            "with `srun --mpi=pmix` (Open MPI) or `srun --mpi=pmi2` (MPICH, Intel MPI). If this is "
            f"one process, {launch.variable} is left over from another job: unset it."
        )
    ranks = MpiCommunicator.of_world(mpi)
    # Functions registered later are called earlier: the guard must first put on record that this
    # rank's script has ended, for a rank that waits for it would otherwise never learn it.
    atexit.register(_leave, ranks, os.getpid())
    guard.install(ranks.rank, ranks.size, ranks.abort)
    if launch.variable != SIZE_VARIABLE:  # else the launcher has done so before the script began
        take_gpu(os.environ, mpi.COMM_WORLD.Split_type(mpi.COMM_TYPE_SHARED).Get_rank())
    return ranks


def _import_mpi(launch: Launch) -> Any:
    """Imports mpi4py, which starts MPI."""
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError, OSError) as error:
        raise LaunchError(
            f"{launch}, but MPI cannot be used here: {error}. Install mpi4py and an MPI library, "
            "for example with `pip install mpi4py mpich`, or load the cluster's module. If this is "
            f"one process, {launch.variable} is left over from another job: unset it."
        ) from error
    return MPI


def _leave(ranks: MpiCommunicator, pid: int) -> None:
    """Waits for the other ranks before MPI is finalized, which would take the core meanwhile."""
    if os.getpid() != pid:
        return
    try:
        ranks.meet_before_exit()
    except CommunicationError as error:
        _LOG.error("rank %d ends the job: %s", ranks.rank, error)
        ranks.abort(1)


def _encode(value: Any) -> NDArray[np.uint8]:
    """Returns a value as bytes; MessagePack rather than JSON, which has no NaN and no bytes."""
    return np.frombuffer(msgspec.msgpack.encode(value, enc_hook=_plain), np.uint8)


def _decode(data: NDArray[np.uint8]) -> Any:
    return msgspec.msgpack.decode(data.data)


def _plain(value: Any) -> Any:
    if isinstance(value, np.generic):
        return value.item()
    raise NotImplementedError(f"Cannot send a {type(value).__name__} to other ranks: {value!r}")
