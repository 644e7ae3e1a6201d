"""All losses of Keras, with all reductions, sample weights and masks."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
from keras import layers, losses, ops

from tests.exactness.classes import classes_in
from tests.exactness.trials import ROUNDING, Trial
from tests.helpers.draws import more_asked_for
from tests.helpers.training import (
    SAMPLES,
    Case,
    integers,
    sgd,
)

NOT_TRIED = {"Loss": "the base class of all losses"}

REDUCTIONS = ("sum_over_batch_size", "mean", "mean_with_sample_weight", "sum", "none")
TIMES, CLASSES = 4, 3

IDS = integers(5, TIMES, seed=1)
LABELS = integers(CLASSES, TIMES, seed=2)
ONE_HOT = np.eye(CLASSES)[LABELS]
POSITIVE = np.random.default_rng(3).uniform(0.2, 2, size=(SAMPLES, TIMES, CLASSES))
BY_SAMPLE = np.random.default_rng(4).uniform(0.2, 2, size=(SAMPLES, 1))
BY_ENTRY = np.random.default_rng(5).uniform(0.2, 2, size=(SAMPLES, TIMES))
# Whether outputs are masked, and the weights.
WAYS: dict[str, tuple[bool, Any]] = {
    "plain": (False, None),
    "weighted": (False, BY_SAMPLE),
    "masked": (True, None),
    "masked, weighted": (True, BY_ENTRY),
}


class OwnLoss(losses.MeanSquaredError):
    """Inherits from a loss of Keras, and looks at all samples at once."""

    def call(self, y_true, y_pred):
        error = super().call(y_true, y_pred)
        return error / ops.stop_gradient(ops.max(error))


VARIANTS = {
    "SparseCategoricalCrossentropy(ignore_class)": functools.partial(
        losses.SparseCategoricalCrossentropy, ignore_class=1
    ),
    "CategoricalCrossentropy(label_smoothing)": functools.partial(
        losses.CategoricalCrossentropy, label_smoothing=0.1
    ),
    "CategoricalCrossentropy(axis=0)": functools.partial(losses.CategoricalCrossentropy, axis=0),
    "CosineSimilarity(axis=0)": functools.partial(losses.CosineSimilarity, axis=0),
    "Dice(axis)": functools.partial(losses.Dice, axis=(1, 2)),
    "a subclass": OwnLoss,
}


def sequences(masked: bool) -> keras.Model:
    """A distribution at each step, masked where the id is 0."""
    ids = keras.Input((TIMES,), dtype="int32")
    x = layers.Embedding(5, 4, mask_zero=masked)(ids)
    return keras.Model(ids, layers.Dense(CLASSES, activation="softmax")(x))


def vectors(masked: bool) -> keras.Model:
    """A unit vector for each sample, masked where the first id is 0."""
    ids = keras.Input((TIMES,), dtype="int32")
    x = layers.Dense(CLASSES)(layers.Flatten()(layers.Embedding(5, 4)(ids)))
    x = layers.UnitNormalization()(x)
    if masked:
        x = layers.Masking()(x * ops.cast(ids[:, :1] > 0, x.dtype))
    return keras.Model(ids, x)


BUILDERS = {
    (build, masked): functools.partial(build, masked)
    for build in (sequences, vectors)
    for masked in (False, True)
}


def kinds() -> dict[str, Callable[..., losses.Loss]]:
    """All losses that Keras has, and some with other arguments than the default ones."""
    return classes_in(losses, NOT_TRIED) | VARIANTS


def model_and_targets(name: str) -> tuple[Callable[[bool], keras.Model], Any]:
    """What a loss is tried with."""
    if name == "Circle":
        return vectors, LABELS[:, 0]
    if name == "CTC":
        return sequences, LABELS[:, :2] % 2 + 1
    if name.startswith("Sparse") or "Generalized" in name:
        return sequences, LABELS
    if name.startswith(("Mean", "Huber", "LogCosh", "Poisson", "Cosine", "KL")):
        return sequences, POSITIVE
    return sequences, ONE_HOT


def trials() -> dict[str, Trial]:
    """All combinations, by name; of "mean", another word for the first reduction, only one.

    Usually each loss with each reduction takes the next way in turn; all ways are tried on demand.
    """
    found = {}
    losses_of_keras = enumerate(kinds().items())
    ways = itertools.product(losses_of_keras, enumerate(REDUCTIONS), enumerate(WAYS))
    for (number, (name, make)), (place, reduction), (turn, way) in ways:
        chosen = more_asked_for() or (number + place) % len(WAYS) == turn
        if way == "masked, weighted" if reduction == "mean" else chosen:
            title = f"{name}, {reduction}, {way}"
            case = _case(name, make, reduction, *WAYS[way])
            limit = 1e-5 if name == "CTC" else ROUNDING  # TensorFlow computes it in float32
            found[title] = Trial(title, case, reuse=True, limit=limit)
    return found


def _case(name: str, make: Callable[..., Any], reduction: str, masked: bool, weights: Any) -> Case:
    def compiled() -> dict[str, Any]:
        return {"optimizer": sgd(), "loss": make(reduction=reduction)}

    build, y = model_and_targets(name)
    if build is vectors and weights is not None:
        weights = weights[:, 0]
    fit = {} if weights is None else {"sample_weight": weights}
    return Case(BUILDERS[build, masked], IDS, y, compiled, fit)
