"""The data that a script gives on several ranks: who reads them, how far, and if all are the same.

Arrays that all ranks have the same are read by all of them, each its own rows. A function of an
`InputContext` is asked by one rank of each replica for the samples of its own. Everything else is
read by one rank, which sends the others their parts: a generator, or a `PyDataset` that draws
random numbers, gives each rank something else.
"""

from __future__ import annotations

import collections
import contextlib
import contextvars
import functools
import itertools
import logging
import random
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf

from tarantella_pp.errors import ConfigurationError
from tarantella_pp.internals.data import (
    DataAdapter,
    EpochStart,
    are_arrays,
    arrays_of,
    batch_size_of,
    caches,
    dataset_of,
    get_data_adapter,
    is_shuffled,
    order_of,
)
from tarantella_pp.internals.state import meanwhile
from tarantella_pp.runtime.batch import READER, ArrayRows, Batch, checksum
from tarantella_pp.runtime.comm.collective import on_all_ranks
from tarantella_pp.runtime.data_feed import DataFeed

logger = logging.getLogger(__name__)
_ABSENT, _NOTHING, _FUNCTION = "", "nothing", "a function of an InputContext"
ARRAYS, PY_DATASET, TF_DATA, OTHER = "arrays", "PyDataset", "tf.data", "generator"
Array = np.ndarray[Any, Any]


