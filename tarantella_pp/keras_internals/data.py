"""The private names of Keras that reading data needs, all in this one file.

`tests/keras_internals/test_data.py` says which of them a new version of Keras has changed.
"""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
from keras.src.trainers.data_adapters import get_data_adapter
from keras.src.trainers.data_adapters.array_data_adapter import ArrayDataAdapter, can_convert_arrays
from keras.src.trainers.data_adapters.array_slicing import (
    convert_to_sliceable,
    train_validation_split,
)
from keras.src.trainers.data_adapters.data_adapter import DataAdapter
from keras.src.trainers.data_adapters.py_dataset_adapter import PyDatasetAdapter
from keras.src.trainers.data_adapters.tf_dataset_adapter import TFDatasetAdapter

__all__ = [
    "DataAdapter",
    "are_arrays",
    "arrays_of",
    "as_sliced",
    "batch_size_of",
    "caches",
    "dataset_of",
    "get_data_adapter",
    "is_shuffled",
    "order_of",
    "train_validation_split",
]


def are_arrays(data: Any) -> bool:
    """Whether Keras takes `(x, y, sample_weight)` for arrays."""
    return bool(can_convert_arrays(data))


def arrays_of(adapter: DataAdapter) -> Any:
    """The arrays that an adapter slices, structured like a batch; `None` of another adapter."""
    return adapter._inputs if isinstance(adapter, ArrayDataAdapter) else None


def as_sliced(arrays: Any) -> Any:
    """Arrays in the types in which Keras slices them: its own floats, tuples for lists."""
    return keras.tree.lists_to_tuples(convert_to_sliceable(arrays, target_backend="tensorflow"))


def order_of(adapter: Any) -> DataAdapter:
    """An adapter that gives the numbers of the samples of each batch instead of the samples.

    It draws them as the adapter of the arrays would, from the same seed.
    """
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
