"""All metrics of Keras, compiled with and without sample weights, and inside a layer."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
from keras import layers, metrics, ops

from tests.exactness.classes import arguments_of, classes_in
from tests.exactness.trials import ROUNDING, Trial
from tests.helpers.training import SAMPLES, Case, floats, integers, sgd

NOT_TRIED = {"Metric": "the base class of all metrics"}

CLASSES, CROSSENTROPY = 3, "categorical_crossentropy"
X = floats(5)
LABELS = integers(CLASSES, seed=1)
ONE_HOT = np.eye(CLASSES)[LABELS]
BINARY = integers(2, 1, seed=2)
POSITIVE = np.random.default_rng(3).uniform(0.2, 2, size=(SAMPLES, CLASSES))
WEIGHTS = {"sample_weight": np.random.default_rng(4).uniform(0.2, 2, size=SAMPLES)}

# What metrics cannot do without, by the name of the argument.
ARGUMENTS: dict[str, Callable[[], Any]] = {
    "num_classes": lambda: 2,
    "target_class_ids": lambda: [0],
    "fn": lambda: keras.losses.mean_squared_error,
    "recall": lambda: 0.5,
    "precision": lambda: 0.5,
    "specificity": lambda: 0.5,
    "sensitivity": lambda: 0.5,
}
VARIANTS = {
    "F1Score(average)": lambda: metrics.F1Score(average="macro"),
    "Precision(thresholds)": lambda: metrics.Precision(thresholds=[0.2, 0.5]),
    "R2Score(class_aggregation)": lambda: metrics.R2Score(class_aggregation=None),
    "AUC(multi_label)": lambda: metrics.AUC(multi_label=True, num_labels=CLASSES),
    "SparseCategoricalCrossentropy(ignore_class)": lambda: metrics.SparseCategoricalCrossentropy(
        ignore_class=1
    ),
}
"""Metrics with other results than one number, or that count other samples than all."""


class Watched(layers.Layer):
    """Shows what passes it to a metric."""

    def __init__(self, metric: keras.metrics.Metric):
        super().__init__()
        self.metric = metric
        self.metric.name = "watched"  # a name of its own counts the metrics made before

    def call(self, x):
        if type(self.metric).__name__ in ("Mean", "Sum"):
            self.metric.update_state(x)
        else:
            self.metric.update_state(ops.tanh(x), x)
        return x


def model_of(
    units: int, activation: str, dtype: str | None = None, watched: Callable[[], Any] | None = None
) -> keras.Model:
    """A small model, with a metric in a layer of it or without."""
    inputs = keras.Input((5,))
    x = layers.Dense(CLASSES, activation="sigmoid")(inputs)
    if watched is not None:
        x = Watched(watched())(x)
    x = layers.Dense(4, activation="tanh")(x)
    return keras.Model(inputs, layers.Dense(units, activation=activation, dtype=dtype)(x))


CATEGORICAL = functools.partial(model_of, CLASSES, "softmax")
SINGLE = functools.partial(model_of, 1, "sigmoid")
NARROW = functools.partial(model_of, CLASSES, "softmax", "float32")
IN_LAYERS = ("Mean", "Sum", "RootMeanSquaredError", "BinaryAccuracy", "CosineSimilarity", "AUC")


def kinds() -> dict[str, Callable[[], metrics.Metric]]:
    """All metrics that Keras has, and some with other arguments than the default ones."""
    return {
        name: functools.partial(kind, **arguments_of(kind, ARGUMENTS))
        for name, kind in classes_in(metrics, NOT_TRIED).items()
    } | VARIANTS


def data_of(name: str) -> tuple[Callable[[], keras.Model], Any, str]:
    """What a metric is tried with: a model, targets and a loss that understands them."""
    if "TopK" in name:  # TensorFlow ranks no float64
        sparse = name.startswith("Sparse")
        return NARROW, LABELS if sparse else ONE_HOT, ("sparse_" * sparse) + CROSSENTROPY
    if name in ("IoU", "MeanIoU", "BinaryIoU", "Accuracy"):
        return SINGLE, BINARY, "mse"
    if name.startswith("Sparse"):
        return CATEGORICAL, LABELS, "sparse_" + CROSSENTROPY
    if name.startswith(("Mean", "Root", "R2", "LogCosh", "Poisson", "Concordance", "Pearson")):
        return CATEGORICAL, POSITIVE, "mse"
    return CATEGORICAL, ONE_HOT, "mse"


def compiled(loss: str, make: Callable[[], metrics.Metric]) -> dict[str, Any]:
    """Compiles a metric with and without sample weights, under names that do not count."""
    plain, weighted = make(), make()
    plain.name, weighted.name = "plain", "weighted"
    options = {"metrics": [plain], "weighted_metrics": [weighted]}
    return {"optimizer": sgd(), "loss": loss, **options}


def trials() -> dict[str, Callable[[], Trial]]:
    """What makes trials of each metric, compiled, and of some in a layer of the first stage."""
    made = kinds()
    found = {name: functools.partial(_trial, name, make) for name, make in made.items()}
    for name in IN_LAYERS:
        title = f"{name} in a layer"
        found[title] = functools.partial(_trial_in_a_layer, title, made[name])
    return dict(found)


def _trial(name: str, make: Callable[[], metrics.Metric]) -> Trial:
    model, y, loss = data_of(name)
    case = Case(model, X, y, functools.partial(compiled, loss, make), WEIGHTS)
    return Trial(name, case, limit=1e-5 if model is NARROW else ROUNDING, again=True)


def _trial_in_a_layer(title: str, make: Callable[[], metrics.Metric]) -> Trial:
    inside = functools.partial(CATEGORICAL, watched=make)
    case = Case(inside, X, ONE_HOT, lambda: {"optimizer": sgd(), "loss": "mse"}, WEIGHTS)
    return Trial(title, case)
