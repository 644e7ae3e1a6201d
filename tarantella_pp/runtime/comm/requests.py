"""Messages under way: a send that is not done, and a receive that is not."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from numpy.typing import NDArray

from tarantella_pp.errors import CommunicationError
from tarantella_pp.runtime.comm.buffer_pool import Bytes
from tarantella_pp.runtime.comm.wire_format import (
    TensorSpec,
    describe,
    description_text,
)

if TYPE_CHECKING:
    from tarantella_pp.runtime.comm.channel import Channel


class SendRequest:
    """A message on its way out; keeps its memory alive until MPI has read all of it."""

    __slots__ = ("_memory", "_requests", "dest", "label", "nbytes", "tag", "world_rank")

    def __init__(self, label: str, dest: int, tag: int, world_rank: int) -> None:
        self.label = label
        self.dest = dest
        self.tag = tag
        self.world_rank = world_rank
        self.nbytes = 0
        self._memory: list[Bytes] = []
        self._requests: list[Any] = []

    def add(self, data: Bytes, request: Any) -> None:
        """Adds a piece that `request` sends."""
        self.nbytes += data.size
        self._memory.append(data)
        self._requests.append(request)

    def done(self) -> bool:
        """Whether the memory may change again."""
        while self._requests:
            if not self._requests[-1].Test():
                return False
            self._requests.pop()
        self._memory.clear()
        return True

    def expectation(self) -> str:
        """Returns what a wait for this message waits for."""
        return f"the arrival of {self}"

    def __str__(self) -> str:
        return f"{self.label or 'a message'} to rank {self.world_rank} (tag {self.tag})"


class RecvRequest:
    """A message that this rank is ready to receive.

    Attributes:
        label: What the message is, for reports.
        source: The sending rank, by its number in the group.
        tag: Number of the message.
        nbytes: Size of its tensors in bytes.
        number: How many messages with this tag from this rank were expected before.
    """

    __slots__ = (
        "_arrays", "_channel", "_description", "_next", "_parts", "_specs",
        "label", "nbytes", "number", "source", "tag",
    )  # fmt: skip

    def __init__(
        self,
        channel: Channel,
        specs: Sequence[TensorSpec],
        source: int,
        tag: int,
        label: str,
        number: int,
    ) -> None:
        self.label = label
        self.source = source
        self.tag = tag
        self.nbytes = 0
        self.number = number
        self._channel = channel
        self._specs = specs
        self._arrays: list[NDArray[Any]] = []
        self._parts: list[tuple[Bytes, Any]] = []
        self._next = 0
        self._description: Bytes | None = None

    def add_description(self, memory: Bytes, request: Any) -> None:
        """Adds the description that goes ahead of the first message with a tag."""
        self._description = memory
        self._parts.append((memory, request))

    def add_tensor(self, array: NDArray[Any], parts: Sequence[tuple[Bytes, Any]]) -> None:
        """Adds a tensor that arrives in the given pieces, each with its request."""
        self._arrays.append(array)
        self._parts.extend(parts)
        self.nbytes += array.nbytes

    def ready(self) -> bool:
        """Whether the whole message is here; never waits."""
        while self._next < len(self._parts):
            memory, request = self._parts[self._next]
            try:
                if not request.Test(self._channel.status):
                    return False
            except self._channel.mpi_error as error:
                raise self._mismatch(f"more than {memory.size} bytes at once ({error})") from error
            self._check(memory, self._channel.bytes_received())
            self._next += 1
            if self._next == len(self._parts):
                self._channel.received(self)
        return True

    def wait(self, meanwhile: Callable[[], bool] | None = None) -> list[NDArray[Any]]:
        """Waits for the message."""
        self._channel.waiter.until(
            self.ready,
            self.__str__,
            self._channel.peers(self.source),
            rings=True,
            coming=self.coming,
            meanwhile=meanwhile,
            check=self.check,
        )
        return self._arrays

    def check(self) -> None:
        """Refuses to wait for the message if it will not come."""
        self._channel.check(self)

    def coming(self) -> int:
        """Returns the size in bytes if the message is known to be on its way, else 0."""
        return self.nbytes if self._channel.is_announced(self) else 0

    def _check(self, memory: Bytes, got: int) -> None:
        if memory is self._description:
            expected = describe(self._specs)
            if memory[:got].tobytes() != expected.tobytes():
                raise self._mismatch(description_text(memory[:got]))
        elif got != memory.size:
            raise self._mismatch(f"{got} bytes where {memory.size} were expected")

    def _mismatch(self, got: str) -> CommunicationError:
        expected = " ".join(map(str, self._specs)) or "no tensors"
        return CommunicationError(
            f"Rank {self._world_rank(self._channel.rank)} expects {self} to hold {expected} "
            f"({self.nbytes} bytes), but rank {self._world_rank(self.source)} sent {got}."
        )

    def __str__(self) -> str:
        rank = self._world_rank(self.source)
        return f"{self.label or 'a message'} from rank {rank} (tag {self.tag})"

    def _world_rank(self, rank: int) -> int:
        return self._channel.peers(rank)[0]
