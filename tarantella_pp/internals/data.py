"""The private names of Keras that reading data, and going on in mid-epoch, need."""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import keras
import numpy as np
import tensorflow as tf
from keras.src.backend.tensorflow import trainer
from keras.src.trainers.data_adapters import get_data_adapter as get_data_adapter
from keras.src.trainers.data_adapters.array_data_adapter import ArrayDataAdapter, can_convert_arrays
from keras.src.trainers.data_adapters.array_slicing import convert_to_sliceable
from keras.src.trainers.data_adapters.array_slicing import (
    train_validation_split as train_validation_split,
)
from keras.src.trainers.data_adapters.data_adapter import DataAdapter as DataAdapter
from keras.src.trainers.data_adapters.py_dataset_adapter import PyDatasetAdapter
from keras.src.trainers.data_adapters.tf_dataset_adapter import TFDatasetAdapter

from tarantella_pp.internals.state import become

# Whether Keras takes `(x, y, sample_weight)` for arrays.
are_arrays = can_convert_arrays


def arrays_of(adapter: DataAdapter) -> Any:
    """The arrays that an adapter slices, structured like a batch; `None` of another adapter."""
    return adapter._inputs if isinstance(adapter, ArrayDataAdapter) else None


def as_sliced(arrays: Any) -> Any:
    """Arrays in the types in which Keras slices them: its own floats, tuples for lists."""
    return keras.tree.lists_to_tuples(convert_to_sliceable(arrays, target_backend="tensorflow"))


def order_of(adapter: Any) -> DataAdapter:
    """An adapter that gives the numbers of the samples of each batch, drawn from the same seed."""
    numbers = np.arange(adapter._num_samples)
    return ArrayDataAdapter(numbers, batch_size=adapter._batch_size, shuffle=adapter._shuffle)


def batch_size_of(adapter: Any) -> int | None:
    """Samples in a batch of arrays; `None` of an adapter of something else."""
    return adapter._batch_size if isinstance(adapter, ArrayDataAdapter) else None


def is_shuffled(adapter: Any) -> bool:
    """Whether an adapter draws the order of arrays anew in each epoch."""
    return isinstance(adapter, ArrayDataAdapter) and bool(adapter._shuffle)


def dataset_of(adapter: Any) -> Any:
    """The user's `PyDataset` or `tf.data.Dataset` that an adapter reads; `None` of another one."""
    if isinstance(adapter, PyDatasetAdapter):
        return adapter.py_dataset
    return adapter._dataset if isinstance(adapter, TFDatasetAdapter) else None


def caches(dataset: Any) -> bool:
    """Whether a `tf.data` data set keeps what the first pass has drawn, so that all have it."""
    kept = type(dataset).__name__.lstrip("_") == "CacheDataset"
    return kept or any(map(caches, dataset._inputs()))


class EpochStart(NamedTuple):
    """Where the first epoch of a resumed `fit` begins."""

    steps: int  # that have been trained of the epoch
    batches_before: int  # of the same pass over the data, before the epoch
    in_pass: bool  # whether the epoch goes on with a pass that has begun


class _ResumedEpochs(trainer.TFEpochIterator):  # type: ignore[misc]
    """Leaves out steps of an epoch that have been trained, if its data adapter knows of any."""

    def __iter__(self) -> Any:
        start = getattr(self.data_adapter, "start", None)
        if not isinstance(start, EpochStart):
            return super().__iter__()
        self.data_adapter.start = None
        if self.steps_per_epoch is not None and start.in_pass:
            self._current_iterator = iter(self._get_iterator())
            self._steps_seen = start.batches_before
        super().__iter__()
        steps: Any = getattr(self, "_epoch_iterator")  # noqa: B009
        left_out = start.steps // self.steps_per_execution
        self._epoch_iterator = itertools.islice(steps, left_out, None)
        return self


