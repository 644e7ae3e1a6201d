"""Keras' data adapters, read on one rank and fed to all, and the steps that Keras' loops call."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras

from tarantella_pp.keras_internals.training import DataAdapter, get_data_adapter
from tarantella_pp.runtime.batch.data_feed import (
    READER,
    Batch,
    Batches,
    DataFeed,
)
from tarantella_pp.runtime.engine import Engine
from tarantella_pp.runtime.one_rank import on_one_rank


class FedData:
    """What takes the place of a `tf.data.Dataset` in Keras' loops."""

    def __init__(self, feed: DataFeed, adapter: DataAdapter | None) -> None:
        self._feed = feed
        self._adapter = adapter
        self._dataset: Any = None

    def __iter__(self) -> Batches:
        source = None if self._adapter is None else self._read(self._adapter)
        return self._feed.batches(source)

    def _read(self, adapter: DataAdapter) -> Iterator[Any]:
        """Reads the data set from when the first batch is asked for.

        Keras' loops make an iterator at the end of each epoch that they drop unread, and an open
        one of TensorFlow reads ahead and takes its time to stop.
        """
        if self._dataset is None:
            self._dataset = adapter.get_tf_dataset()
        yield from self._dataset


class FeedAdapter(DataAdapter):
    """A data adapter whose data set gives each rank its part of every batch.

    Only the reader opens the user's data; the other ranks know how many batches there are.
    """

    def __init__(
        self, engine: Engine, adapter: DataAdapter | None, num_batches: int | None
    ) -> None:
        self._engine = engine
        self._data = FedData(engine.feed, adapter)
        self._adapter = adapter
        self._num_batches = num_batches

    def get_tf_dataset(self) -> Any:
        """Returns the iterable of this rank's parts of the batches."""
        return self._data

    @property
    def num_batches(self) -> int | None:
        """Number of batches in an epoch, if known."""
        return self._num_batches

    def on_epoch_begin(self) -> None:
        """Passes the hook on to the user's data."""
        if self._adapter is not None:
            self._adapter.on_epoch_begin()

    def on_epoch_end(self) -> None:
        """Gives every rank the state of all metrics, and passes the hook on to the user's data."""
        self._engine.share_metrics()
        if self._adapter is not None:
            self._adapter.on_epoch_end()


def shared_adapters(
    engine: Engine, make: Callable[[], list[DataAdapter | None]]
) -> list[FeedAdapter | None]:
    """Opens the user's data on the reader and tells all ranks how much there is."""
    adapters: list[DataAdapter | None] = []

    def sizes() -> list[list[int | None] | None]:
        adapters.extend(make())
        return [None if adapter is None else [_whole(adapter.num_batches)] for adapter in adapters]

    found = on_one_rank(engine.communicator, READER, "read the data", sizes)
    return [
        None if size is None else FeedAdapter(engine, adapter, size[0])
        for size, adapter in zip(found, adapters or [None] * len(found), strict=True)
    ]


def shared_adapter(
    engine: Engine, x: Any, y: Any, sample_weight: Any, batch_size: int | None, steps: int | None
) -> FeedAdapter | None:
    """Opens data to evaluate or predict, as `shared_adapters`."""
    make = functools.partial(get_data_adapter, x, y, sample_weight, batch_size, steps)
    return shared_adapters(engine, lambda: [make()])[0]


def step_function(
    engine: Engine, step: Callable[[Batch], dict[str, Any]], steps_per_execution: int
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


def predict_function(engine: Engine) -> Callable[[Sequence[Any]], Any]:
    """Makes a function that predicts, as Keras' loops expect it."""

    def run(data: Sequence[Any]) -> Any:
        feed = engine.feed
        batches = [b if isinstance(b, Batch) else next(feed.batches(iter([b]))) for b in data]
        outputs = [engine.predict(batch) for batch in batches]
        return keras.tree.map_structure(lambda *parts: keras.ops.concatenate(parts), *outputs)

    return run


def _whole(size: Any) -> int | None:
    return None if size is None else int(size)
