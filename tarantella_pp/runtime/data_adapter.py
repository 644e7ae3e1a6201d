"""The data that a script gives on several ranks: who reads them, and whether they are the same.

Arrays that all ranks have the same are read by all of them, each its own rows. A function of an
`InputContext` is asked by one rank of each replica for the samples of its own. Everything else is
read by one rank, which sends the others their parts: a generator, or a `PyDataset` that draws
random numbers, gives each rank something else.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
import logging
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf

from tarantella_pp.errors import ConfigurationError
from tarantella_pp.internals.data import (
    DataAdapter,
    EpochStart,
    are_arrays,
    get_data_adapter,
    order_of,
)
from tarantella_pp.internals.state import meanwhile
from tarantella_pp.runtime.batch import READER, ArrayRows, Batch, checksum
from tarantella_pp.runtime.comm.collective import on_all_ranks
from tarantella_pp.runtime.data_cursor import DataCursor
from tarantella_pp.runtime.data_feed import DataFeed

logger = logging.getLogger(__name__)
_ABSENT, _NOTHING, _FUNCTION = "", "nothing", "a function of an InputContext"


class FeedAdapter(DataAdapter):
    """A data adapter, and its own data set, that gives each rank its part of every batch."""

    def __init__(
        self,
        engine: Any,
        adapter: DataAdapter | None,
        facts: DataFacts,
        arrays: ArrayRows | None = None,
        *,
        is_split: bool = False,
    ) -> None:
        self._engine = engine
        self._arrays = arrays
        self._is_split = is_split
        self._num_batches = facts.num_batches
        self.description = facts.text
        self.cursor = None if adapter is None else DataCursor(adapter, arrays is not None)
        # Where the next epoch of Keras' loop begins, if not at its first step.
        self.start: EpochStart | None = None

    def get_tf_dataset(self) -> Any:
        """Returns the iterable of this rank's parts of the batches."""
        return self

    def __iter__(self) -> Iterator[Batch]:
        feed: DataFeed = self._engine.feed
        if self._arrays is not None:
            return feed.batches_of(self._arrays, self._orders())
        source = None if self.cursor is None else self.cursor.read()
        return feed.batches(source, is_split=self._is_split)

    def _orders(self) -> Iterator[np.ndarray[Any, Any]]:
        """The numbers of the samples of each batch of a pass, which one rank draws for all."""
        ranks, cursor = self._engine.communicator, self.cursor
        order, size = (None, 0) if cursor is None else cursor.order()
        length, size = ranks.broadcast_json([0 if order is None else len(order), size], READER)
        if order is None:
            order = np.empty(length, np.int64)
        ranks.broadcast(order, READER)
        for begin in range(0, length, size):
            if cursor is not None:
                cursor.batches += 1
            yield order[begin : begin + size]

    @property
    def num_batches(self) -> int | None:
        """Number of batches in an epoch, if known."""
        return self._num_batches

    def on_epoch_begin(self) -> None:
        """Passes the hook on to the user's data."""
        self._engine.check_written()
        if self.cursor is not None:
            self.cursor.on_epoch_begin()

    def on_epoch_end(self) -> None:
        """Gives every rank the state of all metrics, and passes the hook on to the user's data."""
        self._engine.share_metrics()
        if self.cursor is not None:
            self.cursor.adapter.on_epoch_end()


class GivenData(NamedTuple):
    """Data of a script that are not opened yet: inputs, targets, sample weights."""

    parts: tuple[Any, Any, Any]
    options: dict[str, Any]

    @property
    def is_function(self) -> bool:
        """Whether each replica is asked for its part of the data."""
        return isinstance(self.parts[0], (types.FunctionType, types.MethodType, functools.partial))

    def open(self, replica: int = 0, num_replicas: int = 1) -> DataAdapter:
        """Makes Keras' adapter of them, or of one replica's part."""
        x = self.parts[0]
        if self.is_function:
            x = x(tf.distribute.InputContext(num_replicas, replica, num_replicas))
        return get_data_adapter(x, *self.parts[1:], **self.options)


class DataFacts(NamedTuple):
    """What a rank tells the others of its data."""

    text: str  # what they are; empty where the script gives none
    has_arrays: bool  # whether the rank has all of them, as arrays
    num_batches: int | None  # in an epoch, if known


def shared_adapters(
    engine: Any, find: Callable[[], Sequence[GivenData | None]], *, describe: bool = False
) -> list[FeedAdapter | None]:
    """Opens the user's data where they are read, and tells all ranks how much there is."""
    communicator = engine.communicator
    opened: list[tuple[DataAdapter | None, ArrayRows | None]] = []
    facts: list[DataFacts] = []

    def open_all() -> None:
        for given in find():
            adapter, arrays = _open(given, engine)
            opened.append((adapter, arrays))
            text = _ABSENT if given is None else _NOTHING
            if given is not None and (describe or communicator.size > 1):
                text = _described(given, arrays)
            size = None if adapter is None else adapter.num_batches
            facts.append(DataFacts(text, arrays is not None, None if size is None else int(size)))

    on_all_ranks(communicator, "read the data", open_all)
    everyones: list[list[Any]] = communicator.allgather_json([list(each) for each in facts])
    by_data = zip(*everyones, strict=True)
    return [
        _fed(engine, *data, [DataFacts(*each) for each in theirs])
        for data, theirs in zip(opened, by_data, strict=True)
    ]


