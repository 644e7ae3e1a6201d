"""Keras' data adapters, read on one rank and fed to all."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from tarantella_pp.errors import ConfigurationError
from tarantella_pp.runtime.communicator import Communicator
from tarantella_pp.runtime.feed import READER, Batch, Feed
from tarantella_pp.runtime.keras_training import DataAdapter


class BatchIterator:
    """The batches of one epoch, as this rank sees them.

    Args:
        batches: Iterator over this rank's part of each batch.
    """

    def __init__(self, batches: Iterator[Batch]) -> None:
        self._batches = batches

    def __iter__(self) -> BatchIterator:
        return self

    def __next__(self) -> Batch:
        return next(self._batches)


class FedData:
    """What takes the place of a `tf.data.Dataset` in Keras' loops.

    Args:
        feed: Hands every rank its part.
        adapter: Keras' adapter of the user's data, on the reader; elsewhere `None`.
    """

    def __init__(self, feed: Feed, adapter: DataAdapter | None) -> None:
        self._feed = feed
        self._adapter = adapter
        self._dataset: Any = None

    def __iter__(self) -> BatchIterator:
        source = None if self._adapter is None else self._read(self._adapter)
        return BatchIterator(self._feed.batches(source))

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

    Args:
        feed: Hands every rank its part.
        adapter: Keras' adapter of the user's data, on the reader; elsewhere `None`.
        num_batches: Number of batches in an epoch, if known.
        at_end: What to do at the end of each epoch, on all ranks.
    """

    def __init__(
        self,
        feed: Feed,
        adapter: DataAdapter | None,
        num_batches: int | None,
        at_end: Callable[[], None],
    ) -> None:
        self._at_end = at_end
        self._data = FedData(feed, adapter)
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
        """Ends the epoch on this rank, and passes the hook on to the user's data."""
        self._at_end()
        if self._adapter is not None:
            self._adapter.on_epoch_end()


def shared_adapters(
    communicator: Communicator,
    feed: Feed,
    make: Callable[[], list[DataAdapter | None]],
    at_end: Callable[[], None],
) -> list[FeedAdapter | None]:
    """Opens the user's data on the reader and tells all ranks how much there is.

    Args:
        communicator: The ranks of the pipeline.
        feed: Hands every rank its part.
        make: Opens the data: training data, then validation data or `None`.
        at_end: What to do at the end of each epoch, on all ranks.

    Returns:
        An adapter for each entry on every rank; `None` where the reader has none.

    Raises:
        ConfigurationError: On the other ranks, if opening the data failed on the reader.
    """
    adapters: list[DataAdapter | None] = []
    facts: dict[str, Any] = {}
    failure: Exception | None = None
    if communicator.rank == READER:
        try:
            adapters = make()
            facts["sizes"] = [a and [_whole(a.num_batches)] for a in adapters]
        except Exception as error:
            failure = error
            facts["error"] = f"{type(error).__name__}: {error}"
    facts = communicator.broadcast_json(facts, READER)
    if failure is not None:
        raise failure
    if "error" in facts:
        raise ConfigurationError(f"Rank {READER} could not read the data: {facts['error']}")
    found = adapters or [None] * len(facts["sizes"])
    return [
        None if size is None else FeedAdapter(feed, adapter, size[0], at_end)
        for size, adapter in zip(facts["sizes"], found, strict=True)
    ]


def _whole(size: Any) -> int | None:
    return None if size is None else int(size)
