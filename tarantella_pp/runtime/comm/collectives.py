"""Collectives under way: they go on while ranks compute, and give the same bits on each rank.

Every element is added up by one rank, in the order of the ranks, and sent to the others. So a sum
does not depend on what it is packed with, nor on which rank it ends up.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from itertools import accumulate, pairwise
from typing import Any, Generic, TypeAlias, TypeVar

import numpy as np
from numpy.typing import NDArray

from tarantella_pp.runtime.comm.buffers import TensorSpec, empty
from tarantella_pp.runtime.comm.messages import Channel, RecvRequest

_Result = TypeVar("_Result")
Array: TypeAlias = NDArray[Any]
# What of a flat array each rank combines.
Segments: TypeAlias = Sequence[slice]
Awaited: TypeAlias = "Sequence[RecvRequest | CollectiveRequest[Any]]"
# The steps of a collective: each returns what has to be here before the next.
Steps: TypeAlias = Generator[Awaited, None, _Result]

_OPERATIONS: dict[str, Callable[..., Array]] = {"sum": np.add, "max": np.maximum, "min": np.minimum}
# Up to this many bytes of all ranks together, each sends all it has to all others: more bytes, but
# one message to wait for instead of two.
LARGEST_IN_ONE_ROUND = 256 << 10


class CollectiveRequest(Generic[_Result]):
    """A collective that has been started, over a channel or, in a group of one rank, over none."""

    def __init__(self, channel: Channel | None, steps: Steps[_Result], label: str) -> None:
        self.label = label
        self._channel = channel
        self._steps = steps
        self._awaited: Awaited | None = ()
        self._error: BaseException | None = None
        self._result: _Result
        if not self.ready() and channel is not None:
            channel.process.progress.follow(self.has_ended)

    def ready(self) -> bool:
        """Whether the result is here; does what can be done for it, and never waits."""
        if self._error is not None:
            raise self._error
        try:
            while self._awaited is not None:
                if not all(request.ready() for request in self._awaited):
                    return False
                self._awaited = next(self._steps)
        except StopIteration as end:
            self._result, self._awaited = end.value, None
        except BaseException as error:
            self._error = error
            raise
        return True

    def has_ended(self) -> bool:
        """Moves it on; returns whether it is done, or has raised an error that a wait has shown."""
        return self._error is not None or self.ready()

    def wait(self) -> _Result:
        """Waits for the result."""
        channel = self._channel
        if not self.ready() and channel is not None:
            channel.waiter.until(
                self.ready,
                self.__str__,
                [channel.world_ranks[rank] for rank in channel.others],
                check=self.check,
            )
        if channel is not None:
            # Or its result would live until the next poll.
            channel.process.progress.let_go(self.has_ended)
        return self._result

    def check(self) -> None:
        """Refuses to wait for messages that will not come."""
        for message in self.missing():
            message.check()

    def missing(self) -> list[RecvRequest]:
        """The messages that the collective waits for at the moment."""
        found: list[RecvRequest] = []
        for request in self._awaited or ():
            if isinstance(request, CollectiveRequest):
                found += request.missing()
            elif not request.is_here:  # as far as `ready`, which may raise, has found
                found.append(request)
        return found

    def __str__(self) -> str:
        return " and ".join(map(str, self.missing())) or self.label or "a collective"


def finished(result: _Result) -> CollectiveRequest[_Result]:
    """Returns a request that has ended, as in a group of one rank."""

    def steps() -> Steps[_Result]:
        yield ()
        return result

    return CollectiveRequest(None, steps(), "")


def segments_of(counts: Sequence[int]) -> list[slice]:
    """Returns where parts that lie one behind the other begin and end."""
    return [slice(*bounds) for bounds in pairwise(accumulate(counts, initial=0))]


def dtype_on_wire(dtype: np.dtype[Any], wanted: Any) -> np.dtype[Any]:
    """Returns in what dtype values travel: a smaller one only for floats, and only if asked for."""
    if wanted is None or dtype.kind != "f":
        return dtype
    wire = np.dtype(wanted)
    return wire if wire.itemsize < dtype.itemsize else dtype


def allreduce(
    channel: Channel, array: Array, op: str, sent_as: Any, tag: int, label: str
) -> Steps[Array]:
    """The steps of a reduction to all ranks."""
    combine = _OPERATIONS[op]
    wire = dtype_on_wire(array.dtype, sent_as)
    flat = np.ascontiguousarray(array).reshape(-1)
    size, length = channel.size, flat.size
    at_once = size * length * wire.itemsize <= LARGEST_IN_ONE_ROUND
    # What has come from all others says that they have got what this rank has sent, but not in
    # one round. There the caller could change data still on its way.
    sent = _as_dtype(flat, wire, copy=at_once)
    if at_once:
        whole = [slice(0, length)] * size
        out = yield from _combine_segments(channel, sent, whole, combine, tag, label)
    else:
        segments = segments_of([length // size + (part < length % size) for part in range(size)])
        out, rows = _with_rows(channel, length, segments[channel.rank], wire)
        yield from _combine_segments(channel, sent, segments, combine, tag, label, rows)
        yield from _spread(channel, [out], segments, tag + 1, label)
    return _as_dtype(out, array.dtype).reshape(array.shape)


def reduce_scatter(
    channel: Channel, array: Array, counts: Sequence[int], sent_as: Any, tag: int, label: str
) -> Steps[Array]:
    """The steps of a sum that leaves each rank its part."""
    wire = dtype_on_wire(array.dtype, sent_as)
    sent = _as_dtype(np.ascontiguousarray(array).reshape(-1), wire)
    segments = segments_of(counts)
    own = yield from _combine_segments(channel, sent, segments, np.add, tag, label)
    return _as_dtype(own, array.dtype)


def allgather(
    channel: Channel, arrays: Sequence[Array], rows: Sequence[int] | None, tag: int, label: str
) -> Steps[list[Array]]:
    """The steps of a gathering of the rows of all ranks."""
    counts = [len(arrays[0])] * channel.size if rows is None else list(rows)
    outs = [empty((sum(counts), *array.shape[1:]), array.dtype) for array in arrays]
    segments = segments_of(counts)
    for out, array in zip(outs, arrays, strict=True):
        out[segments[channel.rank]] = array
    yield from _spread(channel, outs, segments, tag, label)
    return outs


def _with_rows(
    channel: Channel, length: int, own: slice, dtype: np.dtype[Any]
) -> tuple[Array, Array]:
    """Memory of a sum of all ranks, and in it what each sends for this rank's segment.

    The parts of others wait where later their sums come, on both sides of the own segment::

        rank 1 of 3:   | of 0 | own | of 2 |
    """
    # Segments differ by one element at most, so the longest times the ranks has room for all rows.
    longest = -(-length // channel.size)
    out = empty((channel.size * longest,), dtype)
    size = own.stop - own.start
    begin = own.start - channel.rank * size
    return out[:length], out[begin : begin + channel.size * size].reshape(channel.size, size)


def _combine_segments(
    channel: Channel,
    sent: Array,
    segments: Segments,
    combine: Callable[..., Array],
    tag: int,
    label: str,
    rows: Array | None = None,
) -> Steps[Array]:
    """Every rank gets its segment of all ranks, and combines them, in its own row if given."""
    mine = sent[segments[channel.rank]]
    spec = [TensorSpec(mine.shape, mine.dtype)]
    receives = {
        rank: channel.post_receive(
            spec, rank, tag, label=label, into=None if rows is None else [rows[rank]]
        )
        for rank in (channel.others if mine.size else ())
    }
    for rank in channel.others:
        if segments[rank].stop > segments[rank].start:
            channel.send([sent[segments[rank]]], rank, tag, label=label)
    yield [*receives.values()]
    if not mine.size:
        return empty(mine.shape, mine.dtype)
    parts = [receives[r].wait()[0] if r in receives else mine for r in range(channel.size)]
    # Rank 0 must not overwrite its own part, which is the caller's memory; rank 1's part was
    # received.
    out = parts[channel.rank == 0] if rows is None else rows[channel.rank]
    _combine(parts, combine, out)
    return out


def _combine(parts: Sequence[Array], combine: Callable[..., Array], out: Array) -> None:
    """Combines arrays in order, 16-bit floats in float32; may overwrite the first two."""
    small = out.dtype.itemsize <= 2 and out.dtype.kind not in "iub"
    with np.errstate(all="ignore"):  # an overflow is for the optimizer to see
        if not small:
            combine(parts[0], parts[1], out=out)
            for part in parts[2:]:
                combine(out, part, out=out)
            return
        total = parts[0].astype(np.float32)
        for part in parts[1:]:
            combine(total, part.astype(np.float32), out=total)
        out[...] = total


def _spread(
    channel: Channel, outs: Sequence[Array], segments: Segments, tag: int, label: str
) -> Steps[None]:
    """Every rank gets the segments of all ranks, into where they belong."""

    def parts_of(rank: int) -> list[Array]:
        return [out[segments[rank]] for out in outs]

    receives = []
    for rank in channel.others:
        parts = parts_of(rank)
        if any(part.size for part in parts):
            specs = [TensorSpec(part.shape, part.dtype) for part in parts]
            receives.append(channel.post_receive(specs, rank, tag, label=label, into=parts))
    mine = parts_of(channel.rank)
    if any(part.size for part in mine):
        for rank in channel.others:
            channel.send(mine, rank, tag, label=label)
    yield receives


def _as_dtype(array: Array, dtype: np.dtype[Any], copy: bool = False) -> Array:
    if array.dtype == dtype and not copy:
        return array
    out = empty(array.shape, dtype)
    with np.errstate(all="ignore"):
        out[...] = array
    return out
