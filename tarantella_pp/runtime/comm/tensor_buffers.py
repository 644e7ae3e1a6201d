"""TensorFlow tensors as NumPy buffers and back, without copies where TensorFlow allows it."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Sequence
from typing import Any

import ml_dtypes
import numpy as np
import tensorflow as tf

from tarantella_pp.runtime.comm.buffers import ALIGNMENT

# What TensorFlow's DLPack import takes; everything else is copied.
_DLPACK = {
    np.dtype(name)
    for name in (
        *("float16", "float32", "float64", "int8", "int16", "int32", "int64"),
        *("uint8", "uint16", "uint32", "uint64"),
    )
}

_from_dlpack = tf.experimental.dlpack.from_dlpack
cast = tf.cast  # for who takes this module as its way to convert


def to_buffer(tensor: tf.Tensor) -> np.ndarray[Any, Any]:
    """A NumPy array on the memory of an eager tensor, for sending; `tensor.numpy()` copies."""
    # Everything here runs after a computation that has pushed it out of the caches: what looks
    # like a few microseconds of Python is ten times as much.
    try:
        return np.asarray(memoryview(tensor))
    except (BufferError, TypeError, ValueError):  # on a GPU, or a dtype without a buffer
        if tensor.dtype == tf.bfloat16:
            return to_buffer(tf.bitcast(tensor, tf.uint16)).view(ml_dtypes.bfloat16)
        return np.asarray(tensor.numpy())


def to_tensor(array: np.ndarray[Any, Any]) -> tf.Tensor:
    """An eager tensor on the memory of a NumPy array, for what was received."""
    if array.dtype in _DLPACK and array.size:
        flags, begin = array.flags, array.__array_interface__["data"][0]
        if begin % ALIGNMENT == 0 and flags.c_contiguous and flags.writeable:
            return _from_dlpack(array.__dlpack__())
    if array.dtype == ml_dtypes.bfloat16:
        return tf.bitcast(to_tensor(array.view(np.uint16)), tf.bfloat16)
    return tf.convert_to_tensor(array)


def variable_dtype(variable: Any) -> np.dtype[Any]:
    """Returns the NumPy dtype of a Keras or TensorFlow variable, or of a tensor."""
    found: np.dtype[Any] = np.dtype(tf.as_dtype(variable.dtype).as_numpy_dtype)
    return found


def variable_bytes(variable: Any) -> int:
    """Returns the size in bytes of a Keras or TensorFlow variable."""
    return int(math.prod(tuple(variable.shape))) * variable_dtype(variable).itemsize


def value_of(variable: Any) -> np.ndarray[Any, Any]:
    """Returns a copy of a variable's value; a scalar's is an array, too."""
    return np.asarray(variable.numpy())  # which has copied it


def buffer_of(variable: Any) -> np.ndarray[Any, Any]:
    """Returns an array on the memory of a variable's value, for sending."""
    return to_buffer(tf.convert_to_tensor(variable))


@contextlib.contextmanager
def values_kept(variables: Sequence[Any]) -> Iterator[list[np.ndarray[Any, Any]]]:
    """Gives the values of variables, and gives them back in the end, whatever happens to them."""
    values = list(map(value_of, variables))
    try:
        yield values
    finally:
        for variable, value in zip(variables, values, strict=True):
            variable.assign(value)