@contextlib.contextmanager
def starting_anywhere(model: Any) -> Iterator[None]:
    """Surrounds a `fit` that may begin with a later epoch and step; the next one is as ever."""
    try:
        with mock.patch.object(trainer, "TFEpochIterator", _ResumedEpochs):
            yield
    finally:
        model._initial_epoch = None


def start_epoch(model: Any, epoch: int) -> None:
    """Lets `fit`, which has begun, go on with another epoch."""
    model._initial_epoch = epoch


# What callbacks of Keras remember from epoch to epoch, besides weights.
_REMEMBERED = {
    keras.callbacks.EarlyStopping: ("wait", "stopped_epoch", "best", "best_epoch"),
    keras.callbacks.ReduceLROnPlateau: ("wait", "cooldown_counter", "best"),
    keras.callbacks.ModelCheckpoint: (
        "best", "_batches_seen_since_last_saving", "_last_batch_seen", "_current_epoch",
    ),
    keras.callbacks.SwapEMAWeights: ("_ema_weights_in_model",),
}  # fmt: skip


def remembers(callback: Any) -> bool:
    """Whether a callback has a state that can be kept: one of Keras, or with methods for it."""
    return _has_methods(callback) or isinstance(callback, tuple(_REMEMBERED))


def state_of(callback: Any) -> Any:
    """What a callback that remembers must be given back to go on."""
    names = _names_of_keras(callback)
    of_keras = {name: _number(getattr(callback, name, None)) for name in names}
    if not _has_methods(callback):
        return of_keras
    own = callback.state_dict()
    return {"of_keras": of_keras, "own": own} if names else own


def remind(callback: Any, state: Any) -> None:
    """Gives a callback back what `state_of` has found."""
    names = _names_of_keras(callback)
    if _has_methods(callback):
        of_keras, own = (state["of_keras"], state["own"]) if names else ({}, state)
    else:
        of_keras, own = state, None
    for name, value in of_keras.items():
        setattr(callback, name, value)
    if _has_methods(callback):
        callback.load_state_dict(own)


def _has_methods(callback: Any) -> bool:
    return hasattr(callback, "state_dict") and hasattr(callback, "load_state_dict")


def _names_of_keras(callback: Any) -> tuple[str, ...]:
    """What a callback remembers as one of Keras, or as one derived from it."""
    return next((names for kind, names in _REMEMBERED.items() if isinstance(callback, kind)), ())


def make_its_folder(checkpoint: Any) -> None:
    """Has a `ModelCheckpoint` find its folder, as Keras fails where another rank is quicker."""
    path_of = type(checkpoint)._get_file_path

    def path(*given: Any) -> str:
        found: str = path_of(checkpoint, *given)
        Path(found).parent.mkdir(parents=True, exist_ok=True)
        return found

    checkpoint._get_file_path = path


# The hooks of a user's subclass may change logs or rates, or call what takes all ranks. So they run
# everywhere, and what they call by `super()` writes on one rank: elsewhere a class without hooks
# comes between the two, in the order in which Python looks for methods.
def keep_quiet(callback: Any, kind: type) -> None:
    """Leaves out what a callback does as one of a kind of Keras'."""
    if not hasattr(callback, "_is_quiet"):  # since an earlier `fit`
        become(callback, type(callback), _quiet(kind))


@functools.cache
def _quiet(kind: type) -> type:
    base = keras.callbacks.Callback
    names = [name for name in dir(base) if name.startswith("on_") or name == "set_model"]
    hooks = {name: getattr(base, name) for name in names}
    nowhere = property(lambda _: tf.summary.create_noop_writer())
    writers = dict.fromkeys(("_train_writer", "_val_writer"), nowhere)
    return type(kind.__name__, (kind,), hooks | writers | {"_is_quiet": True})


def has_stopped(callback: Any) -> bool:
    """Whether a callback is an `EarlyStopping` that has lost its patience."""
    stops = isinstance(callback, keras.callbacks.EarlyStopping)
    return stops and callback.stopped_epoch > 0 and callback.wait >= callback.patience


def _number(value: Any) -> Any:
    return value if value is None or isinstance(value, (bool, int)) else float(value)
