"""The ranks of a job, what they tell each other, and how a job begins; alone imports mpi4py."""

from __future__ import annotations

import atexit
import contextlib
import functools
import logging
import os
import zlib
from collections.abc import Sequence
from typing import Any, TypeVar

import msgspec
import numpy as np
from numpy.typing import NDArray

from tarantella_pp.errors import CommunicationError, LaunchError
from tarantella_pp.launch import guard, processes
from tarantella_pp.launch.environment import Launch, detect_launch
from tarantella_pp.launch.records import RESTARTS_VARIABLE, SIZE_VARIABLE
from tarantella_pp.launch.resources import take_gpu
from tarantella_pp.runtime.comm import collectives, waiting
from tarantella_pp.runtime.comm.agreement import Agreement
from tarantella_pp.runtime.comm.buffers import TensorSpec, as_bytes
from tarantella_pp.runtime.comm.collectives import CollectiveRequest, Steps, finished
from tarantella_pp.runtime.comm.messages import Channel, Process

__all__ = ["Communicator", "TensorSpec", "ranks_at_first", "world"]

_LOG = logging.getLogger(__name__)
_Json = TypeVar("_Json")
_Result = TypeVar("_Result")
_Array = NDArray[Any]
# The first message with a value has its size and so much of it, usually all.
_FIRST_BYTES = 1024
_JSON_TAG = 10


