"""Which operations on sums over samples are linear, read off a traced graph."""

import keras
import pytest
import tensorflow as tf
from keras import ops

from tarantella_pp.runtime.probes.linearity import following, nonlinear

pytestmark = pytest.mark.keras


def found(make, *shape):
    """Of each result the operation that is not linear in a sum over samples; `None` if all are."""
    signature = [tf.TensorSpec([None, *shape], "float64")]
    graph = tf.function(make, signature, autograph=False).get_concrete_function()
    follows = following(graph.graph, graph.inputs)
    return [nonlinear([output], follows) for output in graph.outputs]


def through_a_convolution(total):
    kernel = tf.ones((3, 3, 2, 2), "float64")
    weight = tf.ones((1, 4, 4, 2), "float64")
    made = tf.nn.conv2d(weight, kernel, 1, "SAME")
    return tf.gradients(made, weight, total[tf.newaxis])[0]


@pytest.mark.parametrize(
    ("make", "kind"),
    [
        (lambda total: 2.0 * ops.transpose(total) / 3.0, None),
        (lambda total: tf.linalg.diag(total)[..., :2] - ops.mean(total), None),
        (lambda total: tf.signal.fft(tf.cast(total, "complex128")), None),
        (through_a_convolution, None),
        (lambda total: ops.maximum(total, 1.0), "Maximum"),
        (lambda total: total / (1.0 + ops.sum(total)), "RealDiv"),
        (lambda total: keras.ops.sqrt(total), "Sqrt"),
        (lambda total: total * total, "Mul"),
        (lambda total: tf.where(tf.reduce_any(total > 9), total, 2 * total), "Greater"),
        (lambda total: tf.cond(total[0, 0, 0] > 9, lambda: total, lambda: -total), "Greater"),
        (tf.function(lambda total: tf.minimum(total, 9.0)), "PartitionedCall"),
    ],
)
def test_what_is_not_linear_is_found(make, kind):
    (operation,) = found(lambda x: make(tf.reduce_sum(x, 0)), 4, 4, 2)
    assert (operation and operation.type) == kind


@pytest.mark.parametrize("make", [tf.reduce_max, lambda x: tf.cast(tf.reduce_any(x > 9), x.dtype)])
def test_what_samples_decide_together_is_no_sum(make):
    assert found(lambda x: tf.reduce_mean(x) + make(x), 2) != [None]


def scattered(x, kept):
    shape = tf.shape(x, out_type=tf.int64)
    return tf.reduce_mean(tf.scatter_nd(tf.where(kept), tf.boolean_mask(x, kept), shape))


@pytest.mark.parametrize(
    ("make", "linear"),
    [
        (lambda x, kept: tf.reduce_mean(x[kept]), False),
        (
            lambda x, kept: tf.reduce_mean(tf.dynamic_partition(x, tf.cast(kept, tf.int32), 2)[1]),
            False,
        ),
        (lambda x, kept: ops.mean(ops.take(x, ops.nonzero(kept)[0], axis=0)), False),
        (lambda x, kept: tf.reduce_mean(x[: tf.math.count_nonzero(kept)]), False),
        (lambda x, kept: tf.reduce_mean(tf.function(tf.boolean_mask)(x, kept)), False),
        (lambda x, kept: tf.reduce_sum(x[kept]), True),
        (lambda x, kept: tf.cast(tf.size(x[kept]), x.dtype), True),
        (scattered, True),
    ],
)
def test_how_many_samples_there_are_may_follow_from_them(make, linear):
    def value_and_gradient(x):
        weight = tf.ones((), x.dtype)
        value = make(weight * x, x < 100.0)
        return value, tf.gradients(value, weight, unconnected_gradients="zero")

    assert {operation is None for operation in found(value_and_gradient)} == {linear}
