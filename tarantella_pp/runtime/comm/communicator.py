"""The ranks of a job and what they tell each other; the one file that imports mpi4py."""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from numpy.typing import NDArray

from tarantella_pp.errors import CommunicationError, LaunchError
from tarantella_pp.launch.channel.rank_records import SIZE_VARIABLE
from tarantella_pp.launch.guard import failure_guard, gpus
from tarantella_pp.launch.guard.launch_environment import Launch, detect_launch
from tarantella_pp.runtime.comm.collective_requests import CollectiveRequest, Steps, finished
from tarantella_pp.runtime.comm.waiting.polling import Limits
from tarantella_pp.runtime.comm.wire_format import TensorSpec

if TYPE_CHECKING:
    from tarantella_pp.runtime.comm.mpi_communicator import MpiCommunicator
    from tarantella_pp.runtime.comm.requests import RecvRequest, SendRequest

__all__ = ["Communicator", "TensorSpec", "world"]

_LOG = logging.getLogger(__name__)
_Json = TypeVar("_Json")
_Result = TypeVar("_Result")


class Communicator:
    """A group of ranks, seen from one of them.

    This class is the group of one process, which has nobody to talk to and needs no MPI.
    `MpiCommunicator` is the group of several.

    Attributes:
        rank: Number of this process in the group, from 0.
        size: Number of processes in the group.
        world_ranks: Number in the job of each process of the group.
        largest_tag: Largest tag that a message may have.
        several_hosts: Whether ranks of the job are on several hosts; the same on all of them.
    """

    rank: int = 0
    size: int = 1
    several_hosts: bool = False
    world_ranks: tuple[int, ...] = (0,)
    largest_tag: int = 2**31 - 1

    def send(self, arrays: Sequence[Any], dest: int, tag: int, *, label: str = "") -> SendRequest:
        """Starts to send tensors to another rank and returns at once.

        No tensor is copied, unless its memory is not contiguous: do not change them before they
        have arrived. References to them are kept until then.

        Args:
            arrays: NumPy arrays or other objects with the buffer protocol, all of one message.
            dest: The receiving rank, another than this one.
            tag: Number that the receiver uses for the same message, from 0 to `largest_tag`.
                Messages with the same tag arrive in the order in which they were sent.
            label: What the message is, for reports: the edge and the micro-batch.

        Returns:
            A request, for `wait_sent`.

        Raises:
            CommunicationError: No such other rank or tag, or elements that are Python objects.
        """
        raise self._nobody(f"dest={dest}")

    def wait_sent(self, sending: SendRequest) -> None:
        """Waits until MPI has read all of a message.

        The receiver expects a large one by then; a small one may wait in memory of its MPI.

        Args:
            sending: What `send` has returned.
        """

    def post_receive(
        self, specs: Sequence[TensorSpec], source: int, tag: int, *, label: str = ""
    ) -> RecvRequest:
        """Makes ready to receive the tensors of one message, and returns at once.

        Args:
            specs: Shape and dtype of each tensor, as the sender has them.
            source: The sending rank, another than this one.
            tag: Number that the sender uses for the same message.
            label: What the message is, for reports: the edge and the micro-batch.

        Returns:
            A request, whose `wait` returns the tensors.

        Raises:
            CommunicationError: No such other rank or tag.
        """
        raise self._nobody(f"source={source}")

    def progress(self) -> None:
        """Moves on all messages and collectives that this rank has begun; never waits.

        Those of all groups: whoever computes for long calls this now and then.
        """

    def computing(self) -> contextlib.AbstractContextManager[None]:
        """Surrounds a computation of this rank, while which messages may move on.

        Inside, no method of any group may be called, nor of what they have returned.
        """
        return contextlib.nullcontext()

    def flush(self) -> None:
        """Waits until everything that was sent has left this rank."""

    def barrier(self) -> None:
        """Waits until every rank of the group has come here."""

    def broadcast(self, array: NDArray[Any], root: int = 0) -> None:
        """Overwrites an array with that of another rank.

        Args:
            array: Array of the same shape and dtype on every rank, writable except on `root`.
            root: The rank whose values all get.
        """

    def allreduce(self, array: NDArray[Any], op: str = "sum") -> None:
        """Overwrites an array with the combination of the arrays of all ranks.

        Args:
            array: Writable array of the same shape and dtype on every rank.
            op: As of `start_allreduce`, whose bits the result has.
        """

    def start_allreduce(
        self,
        array: NDArray[Any],
        op: str = "sum",
        *,
        wire_dtype: Any = None,
        tag: int = 0,
        label: str = "",
    ) -> CollectiveRequest[NDArray[Any]]:
        """Starts to combine the arrays of all ranks, and returns at once.

        Values are combined in the order of the ranks, whatever the size of the array: the result
        has the same bits on every rank, in each run, with each MPI library. Floats of 16 bits or
        fewer are combined in float32, and the result is rounded to them. Of n bytes, each rank
        sends 2 n (size - 1) / size, and receives as many. It goes on in `progress` and in the
        waits of this rank, those of other groups included.

        Args:
            array: Array of the same shape and dtype on every rank; it must not change before the
                result is here.
            op: `"sum"`, `"max"` or `"min"`.
            wire_dtype: Dtype in which floats that are larger travel, such as `"bfloat16"`; `None`
                for their own.
            tag: Tells apart collectives that ranks may start in different orders, from 0 to
                `largest_tag // 2 - 1`. Those with the same tag are matched in their order.
            label: What it is, for reports.

        Returns:
            A request, whose `wait` returns the result in memory of its own: aligned as TensorFlow
            takes it, not to be written to. In a group of one rank it is the array itself.

        Raises:
            CommunicationError: No such operation or tag.
        """
        return finished(array)

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
        """Starts to combine arrays, of which each rank gets its part, and returns at once.

        The parts have the bits that `start_allreduce` gives.

        Args:
            array: As of `start_allreduce`; it must not change at all.
            counts: Number of elements of the part of each rank, one behind the other. All of them
                on one rank make this a reduction to that rank.
            op: As of `start_allreduce`.
            wire_dtype: As of `start_allreduce`.
            tag: As of `start_allreduce`.
            label: As of `start_allreduce`.

        Returns:
            A request, whose `wait` returns the part of this rank, flat.
        """
        return finished(array.reshape(-1))

    def start_allgather(
        self,
        arrays: Sequence[NDArray[Any]],
        rows: Sequence[int] | None = None,
        *,
        tag: int = 0,
        label: str = "",
    ) -> CollectiveRequest[list[NDArray[Any]]]:
        """Starts to gather the rows of all ranks, and returns at once.

        Args:
            arrays: Arrays that have the same number of rows on one rank, and the same dtypes and
                shapes of a row on every rank.
            rows: Number of rows on each rank; `None` if it is the same on every rank. All of them
                on one rank make this a broadcast from that rank.
            tag: As of `start_allreduce`.
            label: As of `start_allreduce`.

        Returns:
            A request, whose `wait` returns for each array the rows of all ranks, one rank's
            behind the other's, in memory as of `start_allreduce`.
        """
        return finished([*arrays])

    def start(self, steps: Steps[_Result], label: str) -> CollectiveRequest[_Result]:
        """Starts a collective that is made of others, and returns at once.

        Args:
            steps: A generator: it starts collectives, yields them, is continued once all of them
                are ready, and at last returns the result. The tags of what it starts must be
                used by nobody else: when it is continued differs between ranks.
            label: What it is, for reports.

        Returns:
            A request, whose `wait` returns the result.
        """
        request = CollectiveRequest(steps, label, lambda request, meanwhile: None)
        request.ready()
        return request

    def broadcast_json(self, value: _Json | None, root: int = 0) -> _Json:
        """Returns the value that rank `root` passes, on every rank.

        Args:
            value: On `root`, anything made of dicts, lists, strings, bytes, numbers and `None`;
                tuples arrive as lists. Ignored on the other ranks.
            root: The rank whose value all get.
        """
        return value  # type: ignore[return-value]

    def gather_json(self, value: _Json, root: int = 0) -> list[_Json] | None:
        """Returns on rank `root` the list of the values of all ranks, and `None` elsewhere."""
        return [value]

    def allgather_json(self, value: _Json) -> list[_Json]:
        """Returns the list of the values that all ranks pass, on every rank."""
        return [value]

    def call(self, method: str, **facts: Any) -> contextlib.AbstractContextManager[None]:
        """Surrounds a call of the user's script that all ranks must make, and waits for them.

        Args:
            method: The method.
            **facts: What must be the same on all ranks.

        Raises:
            ConfigurationError: On all ranks, if they do not make the same call.
        """
        return contextlib.nullcontext()

    @property
    def call_number(self) -> int:
        """How many calls all ranks have made together; the same on all ranks."""
        return 0

    def breaks(self, error: BaseException) -> None:
        """Notes that an error has ended a call in the middle of messages, so that none may follow.

        Args:
            error: The error.
        """

    def split(self, color: int, key: int = 0) -> Communicator:
        """Returns the group of the ranks that pass the same `color`.

        Args:
            color: Number of the new group, 0 or more.
            key: Order of the ranks in the new group; the old order where keys are equal.
        """
        return self

    def abort(self, code: int = 1) -> None:
        """Ends all ranks of the job at once, with an exit code other than 0."""
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)

    def _nobody(self, received: str) -> CommunicationError:
        return CommunicationError(
            "This job has one process, which cannot exchange messages with itself. "
            f"Received: {received}. Start it with `tarantella -n <ranks> -- <script>` to have more."
        )


