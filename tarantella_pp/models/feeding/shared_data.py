"""The data that a script gives on several ranks: who reads them, and whether they are the same.

Arrays that all ranks have the same are read by all of them, each its own rows. Of a `tf.data` data
set that is surely the same on all ranks, one rank of each replica reads the samples of its own.
Everything else is read by one rank, which sends the others their parts: a generator, or a
`PyDataset` that draws random numbers, gives each rank something else.
"""

from __future__ import annotations

import functools
import logging
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from tarantella_pp.errors import ConfigurationError
from tarantella_pp.keras_internals.data import (
    DataAdapter,
    are_arrays,
    dataset_of,
    get_data_adapter,
    order_of,
)
from tarantella_pp.models.feeding.batch_engine import BatchEngine
from tarantella_pp.models.feeding.data_adapter import FeedAdapter
from tarantella_pp.models.feeding.split_dataset import NotSplitError, SplitDataset, shards_of
from tarantella_pp.runtime.batch.array_rows import ArrayRows
from tarantella_pp.runtime.batch.batch_announcement import READER
from tarantella_pp.runtime.batch.data_feed import DataFeed
from tarantella_pp.runtime.comm.communicator import Communicator

logger = logging.getLogger(__name__)
_NOTHING = "nothing"


@dataclass(frozen=True)
class GivenData:
    """Data of a script that are not opened yet.

    Attributes:
        parts: Model inputs, targets and sample weights.
        open: Makes an adapter of Keras of them.
    """

    parts: tuple[Any, Any, Any]
    open: Callable[[], DataAdapter]


class DataFacts(NamedTuple):
    """What a rank tells the others of its data.

    Attributes:
        text: What they are.
        has_arrays: Whether it reads its rows itself.
        is_given: Whether there are any, be it `None`.
        size: Number of batches in an epoch, if known.
        is_split: Whether it can read the samples of its replica.
        split: What must be the same on all ranks for that; or why it cannot.
    """

    text: str
    has_arrays: bool
    is_given: bool
    size: int | None
    is_split: bool
    split: str


@dataclass(frozen=True)
class OpenedData:
    """Data of a script as a rank has opened them.

    Attributes:
        adapter: Reads all of them.
        arrays: The arrays that they are.
        part: Reads the samples of the rank's replica.
        split: As of `DataFacts`.
    """

    adapter: DataAdapter | None = None
    arrays: ArrayRows | None = None
    part: DataAdapter | None = None
    split: str = ""

    def facts(self, text: str, *, is_given: bool) -> DataFacts:
        """What the other ranks are told of them."""
        size = None if self.adapter is None else self.adapter.num_batches
        return DataFacts(
            text, self.arrays is not None, is_given, None if size is None else int(size),
            self.part is not None, self.split,
        )  # fmt: skip


def given_data(
    parts: tuple[Any, Any, Any], batch_size: int | None, steps: int | None, **options: Any
) -> GivenData:
    """Data of a script, with what Keras makes an adapter of them with."""
    return GivenData(
        parts, functools.partial(get_data_adapter, *parts, batch_size, steps, **options)
    )


def shared_adapters(
    engine: BatchEngine, find: Callable[[], Sequence[GivenData | None]], *, describe: bool = False
) -> list[FeedAdapter | None]:
    """Opens the user's data where they are read, and tells all ranks how much there is."""
    communicator = engine.communicator
    opened: list[OpenedData] = []
    facts: list[DataFacts] = []

    def open_all() -> None:
        for given in find():
            data = _open(given, engine)
            opened.append(data)
            known = given is not None and (describe or communicator.size > 1)
            text = _described(given, data.arrays) if known else _NOTHING
            facts.append(data.facts(text, is_given=given is not None))

    everyones = _all_told(communicator, open_all, facts)
    return [
        _fed(engine, data, told)
        for data, told in zip(opened, zip(*everyones, strict=True), strict=True)
    ]


def shared_adapter(
    engine: BatchEngine,
    x: Any,
    y: Any,
    sample_weight: Any,
    batch_size: int | None,
    steps: int | None,
) -> FeedAdapter | None:
    """Opens data to evaluate or predict, as `shared_adapters`."""
    given = given_data((x, y, sample_weight), batch_size, steps)
    return shared_adapters(engine, lambda: [given])[0]


