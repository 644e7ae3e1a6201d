"""Gradients of a weight that several stages use, added up as in one process."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

from tarantella_pp.runtime.weights.slices import total

pytestmark = pytest.mark.keras


def rows(dtype, *indices):
    values = tf.ones((len(indices), 2))
    return tf.IndexedSlices(values, tf.constant(indices, dtype), tf.constant([5, 2]))


def test_rows_looked_up_here_and_elsewhere_are_put_one_behind_the_other():
    """Those of other ranks have indices of 64 bits, whatever the model looks up with."""
    found = total([rows(tf.int32, 1, 3), None, rows(tf.int64, 3)])
    assert found.indices.numpy().tolist() == [1, 3, 3]
    np.testing.assert_array_equal(tf.convert_to_tensor(found).numpy()[:, 0], [0, 1, 0, 2, 0])


def test_rows_and_a_whole_gradient_are_added_up():
    found = total([rows(tf.int32, 1), tf.ones((5, 2))])
    np.testing.assert_array_equal(found.numpy()[:, 0], [1, 2, 1, 1, 1])
    assert total([None, None]) is None
