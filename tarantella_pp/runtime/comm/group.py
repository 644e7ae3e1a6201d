"""The ranks of a job and what they tell each other, as the group of one process has it."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Sequence
from typing import Any, TypeVar

from numpy.typing import NDArray

from tarantella_pp.errors import CommunicationError
from tarantella_pp.runtime.comm.buffers import TensorSpec
from tarantella_pp.runtime.comm.collectives import CollectiveRequest, Steps, finished
from tarantella_pp.runtime.comm.messages import RecvRequest, SendRequest

_Json = TypeVar("_Json")
_Result = TypeVar("_Result")


class Communicator:
    """A group of ranks, seen from one of them.

    This class is the group of one process, which has nobody to talk to and needs no MPI.
    `MpiCommunicator` is the group of several.
    """

    rank: int = 0
    size: int = 1
    several_hosts: bool = False  # whether the job has; the same on all ranks
    world_ranks: tuple[int, ...] = (0,)  # number in the job of each process of the group
    largest_tag: int = 2**31 - 1

    def send(self, arrays: Sequence[Any], dest: int, tag: int, *, label: str = "") -> SendRequest:
        """Starts to send tensors to another rank and returns at once.

        No tensor is copied, unless its memory is not contiguous: do not change them before they
        have arrived. References to them are kept until then.
        """
        raise self._nobody(f"dest={dest}")

    def wait_sent(self, sending: SendRequest) -> None:
        """Waits until MPI has read all of a message.

        The receiver expects a large one by then; a small one may wait in memory of its MPI.
        """

    def post_receive(
        self, specs: Sequence[TensorSpec], source: int, tag: int, *, label: str = ""
    ) -> RecvRequest:
        """Makes ready to receive the tensors of one message, and returns at once."""
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
        """Overwrites an array with another rank's."""

    def allreduce(self, array: NDArray[Any], op: str = "sum") -> None:
        """Overwrites an array with the combination of the arrays of all ranks."""

    def start_allreduce(
        self,
        array: NDArray[Any],
        op: str = "sum",
        *,
        sent_as: Any = None,
        tag: int = 0,
        label: str = "",
    ) -> CollectiveRequest[NDArray[Any]]:
        """Starts to combine the arrays of all ranks, and returns at once.

        Values are combined in the order of the ranks, whatever the size of the array: the result
        has the same bits on every rank, in each run, with each MPI library. Floats of 16 bits or
        fewer are combined in float32, and the result is rounded to them. Of n bytes, each rank
        sends 2 n (size - 1) / size, and receives as many. It goes on in `progress` and in the
        waits of this rank, in other groups, too.
        """
        return finished(array)

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
        """Starts to combine arrays, leaves each rank its part, and returns at once.

        The parts have the bits that `start_allreduce` gives.
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
        """Starts to gather the rows of all ranks, and returns at once."""
        return finished([*arrays])

    def start(self, steps: Steps[_Result], label: str) -> CollectiveRequest[_Result]:
        """Starts a collective that is made of others, and returns at once."""
        request = CollectiveRequest(steps, label, lambda request, meanwhile: None)
        request.ready()
        return request

    def broadcast_json(self, value: _Json | None, root: int = 0) -> _Json:
        """Returns the value that rank `root` passes, on every rank."""
        return value  # type: ignore[return-value]

    def allgather_json(self, value: _Json) -> list[_Json]:
        """Returns the list of the values that all ranks pass, on every rank."""
        return [value]

    def call(self, method: str, **facts: Any) -> contextlib.AbstractContextManager[None]:
        """Surrounds a call of the user's script that all ranks must make, and waits for them."""
        return contextlib.nullcontext()

    @property
    def call_number(self) -> int:
        """How many calls all ranks have made together; the same on all ranks."""
        return 0

    def breaks(self, error: BaseException) -> None:
        """Notes that an error ended a call in the middle of messages; none may follow."""

    def split(self, color: int, key: int = 0) -> Communicator:
        """Returns the group of the ranks that pass the same `color`."""
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
