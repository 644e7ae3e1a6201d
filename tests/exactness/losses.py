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
from tests.exactness.expected import reason
from tests.exactness.trials import NOT_IN_KERAS, ROUNDING, Trial, Verdict, training
from tests.helpers.draws import more_asked_for
from tests.helpers.training import SAMPLES, Case, floats, integers, sgd

NOT_TRIED = {"Loss": "the base class of all losses"}

REDUCTIONS = ("sum_over_batch_size", "mean_with_sample_weight", "sum", "none")
"""All but "mean", which is another word for the first one."""
TIMES, CLASSES = 4, 3

IDS = integers(5, TIMES, seed=1)
STEPS = floats(TIMES, 4) * (IDS > 0)[..., None]
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
    inputs = keras.Input((TIMES, 4))
    x = layers.Masking()(inputs) if masked else inputs
    x = layers.Dense(5, activation="tanh")(x)
    x = layers.Dense(5, activation="tanh")(x)
    return keras.Model(inputs, layers.Dense(CLASSES, activation="softmax")(x))


def vectors(masked: bool) -> keras.Model:
    """A unit vector for each sample, masked where the first id is 0."""
    ids = keras.Input((TIMES,), dtype="int32")
    x = layers.Dense(CLASSES)(layers.Flatten()(layers.Embedding(5, 4)(ids)))
    x = layers.UnitNormalization()(x)
    if masked:
        x = layers.Masking()(x * ops.cast(ids[:, :1] > 0, x.dtype))
    return keras.Model(ids, x)


VECTORS = {masked: functools.partial(vectors, masked) for masked in (False, True)}
SEQUENCES = {masked: functools.partial(sequences, masked) for masked in (False, True)}


def kinds() -> dict[str, Callable[..., losses.Loss]]:
    """All losses that Keras has, and some with other arguments than the default ones."""
    return classes_in(losses, NOT_TRIED) | VARIANTS


def model_and_targets(name: str) -> tuple[dict[bool, Any], Any, Any]:
    """What a loss is tried with: models without and with masks, inputs and targets."""
    if name == "Circle":
        return VECTORS, IDS, LABELS[:, 0]
    if name == "CTC":
        return SEQUENCES, STEPS, LABELS[:, :2] % 2 + 1
    if name.startswith("Sparse") or "Generalized" in name:
        return SEQUENCES, STEPS, LABELS
    if name.startswith(("Mean", "Huber", "LogCosh", "Poisson", "Cosine", "KL")):
        return SEQUENCES, STEPS, POSITIVE
    return SEQUENCES, STEPS, ONE_HOT


def trials() -> dict[str, Callable[[], Trial]]:
    """What makes trials of each loss, in one reduction and way; with all of them on demand.

    Losses take in turn the next reduction and way that Keras trains them with, so that all are
    tried with one loss or another.
    """
    found = dict[str, Callable[[], Trial]]()
    ways = list(itertools.product(REDUCTIONS, WAYS))
    for number, (name, make) in enumerate(kinds().items()):
        chosen = [("mean", "masked, weighted"), *ways]
        if not more_asked_for():
            turn = number % len(ways)
            chosen = [next(way for way in ways[turn:] + ways[:turn] if _is_in_keras(name, *way))]
        for reduction, way in chosen:
            title = f"{name}, {reduction}, {way}"
            found[title] = functools.partial(_trial, title, name, make, reduction, way)
    return found


def _is_in_keras(name: str, reduction: str, way: str) -> bool:
    """Whether plain Keras trains a loss so, as far as is known."""
    return reason("losses", Verdict(f"{name}, {reduction}, {way}", NOT_IN_KERAS)) is None


def _trial(title: str, name: str, make: Callable[..., Any], reduction: str, way: str) -> Trial:
    masked, weights = WAYS[way]
    builds, x, y = model_and_targets(name)
    if builds is VECTORS and weights is not None:
        weights = weights[:, 0]
    case = Case(
        builds[masked],
        x,
        y,
        lambda: {"optimizer": sgd(), "loss": make(reduction=reduction)},
        {} if weights is None else {"sample_weight": weights},
    )
    limit = 1e-5 if name == "CTC" else ROUNDING  # TensorFlow computes it in float32
    return Trial(title, case, training, limit, again=True)
