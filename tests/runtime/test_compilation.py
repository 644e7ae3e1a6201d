"""Which metrics may be updated micro-batch by micro-batch is tried, and tried right."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import ops

from tarantella_pp.internals import training
from tarantella_pp.internals.functional import get_mask, set_mask
from tarantella_pp.runtime.probes.compilation_probe import why_not_by_parts
from tests.exactness import metrics as of_keras

pytestmark = pytest.mark.keras


def compiled(metrics, y):
    """What Keras compiles of metrics for targets like these and three outputs."""
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(3)])
    model.compile(None, "mse", metrics=metrics)
    symbol = keras.KerasTensor((None, *y.shape[1:]), str(y.dtype))
    training.build_metrics(model, symbol, keras.KerasTensor((None, 3)), None)
    return training.compiled_metrics(model)


def tried(metrics, y):
    built = compiled(metrics, y)
    spec = tf.TensorSpec([None, 3], "float32")
    pack = lambda results: results[0]  # noqa: E731
    before = [v.numpy() for v in built.variables]
    reason = why_not_by_parts(built, pack, tf.constant(y), [spec], None)
    assert all(map(np.array_equal, before, [v.numpy() for v in built.variables]))
    return reason


Y = np.random.default_rng(0).integers(0, 2, (6, 3)).astype("float32")
LABELS = np.array([0, 2, 1, 1, 0, 2])
KINDS = of_keras.kinds()


@pytest.mark.parametrize("sparse", [pytest.param(False, marks=pytest.mark.slow), True])
def test_metrics_of_keras_are_additive(sparse):
    of_classes = {name: {"num_classes": 3, "sparse_y_pred": False} for name in ("MeanIoU", "IoU")}
    names = [n for n in KINDS if ("Sparse" in n or n in of_classes) == sparse]
    made = {n: KINDS[n](**of_classes.get(n, {})) for n in names if n not in ("Mean", "Sum")}
    odd = made.pop("PearsonCorrelation", None)  # no number where targets of a sample are the same
    y = LABELS if sparse else Y
    assert tried(list(made.values()), y) is None
    assert odd is None or "is no number" in tried([odd], y)


def scalar(y, p):
    return ops.mean(ops.square(y - p))


def by_largest(y, p):
    error = ops.mean(ops.abs(y - p), axis=-1)
    return error / ops.max(error)


def by_share_of_zeros(y, p):
    """Additive wherever no target is zero."""
    valid = ops.cast(ops.any(y != 0, axis=-1), p.dtype)
    return ops.mean(ops.abs(y - p), axis=-1) / ops.mean(valid)


class Smoothed(keras.metrics.Mean):
    """A moving average over batches."""

    def update_state(self, y, p, sample_weight=None):
        self.total.assign(0.9 * self.total + 0.1 * scalar(y, p))
        self.count.assign(1.0)


class Capped(keras.metrics.Mean):
    """Counts what a batch adds up to a bound that is not reached by a few samples."""

    def update_state(self, y, p, sample_weight=None):
        self.total.assign_add(ops.minimum(ops.sum(ops.abs(y - p)), 1e4))


def with_a_rare_sum(y, p):
    return ops.mean(ops.abs(y - p), axis=-1) + ops.sum(ops.relu(p - 20.0))


class Noisy(keras.metrics.Mean):
    def update_state(self, y, p, sample_weight=None):
        super().update_state(tf.random.uniform([]) * 0.0)


class Elsewhere(keras.metrics.Mean):
    """Counts in a variable of which Keras knows nothing."""

    seen = tf.Variable(0.0)

    def update_state(self, y, p, sample_weight=None):
        self.seen.assign_add(1.0)


@pytest.mark.parametrize(
    "metric",
    [scalar, by_largest, by_share_of_zeros, Smoothed(name="scalar"), Capped(), with_a_rare_sum],
)
def test_metrics_that_look_at_several_samples_are_found(metric):
    assert "looks at several samples" in tried(["mae", metric], Y + 1.0)


@pytest.mark.parametrize("metric", [Noisy(), Elsewhere()])
def test_what_does_more_than_change_its_variables_is_not_even_tried(metric):
    assert "does more" in tried([metric], Y)
    assert float(Elsewhere.seen) == 0.0


def test_what_cannot_be_tried_keeps_its_outputs():
    strings = tf.constant(["a", "b", "c"])
    built = compiled(["mae"], Y)
    reason = why_not_by_parts(built, lambda r: r[0], strings, [tf.TensorSpec([None, 3])], None)
    assert "cannot be tried" in reason


def test_masks_of_outputs_are_tried():
    class Masked(keras.metrics.Mean):
        def update_state(self, y, p, sample_weight=None):
            mask = ops.cast(get_mask(p), "float32")
            self.total.assign_add(ops.sum(mask * y[:, 0]) / (1.0 + ops.sum(mask)))

    def pack(results):
        value = tf.identity(results[0])
        set_mask(value, results[1] if len(results) > 1 else tf.ones([3], tf.bool))
        return value

    specs = [tf.TensorSpec([None, 3], "float32"), tf.TensorSpec([None], "bool")]
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(3)])
    model.compile(None, "mse", metrics=[Masked()])
    built = training.compiled_metrics(model)
    built.build(keras.KerasTensor((None, 3)), keras.KerasTensor((None, 3)))
    reason = why_not_by_parts(built, pack, tf.constant(Y), specs, None)
    assert "looks at several samples" in reason
