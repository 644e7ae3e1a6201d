"""The data that a script gives on several ranks: who reads them, and whether they are the same.

Arrays that all ranks have the same are read by all of them, each its own rows. A function of an
`InputContext` is asked by one rank of each replica for the samples of its own. Everything else is
read by one rank, which sends the others their parts: a generator, or a `PyDataset` that draws
random numbers, gives each rank something else.
"""

from __future__ import annotations

import functools
import logging
import types
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import keras
import tensorflow as tf

from tarantella_pp.errors import ConfigurationError
from tarantella_pp.internals.data import (
    DataAdapter,
    EpochStart,
    are_arrays,
    get_data_adapter,
    order_of,
)
from tarantella_pp.runtime.comm.collective import on_all_ranks
from tarantella_pp.runtime.comm.communicator import Communicator
from tarantella_pp.runtime.data.batch import READER, ArrayRows, Batch
from tarantella_pp.runtime.data.data_cursor import DataCursor
from tarantella_pp.runtime.data.data_feed import Batches, DataFeed
from tarantella_pp.runtime.tracing.recorder import Recorder


class FedData:
    """What takes the place of a `tf.data.Dataset` in Keras' loops."""

    def __init__(
        self,
        feed: DataFeed,
        cursor: DataCursor | None,
        arrays: ArrayRows | None = None,
        *,
        is_split: bool = False,
    ) -> None:
        self._feed = feed
        self._cursor = cursor
        self._arrays = arrays
        self._is_split = is_split

    def __iter__(self) -> Batches:
        source = None if self._cursor is None else self._cursor.read()
        return self._feed.batches(source, self._arrays, is_split=self._is_split)


class FeedAdapter(DataAdapter):
    """A data adapter whose data set gives each rank its part of every batch."""

    def __init__(
        self,
        engine: BatchEngine,
        adapter: DataAdapter | None,
        num_batches: int | None,
        arrays: ArrayRows | None = None,
        description: str = "",
        *,
        is_split: bool = False,
    ) -> None:
        self._engine = engine
        self.cursor = None if adapter is None else DataCursor(adapter, arrays is not None)
        self._data = FedData(engine.feed, self.cursor, arrays, is_split=is_split)
        self._adapter = adapter
        self._num_batches = num_batches
        self.description = description
        # Where the next epoch of Keras' loop begins, if not at its first step.
        self.start: EpochStart | None = None

    def get_tf_dataset(self) -> Any:
        """Returns the iterable of this rank's parts of the batches."""
        return self._data

    @property
    def num_batches(self) -> int | None:
        """Number of batches in an epoch, if known."""
        return self._num_batches

    def on_epoch_begin(self) -> None:
        """Passes the hook on to the user's data."""
        if self._adapter is not None and self.cursor is not None:
            self.cursor.on_epoch_begin()
            self._adapter.on_epoch_begin()

    def on_epoch_end(self) -> None:
        """Gives every rank the state of all metrics, and passes the hook on to the user's data."""
        self._engine.share_metrics()
        if self._adapter is not None:
            self._adapter.on_epoch_end()


def step_function(
    engine: BatchEngine, step: Callable[[Batch], dict[str, Any]], steps_per_execution: int
) -> Callable[[Any], dict[str, Any]]:
    """Makes a function that trains or evaluates, as Keras' loops expect it."""

    def run(iterator: Any) -> dict[str, Any]:
        batches = iterator if isinstance(iterator, Batches) else engine.feed.batches(iterator)
        logs = step(next(batches))
        for _, batch in zip(range(steps_per_execution - 1), batches, strict=False):
            logs = step(batch)
        if batches is not iterator:  # a single batch is an epoch of its own
            engine.share_metrics()
        return logs

    return run


def predict_function(engine: BatchEngine) -> Callable[[Sequence[Any]], Any]:
    """Makes a function that predicts, as Keras' loops expect it."""

    def run(data: Sequence[Any]) -> Any:
        feed = engine.feed
        batches = [b if isinstance(b, Batch) else next(feed.batches(iter([b]))) for b in data]
        outputs = [engine.predict(batch) for batch in batches]
        return keras.tree.map_structure(lambda *parts: keras.ops.concatenate(parts), *outputs)

    return run


