"""TensorFlow tensors as NumPy buffers and back, without copies where TensorFlow allows it."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import tensorflow as tf

# What TensorFlow's DLPack import takes; everything else is copied.
_DLPACK = {
    np.dtype(name)
    for name in (
        *("float16", "float32", "float64", "int8", "int16", "int32", "int64"),
        *("uint8", "uint16", "uint32", "uint64"),
    )
}


def to_buffer(tensor: tf.Tensor) -> np.ndarray[Any, Any]:
    """A NumPy array on the memory of an eager tensor, for sending.

    `tensor.numpy()` copies; this does not, on the CPU. The array keeps the tensor alive.

    Args:
        tensor: An eager tensor of numbers.

    Returns:
        An array not to be written to.
    """
    if tensor.dtype == tf.bfloat16:
        return to_buffer(tf.bitcast(tensor, tf.uint16)).view(ml_dtypes.bfloat16)
    try:
        return np.asarray(memoryview(tensor))
    except (BufferError, TypeError, ValueError):  # on a GPU, or a dtype without a buffer
        return np.asarray(tensor.numpy())


def to_tensor(array: np.ndarray[Any, Any]) -> tf.Tensor:
    """An eager tensor on the memory of a NumPy array, for what was received.

    Args:
        array: Freshly received, 64-byte aligned, not written to afterwards.

    Returns:
        The tensor; it keeps the memory alive.
    """
    if array.dtype == ml_dtypes.bfloat16:
        return tf.bitcast(to_tensor(array.view(np.uint16)), tf.bfloat16)
    aligned = array.ctypes.data % 64 == 0 and array.flags.c_contiguous and array.size > 0
    if aligned and array.dtype in _DLPACK and array.flags.writeable:
        return tf.experimental.dlpack.from_dlpack(array.__dlpack__())
    return tf.convert_to_tensor(array)


def cast(tensor: tf.Tensor, dtype: np.dtype[Any]) -> tf.Tensor:
    """Returns a tensor in another dtype.

    Args:
        tensor: An eager tensor of numbers.
        dtype: The dtype; that of the tensor leaves it as it is.
    """
    return tf.cast(tensor, dtype)
