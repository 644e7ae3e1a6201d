"""Keras' data adapters, that feed all ranks, and the steps that Keras' loops call."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf

from tarantella_pp.keras_internals.data import DataAdapter, arrays_of
from tarantella_pp.runtime.batch.array_rows import ArrayRows
from tarantella_pp.runtime.batch.batch import Batch
from tarantella_pp.runtime.batch.data_feed import Batches, DataFeed
from tarantella_pp.runtime.engine import Engine


class FedData:
    """What takes the place of a `tf.data.Dataset` in Keras' loops.

    Args:
        feed: Hands every rank its part of each batch.
        adapter: What the reader reads; `None` elsewhere.
        arrays: What all ranks have, if the reader reads the numbers of samples.
    """

    def __init__(
        self, feed: DataFeed, adapter: DataAdapter | None, arrays: ArrayRows | None = None
    ) -> None:
        self._feed = feed
        self._adapter = adapter
        self._arrays = arrays
        self._dataset: Any = None

    def __iter__(self) -> Batches:
        source = None if self._adapter is None else self._read(self._adapter)
        return self._feed.batches(source, self._arrays)

    def _read(self, adapter: DataAdapter) -> Iterator[Any]:
        """Reads the data set from when the first batch is asked for.

        Keras' loops make an iterator at the end of each epoch that they drop unread, and an open
        one of TensorFlow reads ahead and takes its time to stop.
        """
        if self._dataset is None:
            self._dataset = adapter.get_tf_dataset()
            if arrays_of(adapter) is not None:  # others may be the user's, tuned as they wish
                self._dataset = _without_tuning(self._dataset)
        yield from self._dataset


class FeedAdapter(DataAdapter):
    """A data adapter whose data set gives each rank its part of every batch.

    Args:
        engine: This rank's part of training.
        adapter: What the reader reads; `None` elsewhere.
        num_batches: Number of batches in an epoch, if known.
        arrays: What all ranks have, if the reader reads the numbers of samples.
    """

    def __init__(
        self,
        engine: Engine,
        adapter: DataAdapter | None,
        num_batches: int | None,
        arrays: ArrayRows | None = None,
    ) -> None:
        self._engine = engine
        self._data = FedData(engine.feed, adapter, arrays)
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
        self._engine.shared_logs.share_metrics()
        if self._adapter is not None:
            self._adapter.on_epoch_end()


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
            engine.shared_logs.share_metrics()
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


def _without_tuning(dataset: tf.data.Dataset) -> tf.data.Dataset:
    """Slices arrays as fast; but an epoch ends without waiting for a thread that measures it."""
    options = tf.data.Options()
    options.autotune.enabled = False
    return dataset.with_options(options)