class BatchEngine(Protocol):
    """Trains, tests and predicts one batch after the other, on one rank."""

    communicator: Communicator

    @property
    def feed(self) -> DataFeed:
        """Hands every rank its part of each batch."""

    @property
    def prints(self) -> bool:
        """Whether this rank shows progress and writes files."""

    def train(self, batch: Batch) -> dict[str, Any]:
        """Trains one batch; returns Keras' logs."""

    def test(self, batch: Batch) -> dict[str, Any]:
        """Evaluates one batch; returns Keras' logs."""

    def predict(self, batch: Batch) -> Any:
        """Predicts one batch; returns the outputs for all of it."""

    def share_metrics(self) -> None:
        """Gives every rank the state of all metrics; all must call it."""

    def record(self, recorder: Recorder | None) -> None:
        """Makes training steps tell when they do what; `None` for no more of that."""


logger = logging.getLogger(__name__)
_NOTHING, _FUNCTION = "nothing", "a function of an InputContext"


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
    """What a rank tells the others of its data, and how many batches an epoch has, if known."""

    text: str
    is_given: bool
    has_arrays: bool
    size: int | None


class OpenedData(NamedTuple):
    """Data of a script as a rank has opened them: all, the arrays that they are, or a part."""

    adapter: DataAdapter | None = None
    arrays: ArrayRows | None = None
    is_part: bool = False

    def facts(self, text: str, *, is_given: bool) -> DataFacts:
        """What the other ranks hear of them."""
        size = None if self.adapter is None else self.adapter.num_batches
        return DataFacts(
            text, is_given, self.arrays is not None, None if size is None else int(size)
        )


def given_data(
    parts: tuple[Any, Any, Any], batch_size: int | None, steps: int | None, **options: Any
) -> GivenData:
    """Data of a script, with what Keras makes an adapter of them with."""
    return GivenData(parts, {"batch_size": batch_size, "steps_per_epoch": steps, **options})


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

    on_all_ranks(communicator, "read the data", open_all)
    everyones: list[list[Any]] = communicator.allgather_json([list(each) for each in facts])
    by_data = zip(*everyones, strict=True)
    return [
        _fed(engine, data, [DataFacts(*each) for each in theirs])
        for data, theirs in zip(opened, by_data, strict=True)
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
    if given.is_function and feed.num_replicas > 1:
        adapter = given.open(feed.replica, feed.num_replicas) if feed.reads_for_replica else None
        return OpenedData(adapter, is_part=True)
    if not reads and (given.parts[0] is None or not are_arrays(given.parts)):
        return OpenedData()
    adapter = given.open()
    return OpenedData(adapter, ArrayRows.of(adapter))


def _fed(engine: BatchEngine, data: OpenedData, facts: Sequence[DataFacts]) -> FeedAdapter | None:
    """What feeds a loop of Keras, once it is known what all ranks have."""
    reads = engine.communicator.rank == READER
    first = facts[READER]
    text, size = first.text, first.size
    _refuse_others(facts, everywhere=text == _FUNCTION)
    if not first.is_given:
        return None
    if all(theirs.has_arrays for theirs in facts):
        order = order_of(data.adapter) if reads else None
        return FeedAdapter(engine, order, size, data.arrays, text)
    if data.is_part:
        sizes = [facts[rank].size for rank in engine.feed.readers]
        if len(set(sizes)) > 1:
            raise ConfigurationError(
                "A function of an InputContext must give each replica as many batches. Received: "
                f"{sizes} batches of replicas 0 to {len(sizes) - 1}."
            )
        return FeedAdapter(engine, data.adapter, size, None, text, is_split=True)
    if text != _NOTHING:
        logger.info("rank %d reads %s and sends the other ranks their parts", READER, text)
    return FeedAdapter(engine, data.adapter if reads else None, size, None, text)


def _refuse_others(facts: Sequence[DataFacts], *, everywhere: bool) -> None:
    """Refuses data that differ between ranks, of those that have any."""
    texts = [theirs.text for theirs in facts]
    given = [text for text in texts if everywhere or text != _NOTHING]
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
    if given.is_function:
        return _FUNCTION
    x = given.parts[0]
    if isinstance(x, tf.data.Dataset):
        size = int(x.cardinality())
        return "a tf.data.Dataset" + (f" of {size} batches" if size >= 0 else "")
    if isinstance(x, keras.utils.PyDataset):
        return f"a PyDataset of {x.num_batches} batches"
    return f"a {type(x).__name__}"
