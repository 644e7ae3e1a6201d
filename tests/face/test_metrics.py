"""Metrics of all kinds log, and hold, what they do in plain Keras, on every rank."""

from __future__ import annotations

import keras
import numpy as np
import pytest
from keras import layers, ops

from tests.training import (
    BATCH,
    LABELS,
    WEIGHTED,
    Case,
    X,
    adamw,
    distance,
    make,
    mlp,
)

pytestmark = pytest.mark.keras

ROUNDING = 1e-10
ONE_HOT = np.eye(3)[LABELS]


def classifier():
    return keras.Sequential([mlp(), layers.Softmax()])


def largest_error(y, p):
    """Couples the samples of a batch."""
    return ops.max(ops.abs(y - p)) * ops.ones_like(p[:, 0])


def share_of_first(y, p):
    """A number for the whole batch, of which Keras takes the mean over batches."""
    return ops.mean(ops.cast(ops.argmax(p, axis=-1) == 0, p.dtype))


class Extremes(keras.metrics.Metric):
    """Its result is a dict, with an array in it."""

    def __init__(self, name="extremes"):
        super().__init__(name=name)
        self.most = self.add_weight(shape=(3,), initializer="zeros")

    def update_state(self, y, p, sample_weight=None):
        self.most.assign(ops.maximum(self.most, ops.max(ops.abs(y - p), axis=0)))

    def result(self):
        return {"worst": ops.max(self.most), "each": self.most + 0.0}


VECTORS = {
    "f1 of each class": lambda: keras.metrics.F1Score(average=None, name="m"),
    "f1": lambda: keras.metrics.F1Score(name="m"),
    "several thresholds": lambda: keras.metrics.Precision(thresholds=[0.2, 0.5], name="m"),
    "one threshold in a list": lambda: keras.metrics.Recall(thresholds=[0.4], name="m"),
    "r2 of each output": lambda: keras.metrics.R2Score(class_aggregation=None, name="m"),
    "dict": Extremes,
}
KINDS = {
    "vectors": [kind for name, kind in VECTORS.items() if name != "f1"],
    "additive": [lambda: "accuracy", lambda: keras.metrics.AUC(name="auc")],
    "of the whole batch": [lambda: largest_error, lambda: share_of_first, lambda: "accuracy"],
}


def case(kinds):
    compiled = {"loss": "categorical_crossentropy"}
    return Case(
        classifier,
        X,
        ONE_HOT,
        lambda: {
            **compiled,
            "optimizer": adamw(),
            "metrics": [_named(kind(), i) for i, kind in enumerate(kinds)],
            "weighted_metrics": ["mae"],
        },
    )


def _named(metric, number):
    if isinstance(metric, keras.metrics.Metric):
        metric.name = f"{metric.name}_{number}"
    return metric


def used(model):
    """What a model logs and returns, and what its metrics hold in the end."""
    quiet = {"batch_size": BATCH, "verbose": 0, **WEIGHTED}
    validation = (X[:9], ONE_HOT[:9])
    told = model.fit(X, ONE_HOT, epochs=2, shuffle=False, validation_data=validation, **quiet)
    listed = model.evaluate(X, ONE_HOT, **quiet)
    named = model.evaluate(X, ONE_HOT, return_dict=True, **quiet)
    results = [_plain(metric.result()) for metric in model.metrics]
    model.reset_metrics()
    batch = model.train_on_batch(X[:7], ONE_HOT[:7], return_dict=True)
    after = [_plain(metric.result()) for metric in model.metrics]
    kinds = {
        name: [type(value).__name__, str(getattr(value, "dtype", ""))]
        for name, (value, *_) in told.history.items()
    }
    numbers = [told.history, listed, named, results, batch, after]
    return {"kinds": kinds, "numbers": keras.tree.map_structure(_plain, numbers)}


def _plain(value):
    if isinstance(value, dict):
        return {name: _plain(item) for name, item in value.items()}
    return np.asarray(value).tolist()


@pytest.mark.parametrize("kind", KINDS)
def test_logs_are_those_of_keras(kind):
    one = case(KINDS[kind])
    plain, pipeline = used(make(one)), used(make(one, num_stages=2, num_micro_batches=3))
    assert plain["kinds"] == pipeline["kinds"]
    assert distance(plain["numbers"], pipeline["numbers"]) < ROUNDING