def _open(given: GivenData | None, engine: BatchEngine) -> OpenedData:
    """Opens data on the ranks that may have to read, and arrays wherever they are."""
    if given is None:
        return OpenedData()
    feed, reads = engine.feed, engine.communicator.rank == READER
    x = given.parts[0]
    if isinstance(x, tf.data.Dataset) and feed.num_replicas > 1 and feed.reads_for_replica:
        with warnings.catch_warnings():
            if not reads:  # one rank says what all would say
                warnings.simplefilter("ignore")
            return _opened_in_parts(given.open(), feed)
    if not reads and (x is None or not are_arrays(given.parts)):
        return OpenedData()
    adapter = given.open()
    return OpenedData(adapter, ArrayRows.of(adapter))


def _opened_in_parts(adapter: DataAdapter, feed: DataFeed) -> OpenedData:
    """A `tf.data` data set, and if possible that of the samples of this rank's replica."""
    try:
        split = SplitDataset.of(dataset_of(adapter))
        part = get_data_adapter(split.part(feed.shares, feed.replica), None, None, None, None)
        return OpenedData(adapter, None, part, split.fingerprint)
    except NotSplitError as error:
        return OpenedData(adapter, None, None, str(error))


def _fed(engine: BatchEngine, data: OpenedData, told: Sequence[DataFacts]) -> FeedAdapter | None:
    """What feeds a loop of Keras, once it is known what all ranks have."""
    reads = engine.communicator.rank == READER
    text, size = told[READER].text, told[READER].size
    _refuse_others(told)
    if not told[READER].is_given:
        return None
    if all(theirs.has_arrays for theirs in told):
        order = order_of(data.adapter) if reads else None
        return FeedAdapter(engine, order, size, data.arrays, text)
    splits = [theirs.split for theirs in told if theirs.is_split]
    if len(splits) == engine.feed.num_replicas and len(set(splits)) == 1:
        logger.info("one rank of each replica reads its samples of %s", text)
        return FeedAdapter(engine, data.part, size, None, text, is_split=True)
    if text != _NOTHING:
        reason = f" ({told[READER].split})" if told[READER].split and not splits else ""
        words = "rank %d reads %s and sends the other ranks their parts%s"
        logger.info(words, READER, text, reason)
    return FeedAdapter(engine, data.adapter if reads else None, size, None, text)


def _all_told(
    communicator: Communicator, open_all: Callable[[], None], facts: list[DataFacts]
) -> list[list[DataFacts]]:
    """Opens data on all ranks; returns what each of them tells of its own."""
    failure: Exception | None = None
    try:
        open_all()
    except Exception as error:
        failure = error
    reason = None if failure is None else f"{type(failure).__name__}: {failure}"
    for rank, theirs in enumerate(communicator.allgather_json(reason)):
        if theirs is not None:
            if failure is not None and rank == communicator.rank:
                raise failure
            raise ConfigurationError(f"Rank {rank} could not read the data: {theirs}")
    everyones: list[list[Any]] = communicator.allgather_json([list(each) for each in facts])
    return [[DataFacts(*each) for each in theirs] for theirs in everyones]


def _refuse_others(told: Sequence[DataFacts]) -> None:
    """Refuses data that differ between ranks, of those that have any."""
    texts = [theirs.text for theirs in told]
    given = [text for text in texts if text != _NOTHING]
    if len({texts[READER], *given}) > 1:
        received = "; ".join(f"{text} on rank {rank}" for rank, text in enumerate(texts))
        raise ConfigurationError(
            f"All ranks must have the same data, in the same order. Received: {received}. Seed "
            "what draws or shuffles them, and do not shard them: each replica takes its own rows "
            "of every batch. Or pass them on rank 0, and None on all others: then rank 0 sends "
            "their parts."
        )


def _described(given: GivenData | None, arrays: ArrayRows | None) -> str:
    """What data are, in words that are the same on all ranks that have the same."""
    if given is None or given.parts[0] is None:
        return _NOTHING
    if arrays is not None:
        return f"arrays {arrays.fingerprint()}"
    x = given.parts[0]
    if isinstance(x, tf.data.Dataset):
        size = int(x.cardinality())
        found = "a tf.data.Dataset" + (f" of {size} batches" if size >= 0 else "")
        return found + "".join(f", shard {index} of {count}" for index, count in shards_of(x))
    if isinstance(x, keras.utils.PyDataset):
        return f"a PyDataset of {x.num_batches} batches"
    return f"a {type(x).__name__}"