class FeedAdapter(DataAdapter):
    """A data adapter, and its own data set, that gives each rank its part of every batch."""

    num_batches: int | None = None  # in an epoch, if known

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
        self.num_batches = facts.num_batches
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

    def _orders(self) -> Iterator[Array]:
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

    def opened(given: GivenData | None) -> tuple[DataAdapter | None, ArrayRows | None, DataFacts]:
        adapter, arrays = _open(given, engine)
        text = _ABSENT if given is None else _NOTHING
        if given is not None and (describe or communicator.size > 1):
            text = _described(given, arrays)
        size = None if adapter is None else adapter.num_batches
        facts = DataFacts(text, arrays is not None, None if size is None else int(size))
        return adapter, arrays, facts

    found = on_all_ranks(communicator, "read the data", lambda: [*map(opened, find())])
    everyones: list[list[Any]] = communicator.allgather_json([list(facts) for *_, facts in found])
    by_data = zip(*everyones, strict=True)
    return [
        _fed(engine, adapter, arrays, [DataFacts(*each) for each in theirs])
        for (adapter, arrays, _), theirs in zip(found, by_data, strict=True)
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


#     fit starts        pass 1                  pass 2
#     ----------------> batches 1 2 3 ... end   batches 1 2 |  <- position: pass 2, 2 batches
#
# An epoch is a pass, unless `steps_per_epoch` cuts a pass in several epochs. Arrays are read in an
# order that is kept with the position. A `PyDataset` hears of all epochs again, and draws its order
# from the same state of Python's random numbers. Other data are read again up to the position.
#
# Each iterator of a `tf.data` data set that shuffles has another order, read or not. Keras' loops
# make one at the end of each epoch and drop it unread; it is made here, too, and counts as a pass.
class DataCursor:
    """How far a rank has come in its data, and how it comes there again after a restart."""

    def __init__(self, adapter: DataAdapter, numbers: bool) -> None:
        self.adapter = adapter
        self._dataset: Any = None
        self._passes = 0
        self._is_unread = False
        self.batches = 0  # of this pass that were read
        self._skips: int | None = None
        self._order: Array | None = None
        self._states: Any = None
        self._next_states: Any = None
        self._user_data = dataset_of(adapter)
        self.kind = ARRAYS if numbers else _kind_of(self._user_data)

    def facts(self) -> dict[str, Any]:
        """What must be the same to come back to a position."""
        return {"kind": self.kind, "batch_size": batch_size_of(self.adapter)}

    def on_epoch_begin(self) -> None:
        """Notes what an order would be drawn from, before the user's data hear of it."""
        if self.kind == PY_DATASET:
            if self._next_states is not None:
                states = self._next_states
                version, words, gauss = states["python"]
                random.setstate((version, tuple(words), gauss))
                np.random.set_state(tuple(states["numpy"]))  # noqa: NPY002
            self._next_states, self._states = None, _random_states()
        self.adapter.on_epoch_begin()

    def order(self) -> tuple[Array, int]:
        """The samples of the next pass, or of its rest, and a batch's size."""
        skips, order = self._begin(), self._order
        size, shuffles = batch_size_of(self.adapter) or 1, is_shuffled(self.adapter)
        if not shuffles:
            order = np.asarray(arrays_of(self.adapter))
        elif order is None or skips is None:
            order = np.concatenate([np.asarray(part) for part in self._opened()])
        self._order = order if shuffles else None
        return order[(skips or 0) * size :].astype(np.int64, copy=False), size

    def read(self) -> Iterator[Any]:
        """Reads when the first batch is asked for; what a data set shuffles it draws at once."""
        dataset: Any = None
        begun, failure = None, None
        try:
            dataset = self._opened()
            if self.kind == TF_DATA:
                begun = iter(dataset)
                self._passes += 1
                self._is_unread = True
        except Exception as error:
            failure = error

        def read() -> Iterator[Any]:
            if failure is not None:  # raised with the first batch, when others hear of it
                raise failure
            skips = self._begin(is_counted=begun is not None)
            for batch in itertools.islice(begun or iter(dataset), skips or 0, None):
                self.batches += 1
                yield batch

        return read()

    def _begin(self, is_counted: bool = False) -> int | None:
        """Begins a pass, or goes on with one; returns how many batches to skip."""
        skips, self._skips = self._skips, None
        self._is_unread = False
        if skips is None:
            self._passes += not is_counted
            self.batches = 0
        return skips

    def _opened(self) -> Any:
        if self._dataset is None:
            self._dataset = self.adapter.get_tf_dataset()
            if arrays_of(self.adapter) is not None:  # others are the user's, as tuned
                # As fast; but an epoch ends without waiting for a thread that measures it.
                options = tf.data.Options()
                options.autotune.enabled = False
                self._dataset = self._dataset.with_options(options)
        return self._dataset

    def position(
        self, epoch_steps: int, length: int | None, steps: int | None
    ) -> tuple[dict[str, Any], dict[str, Array]]:
        """Where it is after some steps of an epoch, of `steps` steps or `length` batches."""
        in_pass = epoch_steps > 0
        if steps is not None:
            in_pass = length is None or self.batches < length
        states = None
        if self.kind == PY_DATASET:
            states = self._states if in_pass else _random_states()
        arrays = {} if self._order is None or not in_pass else {"order": self._order}
        passes = self._passes
        if self.kind == TF_DATA and not in_pass:
            # How many there would be before the next pass, had training not been interrupted: with
            # `steps`, what was made at the end of a pass is the next one; without, it is dropped.
            if steps is not None:
                passes -= self._is_unread
            else:
                passes += length is not None and not self._is_unread
        place = {"kind": self.kind, "passes": passes, "batches": self.batches}
        return {**place, "in_pass": in_pass, "random": states}, arrays

    def resume(self, position: Any, arrays: Mapping[str, Array]) -> None:
        """Comes back to a position, with the next batch that is read."""
        self._passes, self.batches = position.passes, position.batches
        self._skips = position.batches if position.in_pass else None
        self._order = arrays.get("order")
        if self.kind == PY_DATASET:
            for _ in range(position.epochs):
                self._user_data.on_epoch_begin()
                self._user_data.on_epoch_end()
            self._next_states = position.random
        elif self.kind == TF_DATA:
            # An open pass begins again with `read`, which counts it.
            self._dataset = self.adapter.get_tf_dataset()
            self._passes = position.passes - position.in_pass
            for number in range(self._passes):
                begun = iter(self._dataset)  # seeds of shuffles go on with each
                ends = self._dataset.cardinality() != tf.data.INFINITE_CARDINALITY
                if number == 0 and ends and caches(self._dataset):
                    logger.warning("reads a whole pass again, for a cache keeps what it has drawn")
                    collections.deque(begun, maxlen=0)
        if self._skips and self.kind != ARRAYS:
            logger.warning("reads %d batches again to come back to where it was", self._skips)


def _kind_of(given: Any) -> str:
    if isinstance(given, keras.utils.PyDataset):
        return PY_DATASET
    return TF_DATA if isinstance(given, tf.data.Dataset) else OTHER


def _random_states() -> dict[str, Any]:
    """The states of Python's and NumPy's global random numbers, as JSON keeps them."""
    state: Any = np.random.get_state()  # noqa: NPY002
    kind, keys, *rest = state
    return {"python": random.getstate(), "numpy": [kind, keys.tolist(), *rest]}
