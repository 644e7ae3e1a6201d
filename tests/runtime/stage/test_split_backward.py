"""Tensors kept in TensorFlow, sums of gradients, micro-batches and structures."""

from __future__ import annotations

import keras
import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given
from hypothesis import strategies as st

from tarantella_pp.errors import UnsupportedModelError
from tarantella_pp.runtime.comm.tensor_buffers import to_buffer, to_tensor
from tarantella_pp.runtime.data.batch import (
    describe,
    rebuild,
    tensors_in,
)
from tarantella_pp.runtime.stage.split_backward import ActivationStash
from tarantella_pp.runtime.stage.stage_module import GradientAccumulator
from tarantella_pp.runtime.weights.process_groups import micro_batch_sizes

pytestmark = pytest.mark.keras


def key(number):
    return tf.constant(number, tf.int64)


def test_a_store_keeps_tensors_by_key():
    like = [tf.zeros((2,)), tf.zeros((), tf.int32), tf.zeros((3,), tf.bool)]
    store, other = ActivationStash(like), ActivationStash(like)
    for number in (3, 1):
        store.put(key(number), [tf.fill((2,), float(number)), tf.constant(number), [True] * 3])
    other.put(key(1), [tf.zeros((2,)), tf.constant(7), [False] * 3])
    assert store.peek(key(1))[1].numpy() == 1
    assert store.take(key(1))[0].numpy().tolist() == [1, 1]
    assert store.take(key(3))[1].numpy() == 3
    assert other.take(key(1))[1].numpy() == 7
    store.put(key(5), [tf.zeros((2,)), tf.constant(5), [True] * 3])
    store.clear()
    store.put(key(5), [tf.ones((2,)), tf.constant(6), [True] * 3])
    assert store.take(key(5))[1].numpy() == 6


def test_a_store_of_nothing_does_nothing():
    store = ActivationStash([])
    store.put(key(0), [])
    assert store.take(key(0)) == []
    store.clear()


def test_sums_of_dense_sparse_and_missing_gradients():
    shapes = ((2,), (4, 2), (3,))
    sums = GradientAccumulator([keras.Variable(np.zeros(shape, "float32")) for shape in shapes])
    for step in (1.0, 2.0):
        sparse = tf.IndexedSlices(
            tf.fill((3, 2), step), tf.constant([0, 3, 0]), tf.constant([4, 2])
        )
        gradients = [tf.fill((2,), step), sparse, None]
        sums.prepare(gradients)
        sums.add_dense(gradients, sums.begin())
        sums.collect(sums.slices_of(gradients))
    collected = sums.take_collected()
    assert sums.gradient(0, collected).numpy().tolist() == [3, 3]
    slices = sums.gradient(1, collected)
    assert slices.indices.numpy().tolist() == [0, 3, 0, 0, 3, 0]
    assert slices.values.numpy()[:, 0].tolist() == [1, 1, 1, 2, 2, 2]
    assert sums.gradient(2, collected) is None
    sums.reached = [False, True, True]
    assert sums.gradient(0, collected) is None
    sums.reset()
    assert sums.take_collected() == {}
    sums.reached[0] = True
    sums.add_dense([tf.fill((2,), 5.0), None, None], sums.begin())
    assert sums.gradient(0, {}).numpy().tolist() == [5, 5]
    assert not sums.begin()


@given(st.integers(0, 200), st.integers(1, 64))
def test_micro_batches_share_the_rows_evenly(rows, count):
    sizes = micro_batch_sizes(rows, count)
    assert sum(sizes) == rows
    assert len(sizes) == max(1, min(rows, count))
    assert max(sizes) - min(sizes) <= 1
    assert list(sizes) == sorted(sizes, reverse=True)


LEAVES = st.sampled_from([None, np.zeros((2, 3), "float32"), np.zeros((2,), "int64")])
NESTS = st.recursive(
    LEAVES,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.tuples(inner, inner),
        st.dictionaries(st.text(max_size=3), inner, max_size=3),
    ),
    max_leaves=6,
)


@given(NESTS)
def test_structures_are_rebuilt(value):
    description, leaves = describe(value)
    assert len(tensors_in(description)) == len(leaves)
    again, others = describe(rebuild(description, leaves))
    assert again == description
    assert all(a is b for a, b in zip(leaves, others, strict=True))


def test_what_cannot_travel_is_refused():
    for value in (3, "text", np.float32(1), [np.zeros((2,)), 5]):
        with pytest.raises(UnsupportedModelError, match="batch dimension"):
            describe(value)


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
