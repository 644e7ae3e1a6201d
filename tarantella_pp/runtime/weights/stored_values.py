"""Large values of a file, read into the memory that a variable then has, with no copy."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
import tensorflow as tf

from tarantella_pp.internals.model_files import goes_in_pieces
from tarantella_pp.runtime.weights.value_stream import give_back


class StoredArray(np.ndarray[Any, Any]):
    """An array on the memory of a tensor, which TensorFlow takes instead of a copy.

    What NumPy makes of it, a slice for example, is an array as any other.
    """

    _tensor: tf.Tensor | None = None

    def __tf_tensor__(self, dtype: Any = None, name: str | None = None) -> tf.Tensor:
        """Returns the tensor; of another dtype, or for what was made of the array, a copy."""
        if self._tensor is not None and dtype in (None, self._tensor.dtype):
            return self._tensor
        return tf.convert_to_tensor(self.view(np.ndarray), dtype)


def array_of(dataset: Any) -> StoredArray | None:
    """Reads a large value; returns `None` for a small one, or of a dtype that is not a number's."""
    dtype = np.dtype(dataset.dtype)
    if not goes_in_pieces(dataset.shape, dtype) or not dtype.isnative:
        return None
    size = dataset.size * dtype.itemsize
    give_back(size)  # what the value before it has replaced
    with tf.device("CPU:0"):
        tensor = tf.raw_ops.Empty(shape=dataset.shape, dtype=tf.as_dtype(dtype))
    begin = np.asarray(memoryview(tensor)).ctypes.data
    # Nobody else has the tensor yet, so that it may be written to.
    buffer: Any = (ctypes.c_char * size).from_address(begin)
    buffer.tensor = tensor  # lives as long as any view of its memory
    memory = np.frombuffer(buffer, dtype).reshape(dataset.shape)
    dataset.read_direct(memory)
    array = memory.view(StoredArray)
    array._tensor = tensor
    return array