_world: Communicator | None = None


def world() -> Communicator:
    """Returns the group of all ranks of the job; starts MPI if the job has several.

    The first call of a job with several ranks returns once all ranks have made it.

    Returns:
        The same communicator at every call. A process that no launcher started as one of several
        is alone, and needs neither mpi4py nor an MPI library.

    Raises:
        LaunchError: The environment says that there are several processes, but mpi4py or an MPI
            library is missing, or the processes do not know of each other.
        ConfigurationError: `TNT_WARN` or `TNT_TIMEOUT` is no number of seconds.
    """
    global _world
    if _world is None:
        launch = detect_launch()
        _world = Communicator() if launch is None or launch.size == 1 else _join(launch)
    return _world


def _join(launch: Launch) -> Communicator:
    """Starts MPI and returns the communicator of all ranks."""
    from tarantella_pp.runtime.comm.mpi_communicator import MpiCommunicator

    limits = Limits.from_environment()
    with failure_guard.starting_mpi(limits.warn, limits.timeout):
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
    failure_guard.install(
        ranks.rank, ranks.size, ranks.abort, lambda text: ranks.broadcast_json(text, 0)
    )
    if launch.variable != SIZE_VARIABLE:  # else the launcher has done so before the script began
        gpus.take_one(os.environ, mpi.COMM_WORLD.Split_type(mpi.COMM_TYPE_SHARED).Get_rank())
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