class Communicator(Channel):
    """A group of ranks, seen from one of them; by default one process, which needs no MPI.

    All collectives are messages of our own: MPI's would keep the core busy, or leave open whom they
    wait for, and its sums may have other bits on each rank or in each run.
    """

    is_alone: bool = True  # whether the job has one process
    several_hosts: bool = False  # whether the job has; the same on all ranks
    largest_tag: int = 2**31 - 1  # of messages between two ranks
    _splits: int = 0

    def __init__(self) -> None:
        self.rank, self.size, self.world_ranks = 0, 1, (0,)
        self._outgoing = []

    @classmethod
    def of(cls, process: Process, comm: Any, group: int, largest_tag: int) -> Communicator:
        """Returns the ranks of an MPI communicator."""
        found = cls()
        Channel.__init__(found, process, comm, group)
        found.is_alone, found.largest_tag = False, largest_tag
        return found

    @property
    def prints(self) -> bool:
        """Whether this rank, the last one, shows what a user reads, and writes files."""
        return self.rank == self.size - 1

    def progress(self) -> None:
        """Moves on all that this rank has begun, in all groups; never waits."""
        self.process.progress.poll()

    def computing(self) -> contextlib.AbstractContextManager[None]:
        """Surrounds a computation, while which messages may move on and no method may be called."""
        background = None if self.is_alone else self.process.background
        return background or contextlib.nullcontext()

    def barrier(self) -> None:
        """Waits until every rank of the group has come here."""
        self.allgather_json(None)

    def broadcast(self, array: _Array, root: int = 0) -> None:
        """Overwrites an array with another rank's."""
        if self.size == 1:
            return
        # The largest of its bytes and zeros: sent in parts by all ranks, not as a whole by one.
        mine = as_bytes(np.ascontiguousarray(array)) if self.rank == root else None
        sent = np.zeros(array.nbytes, np.uint8) if mine is None else mine
        tag, label = self.largest_tag // 2 - 2, f"broadcast from rank {root}"
        found = self.start_allreduce(sent, "max", tag=tag, label=label).wait()
        if mine is None:
            array[...] = found.view(array.dtype).reshape(array.shape)

    def allreduce(self, array: _Array, op: str = "sum") -> None:
        """Overwrites an array with the combination of the arrays of all ranks."""
        array[...] = self.start_allreduce(array, op, label=f"allreduce ({op})").wait()

    def start_allreduce(
        self, array: _Array, op: str = "sum", *, sent_as: Any = None, tag: int = 0, label: str = ""
    ) -> CollectiveRequest[_Array]:
        """Starts to combine arrays, in the order of the ranks: the same bits on every rank."""
        if self.size == 1:
            return finished(array)
        first = self._tag_of_collective(tag)
        steps = collectives.allreduce(self, array, op, sent_as, first, label)
        return self.start(steps, label)

    def start_reduce_scatter(
        self, array: _Array, counts: Sequence[int], *, sent_as: Any, tag: int = 0, label: str = ""
    ) -> CollectiveRequest[_Array]:
        """Starts to add up arrays, and leaves each rank its part, the same bits."""
        if self.size == 1:
            return finished(array.reshape(-1))
        first = self._tag_of_collective(tag)
        steps = collectives.reduce_scatter(self, array, counts, sent_as, first, label)
        return self.start(steps, label)

    def start_allgather(
        self,
        arrays: Sequence[_Array],
        rows: Sequence[int] | None = None,
        *,
        tag: int = 0,
        label: str = "",
    ) -> CollectiveRequest[list[_Array]]:
        """Starts to gather the rows of all ranks, and returns at once."""
        if self.size == 1:
            return finished([*arrays])
        first = self._tag_of_collective(tag)
        return self.start(collectives.allgather(self, arrays, rows, first, label), label)

    def start(self, steps: Steps[_Result], label: str) -> CollectiveRequest[_Result]:
        """Starts a collective that is made of others, and returns at once."""
        return CollectiveRequest(self, steps, label)

    def broadcast_json(self, value: Any, root: int = 0) -> Any:
        """Returns the value that rank `root` passes, on every rank."""
        if self.size == 1:
            return value
        if self.rank != root:
            return self.receive_json(root, _JSON_TAG, label="a value for all ranks")
        return self._send_to_others(value, "a value for all ranks")

    def allgather_json(self, value: _Json) -> list[_Json]:
        """Returns the list of the values that all ranks pass, on every rank."""
        if self.size == 1:
            return [value]
        own = self._send_to_others(value, "a value of each rank")
        return [
            own if rank == self.rank else self.receive_json(rank, _JSON_TAG, label="values")
            for rank in range(self.size)
        ]

    def _send_to_others(self, value: Any, label: str) -> Any:
        """Sends a value to all other ranks; returns it in the types that they get."""
        sent = self.send_json(value, self.others, _JSON_TAG, label=label)
        return msgspec.msgpack.decode(sent)

    def send_json(self, value: Any, dests: Sequence[int], tag: int, *, label: str = "") -> bytes:
        """Starts to send a value to other ranks, for `receive_json`; returns it as bytes."""
        # MessagePack rather than JSON, which has no NaN and no bytes.
        sent = msgspec.msgpack.encode(value, enc_hook=_plain)
        data = np.frombuffer(sent, np.uint8)
        first, rest = np.zeros(_FIRST_BYTES, np.uint8), data[_FIRST_BYTES - 8 :]
        first[:8] = np.array([data.size], np.int64).view(np.uint8)
        first[8 : 8 + data.size] = data[: _FIRST_BYTES - 8]
        for dest in dests:
            self.send([first], dest, tag, label=label)
            if rest.size:
                self.send([rest], dest, tag, label=label)
        return sent

    def receive_json(self, source: int, tag: int, *, label: str = "") -> Any:
        """Waits for a value that another rank sends."""
        spec = TensorSpec((_FIRST_BYTES,), np.dtype(np.uint8))
        first = self.post_receive([spec], source, tag, label=label).wait()[0]
        size, data = int(first[:8].view(np.int64)[0]), first[8:]
        if size > data.size:
            spec = TensorSpec((size - data.size,), np.dtype(np.uint8))
            data = np.append(data, self.post_receive([spec], source, tag, label=label).wait()[0])
        return msgspec.msgpack.decode(data[:size].data)

    def call(self, method: str, **facts: Any) -> contextlib.AbstractContextManager[None]:
        """Surrounds a call of the user's script that all ranks must make, and waits for them."""
        if self.is_alone:
            return contextlib.nullcontext()
        return self.process.agreement.call(self.waiter, method, facts)

    def failed(self, method: str, error: Exception) -> None:
        """Notes that a call failed on this rank before others could hear of it."""
        if not self.is_alone:
            self.process.agreement.failed(method, error)

    def note(self, **fields: Any) -> None:
        """Tells the launcher what it must know to start the job again, if it is to do so."""
        guard.note(**fields)

    def alone(self, who: str) -> contextlib.AbstractContextManager[None]:
        """Surrounds code of the user's that only one rank runs, with a name for it."""
        return self.process.agreement.alone(who)

    def breaks(self, error: BaseException) -> None:
        """Notes that an error ended a call in the middle of messages; none may follow."""
        if not self.is_alone:
            self.process.end_background()
            self.process.agreement.breaks(error)

    def split(self, color: int, key: int = 0) -> Communicator:
        """Returns the group of the ranks that pass the same `color`."""
        # MPI has no non-blocking split: let all ranks come here first.
        self.barrier()
        self._splits += 1
        # All members must give the group the same number, and no two groups of a rank may share
        # one.
        group = zlib.crc32(repr((self.group, self._splits, color)).encode())
        return self.of(self.process, self.comm.Split(color, key), group, self.largest_tag)

    def abort(self, code: int = 1) -> None:
        """Ends all ranks of the job at once, with an exit code other than 0."""
        processes.remove(processes.shared_memory())
        self.comm.Abort(code)

    def _tag_of_collective(self, tag: int) -> int:
        """The first of the two tags that the messages of a collective may have."""
        return self.largest_tag + 1 + 2 * tag


@functools.cache
def world() -> Communicator:
    """Returns the group of all ranks of the job; starts MPI if the job has several."""
    launch = detect_launch()
    return Communicator() if launch is None or launch.size == 1 else _join(launch)


def init() -> None:
    """Joins the other ranks of the job.

    Optional: whatever needs the ranks joins them first. Called at the top of a script, it
    reports a job that was started wrongly before any work is done.

    Raises:
        LaunchError: Several processes were started, but they do not find each other.
    """
    world()


def get_rank() -> int:
    """Returns the number of this process in the job, from 0; 0 if it is the only one."""
    return world().rank


