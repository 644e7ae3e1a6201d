"""How far the reading rank has come in its data, and how it comes there again after a restart.

    fit starts        pass 1                  pass 2
    ----------------> batches 1 2 3 ... end   batches 1 2 |  <- position: pass 2, 2 batches

An epoch is a pass, unless `steps_per_epoch` cuts a pass in several epochs. Arrays are read in an
order that is kept with the position. A `PyDataset` hears of all epochs again, and draws its order
from the same state of Python's random numbers. Other data are read again up to the position.

Each iterator of a `tf.data` data set that shuffles has another order, read or not. Keras' loops
make one at the end of each epoch and drop it unread; it is made here, too, and counts as a pass.
"""

from __future__ import annotations

import collections
import itertools
import logging
import random
from collections.abc import Iterator, Mapping
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tarantella_pp.internals import data

logger = logging.getLogger(__name__)
Array = np.ndarray[Any, Any]
ARRAYS, PY_DATASET, TF_DATA, OTHER = "arrays", "PyDataset", "tf.data", "generator"


class DataCursor:
    """Reads data, and knows how far."""

    def __init__(self, adapter: data.DataAdapter, numbers: bool) -> None:
        self.adapter = adapter
        self._dataset: Any = None
        self._passes = 0
        self._is_unread = False
        self.batches = 0  # of this pass that were read
        self._skips: int | None = None
        self._order: Array | None = None
        self._states: Any = None
        self._next_states: Any = None
        self._user_data = data.dataset_of(adapter)
        self.kind = ARRAYS if numbers else _kind_of(self._user_data)

    def facts(self) -> dict[str, Any]:
        """What must be the same to come back to a position."""
        return {"kind": self.kind, "batch_size": data.batch_size_of(self.adapter)}

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
        size, shuffles = data.batch_size_of(self.adapter) or 1, data.is_shuffled(self.adapter)
        if not shuffles:
            order = np.asarray(data.arrays_of(self.adapter))
        elif order is None or skips is None:
            order = np.concatenate([np.asarray(part) for part in self._opened()])
        self._order = order if shuffles else None
        return order[(skips or 0) * size :].astype(np.int64, copy=False), size

    def read(self) -> Iterator[Any]:
        """Reads when the first batch is asked for; what a data set shuffles it draws at once."""
        begun = None
        try:
            dataset = self._opened()
            if self.kind == TF_DATA:
                begun = iter(dataset)
                self._passes += 1
                self._is_unread = True
        except Exception as error:
            dataset = error
        return self._read(dataset, begun)

    def _read(self, dataset: Any, begun: Iterator[Any] | None) -> Iterator[Any]:
        if isinstance(dataset, Exception):  # raised with the first batch, when others hear of it
            raise dataset
        skips = self._begin(is_counted=begun is not None)
        for batch in itertools.islice(begun or iter(dataset), skips or 0, None):
            self.batches += 1
            yield batch

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
            if data.arrays_of(self.adapter) is not None:  # others are the user's, as tuned
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
                if number == 0 and ends and data.caches(self._dataset):
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
