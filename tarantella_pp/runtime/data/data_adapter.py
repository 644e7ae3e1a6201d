"""Keras' data adapters, that feed all ranks, and the steps that Keras' loops call."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import keras

from tarantella_pp.internals.data import DataAdapter, EpochStart
from tarantella_pp.runtime.comm.communicator import Communicator
from tarantella_pp.runtime.data.array_rows import ArrayRows
from tarantella_pp.runtime.data.batch import Batch
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
    """A data adapter whose data set gives each rank its part of every batch.

    Attributes:
        cursor: How far a reader has come; `None` elsewhere.
        start: Where the next epoch begins that Keras' loop runs, if not at its first step.
    """

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
    """Trains, tests and predicts one batch after the other, on one rank.

    Attributes:
        communicator: All ranks of the job.
    """

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