def get_size() -> int:
    """Returns the number of ranks of the job; 1 for a script under plain `python`."""
    return world().size


def get_master_rank() -> int:
    """Returns the rank that prints and saves: the last one.

    It owns the last stage of the pipeline, where the loss and the metrics are computed.
    """
    return world().size - 1


def is_master_rank() -> bool:
    """Returns whether this process is the one that prints and saves; true without other ranks."""
    return world().prints


def barrier() -> None:
    """Waits until every rank of the job has come here; returns at once if there is only one.

    Raises:
        ConfigurationError: On all ranks, if one makes another call instead, or ends.
    """
    with world().call("tnt.barrier"):
        pass


def ranks_at_first() -> int:
    """The ranks at the first start of a job that is started again; 0 of one that is not."""
    return int(os.environ.get(RESTARTS_VARIABLE) or 0)


def _join(launch: Launch) -> Communicator:
    timeout = waiting.Limits.from_environment().timeout
    try:
        with guard.starting_mpi(timeout):
            from mpi4py import MPI
    except (ImportError, RuntimeError, OSError) as error:
        raise LaunchError(
            f"{launch}, but MPI cannot be used here: {error}. Install mpi4py and an MPI library, "
            "for example with `pip install mpi4py mpich`, or load the cluster's module. If this is "
            f"one process, {launch.variable} is left over from another job: unset it."
        ) from error
    size = MPI.COMM_WORLD.Get_size()
    if size == 1:
        if launch.size is None:
            return Communicator()
        raise LaunchError(
            f"{launch}, but MPI sees each of them as a job of its own: the launcher belongs to "
            "another MPI than the library that mpi4py uses "
            f"({MPI.Get_library_version().splitlines()[0]}). Start the job with "
            "`tarantella -n <ranks> -- <script>`, or with the mpiexec of that MPI; under Slurm "
            "with `srun --mpi=pmix` (Open MPI) or `srun --mpi=pmi2` (MPICH, Intel MPI). If this is "
            f"one process, {launch.variable} is left over from another job: unset it."
        )
    with guard.starting_mpi(timeout):  # a script may have started MPI itself
        ranks = _ranks_of(MPI)
    _connect(ranks)
    # Functions registered later are called earlier: the guard must first put on record that this
    # rank's script has ended, for a rank that waits for it would otherwise never learn it.
    atexit.register(_leave, ranks, os.getpid())
    guard.install(ranks.rank, ranks.size, ranks.abort)
    if launch.variable != SIZE_VARIABLE:  # else the launcher has done so before the script began
        take_gpu(os.environ, MPI.COMM_WORLD.Split_type(MPI.COMM_TYPE_SHARED).Get_rank())
    return ranks


def _ranks_of(mpi: Any) -> Communicator:
    """Connects all ranks of the job; all of them must call this."""
    limits, wakeup = waiting.Limits.from_environment(), waiting.Wakeup()
    # One copy for tensors, one for announcements: their tags cannot mix, nor with tags of
    # a user who calls MPI.
    for_tensors, for_calls = mpi.COMM_WORLD.Dup(), mpi.COMM_WORLD.Dup()
    agreement = Agreement(mpi, for_calls, wakeup.ring)
    process = Process(mpi, wakeup, limits, agreement, waiting.Progress())
    # The upper half of the tags is for collectives, two for each of theirs.
    largest_tag = int(mpi.COMM_WORLD.Get_attr(mpi.TAG_UB)) // 2
    return Communicator.of(process, for_tensors, 0, largest_tag)


def _connect(ranks: Communicator) -> None:
    """Tells the ranks of a host how to wake each other, and has messages between hosts move on."""
    process, comm, mpi = ranks.process, ranks.comm, ranks.process.mpi
    process.wakeup.connect(ranks.allgather_json(process.wakeup.address))
    ranks.several_hosts = process.wakeup.neighbours < ranks.size

    def move_on() -> None:
        process.progress.poll()
        comm.Iprobe(mpi.ANY_SOURCE, 0)  # has MPI look at its sockets; takes no message

    is_possible = mpi.Query_thread() >= mpi.THREAD_SERIALIZED
    if waiting.is_wanted(several_hosts=ranks.several_hosts) and is_possible:
        process.background = waiting.BackgroundProgress(process.progress.is_open, move_on)


def _leave(ranks: Communicator, pid: int) -> None:
    """Waits for the other ranks before MPI is finalized, which would take the core meanwhile."""
    if os.getpid() != pid:
        return
    try:
        ranks.process.end_background()
        ranks.process.agreement.end(ranks.waiter)
    except CommunicationError as error:
        _LOG.error("rank %d ends the job: %s", ranks.rank, error)
        ranks.abort(1)
    except KeyboardInterrupt:  # whose traceback would tell of nothing that the script does
        pass


def _plain(value: Any) -> Any:
    if isinstance(value, np.generic):
        return value.item()
    raise NotImplementedError(f"Cannot send a {type(value).__name__} to other ranks: {value!r}")
