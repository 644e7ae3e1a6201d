"""Tensors travel as arrays on the same memory."""

from __future__ import annotations

import pytest
import tensorflow as tf

from tarantella_pp.runtime.comm.tensor_buffers import to_buffer, to_tensor

pytestmark = pytest.mark.keras


@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16", "float16", "int32", "bool"])
def test_tensors_and_buffers_share_memory_or_are_equal(dtype):
    tensor = tf.cast(tf.reshape(tf.range(24), (2, 3, 4)), dtype)
    buffer = to_buffer(tensor)
    assert buffer.shape == (2, 3, 4)
    assert buffer.dtype == tensor.dtype.as_numpy_dtype
    back = to_tensor(buffer.copy())
    assert back.dtype == tensor.dtype
    assert bool(tf.reduce_all(back == tensor))
    empty = to_tensor(to_buffer(tensor[:0]))
    assert empty.shape == (0, 3, 4)
