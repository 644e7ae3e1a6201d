"""All metrics of Keras, compiled with and without sample weights, and inside a layer."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np
from keras import layers, metrics, ops

from tests.exactness import trials
from tests.exactness.trials import ROUNDING, Part, Trial, arguments_of, classes_in, steps
from tests.helpers.training import SAMPLES, WEIGHTED, Case, floats, integers, sgd
from tests.zoo.models import chain

NOT_TRIED = {"Metric": "the base class of all metrics"}

Make = Callable[[], metrics.Metric]

CLASSES, CROSSENTROPY = 3, "categorical_crossentropy"
X = floats(5)
LABELS = integers(CLASSES, seed=1)
ONE_HOT = np.eye(CLASSES)[LABELS]
BINARY = integers(2, 1, seed=2)
POSITIVE = np.random.default_rng(3).uniform(0.2, 2, size=(SAMPLES, CLASSES))

# What metrics cannot do without, by the name of the argument.
ARGUMENTS: dict[str, Callable[[], Any]] = {
    "num_classes": lambda: 2,
    "target_class_ids": lambda: [0],
    "fn": lambda: keras.losses.mean_squared_error,
    **dict.fromkeys(("precision", "recall", "sensitivity", "specificity"), lambda: 0.5),
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
    def __init__(self, metric: keras.metrics.Metric):
        super().__init__()
        self.metric = metric
        self.metric.name = type(metric).__name__  # a name of its own counts the metrics made before

    def call(self, x):
        if type(self.metric).__name__ in ("Mean", "Sum"):
            self.metric.update_state(x)
        else:
            self.metric.update_state(ops.tanh(x), x)
        return x


def model_of(
    units: int, activation: str, dtype: str | None = None, watched: Sequence[Make] = ()
) -> keras.Model:
    sees = [Watched(make()) for make in watched]
    first, hidden = layers.Dense(CLASSES, activation="sigmoid"), layers.Dense(4, activation="tanh")
    return chain((5,), first, *sees, hidden, layers.Dense(units, activation, dtype=dtype))


MODELS = {
    "categorical": (CLASSES, "softmax"),
    "single": (1, "sigmoid"),
    "narrow": (CLASSES, "softmax", "float32"),
}
TARGETS = {"labels": LABELS, "one hot": ONE_HOT, "binary": BINARY, "positive": POSITIVE}
IN_LAYERS = ("Mean", "Sum", "RootMeanSquaredError", "BinaryAccuracy", "CosineSimilarity", "AUC")


def kinds() -> dict[str, Make]:
    """All metrics that Keras has, and some with other arguments than the default ones."""
    return {
        name: functools.partial(kind, **arguments_of(kind, ARGUMENTS))
        for name, kind in classes_in(metrics, NOT_TRIED).items()
    } | VARIANTS


def data_of(name: str) -> tuple[str, str, str]:
    """What a metric is tried with: a model, targets and a loss that understands them."""
    if "TopK" in name:  # TensorFlow ranks no float64
        sparse = name.startswith("Sparse")
        return "narrow", "labels" if sparse else "one hot", ("sparse_" * sparse) + CROSSENTROPY
    if name in ("IoU", "MeanIoU", "BinaryIoU", "Accuracy"):
        return "single", "binary", "mse"
    if name.startswith("Sparse"):
        return "categorical", "labels", "sparse_" + CROSSENTROPY
    if name.startswith(("Mean", "Root", "R2", "LogCosh", "Poisson", "Concordance", "Pearson")):
        return "categorical", "positive", "mse"
    return "categorical", "one hot", "mse"


def parts() -> list[Part]:
    """Each metric, compiled, and some in a layer of the first stage."""
    made = kinds()
    compiled = [Part(name, make, (False, *data_of(name))) for name, make in made.items()]
    inside = (True, "categorical", "one hot", "mse")
    return compiled + [Part(f"{name} in a layer", made[name], inside) for name in IN_LAYERS]


def trial(parts: Sequence[Part]) -> Trial:
    """Metrics with and without sample weights, under names that do not count; or in layers."""
    makers: list[Make] = [part.value for part in parts]
    inside, model, targets, loss = parts[0].family

    def compiled() -> dict[str, Any]:
        options = {"optimizer": sgd(), "loss": loss}
        return options if inside else options | {
            "metrics": named("plain"), "weighted_metrics": named("weighted")
        }  # fmt: skip

    def named(prefix: str) -> list[metrics.Metric]:
        found = [make() for make in makers]
        for i, metric in enumerate(found):
            metric.name = f"{prefix}_{i}"
        return found

    build = functools.partial(model_of, *MODELS[model], watched=makers if inside else ())
    limit = 1e-5 if model == "narrow" else ROUNDING
    run = functools.partial(steps, rows=trials.UNEVENLY if inside else trials.EVENLY)
    return Trial(Case(build, X, TARGETS[targets], compiled, WEIGHTED), run, limit=limit)