def shared_adapter(
    engine: Any, x: Any, y: Any, sample_weight: Any, batch_size: int | None, steps: int | None
) -> FeedAdapter | None:
    """Opens data to evaluate or predict, as `shared_adapters`."""
    options = {"batch_size": batch_size, "steps_per_epoch": steps}
    given = GivenData((x, y, sample_weight), options)
    return shared_adapters(engine, lambda: [given])[0]


def _open(given: GivenData | None, engine: Any) -> tuple[DataAdapter | None, ArrayRows | None]:
    """Opens data on the ranks that may have to read, and arrays wherever they are."""
    if given is None:
        return None, None
    feed, reads = engine.feed, engine.communicator.rank == READER
    if given.is_function and len(feed.readers) > 1:
        reads = engine.communicator.rank in feed.readers
        return (given.open(feed.replica, len(feed.readers)) if reads else None), None
    if not reads and (given.parts[0] is None or not are_arrays(given.parts)):
        return None, None
    adapter = given.open()
    return adapter, ArrayRows.of(adapter)


def _fed(
    engine: Any, adapter: DataAdapter | None, arrays: ArrayRows | None, facts: Sequence[DataFacts]
) -> FeedAdapter | None:
    """What feeds a loop of Keras, once it is known what all ranks have."""
    reads = engine.communicator.rank == READER
    first = facts[READER]
    _refuse_others([theirs.text for theirs in facts])
    if first.text == _ABSENT:
        return None
    if all(theirs.has_arrays for theirs in facts):
        return FeedAdapter(engine, order_of(adapter) if reads else None, first, arrays)
    readers = engine.feed.readers
    if first.text == _FUNCTION and len(readers) > 1:
        sizes = [facts[rank].num_batches for rank in readers]
        if len(set(sizes)) > 1:
            raise ConfigurationError(
                "A function of an InputContext must give each replica as many batches. Received: "
                f"{sizes} batches of replicas 0 to {len(sizes) - 1}."
            )
        return FeedAdapter(engine, adapter, first, is_split=True)
    if first.text != _NOTHING:
        logger.info("rank %d reads %s and sends the other ranks their parts", READER, first.text)
    return FeedAdapter(engine, adapter if reads else None, first)


def _refuse_others(texts: Sequence[str]) -> None:
    """Refuses data that differ between ranks, of those that have any."""
    everywhere = texts[READER] == _FUNCTION
    given = [text for text in texts if everywhere or text not in (_ABSENT, _NOTHING)]
    if len({texts[READER], *given}) > 1:
        received = "; ".join(f"{text or _NOTHING} on rank {r}" for r, text in enumerate(texts))
        raise ConfigurationError(
            f"All ranks must have the same data, in the same order. Received: {received}. Seed "
            "what draws or shuffles them, and do not shard them: each replica takes its own rows "
            "of every batch. Or pass them on rank 0, and None on all others: then rank 0 sends "
            "their parts."
        )


def _described(given: GivenData, arrays: ArrayRows | None) -> str:
    """What data are, in words that are the same on all ranks that have the same."""
    x = given.parts[0]
    if x is None:
        return _NOTHING
    if arrays is not None:
        return f"arrays {arrays.fingerprint()}"
    if given.is_function:
        return _FUNCTION
    text = f"a {type(x).__name__}"
    if isinstance(x, tf.data.Dataset):
        size = int(x.cardinality())
        text = "a tf.data.Dataset" + (f" of {size} batches" if size >= 0 else "")
    if isinstance(x, keras.utils.PyDataset):
        text = f"a PyDataset of {x.num_batches} batches"
    return text + _made_of.get()


def _hash_of(given: Any) -> str:
    """A short text that is the same for the same numbers and strings; empty without any."""
    leaves = keras.tree.flatten(given)
    texts = [leaf for leaf in leaves if isinstance(leaf, (str, bytes, int, float))]
    arrays = [np.asarray(leaf) for leaf in leaves if hasattr(leaf, "__array__")]
    texts += [array.tolist() for array in arrays if array.dtype == object]
    texts += [f"{array.dtype}{array.shape}" for array in arrays]
    numbers = [array for array in arrays if array.dtype != object]
    return checksum(repr(texts), numbers) if texts else ""


def single_batch(engine: Any, data: Any) -> Batch:
    """A rank's part of a batch that all ranks must have the same, if they have any."""
    feed: DataFeed = engine.feed
    ranks, text = engine.communicator, _NOTHING
    if ranks.size > 1 and data[0] is not None:
        shapes = keras.tree.map_structure(lambda leaf: [*getattr(leaf, "shape", ())], data)
        text = f"a batch of shapes {shapes} with hash {_hash_of(data)}"
    _refuse_others(engine.check_written(text))
    return next(feed.batches([data]))


def data_made_of(given: Any) -> contextlib.AbstractContextManager[None]:
    """Says that data to be opened are made of others, which must be the same on all ranks."""
    found = _hash_of(given)
    return meanwhile(_made_of, f" made of data with hash {found}" if found else "")


_made_of = contextvars.ContextVar("_made_of", default="")
