"""All losses of Keras, with all reductions, sample weights and masks."""

import functools
import itertools
from collections.abc import Callable, Sequence
from fnmatch import fnmatchcase as fnmatch
from typing import Any, NamedTuple

import keras
import numpy as np
from keras import layers, losses, ops

from tests.exactness import expected
from tests.exactness.trials import EVENLY, ROUNDING, UNEVENLY, Part, Trial, classes_in, training
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


def one_or_all(items: list[Any]) -> Any:
    return items[0] if len(items) == 1 else items


def sequences(masked: bool, heads: int) -> keras.Model:
    """Distributions at each step, masked where the id is 0."""
    inputs = keras.Input((TIMES, 4))
    x = layers.Masking()(inputs) if masked else inputs
    x = layers.Dense(5, activation="tanh")(x)
    x = layers.Dense(5, activation="tanh")(x)
    outputs = [layers.Dense(CLASSES, activation="softmax", name=f"{i}")(x) for i in range(heads)]
    return keras.Model(inputs, one_or_all(outputs))


def vectors(masked: bool, heads: int) -> keras.Model:
    """A unit vector for each sample, masked where the first id is 0."""
    ids = keras.Input((TIMES,), dtype="int32")
    x = layers.Dense(CLASSES)(layers.Flatten()(layers.Embedding(5, 4)(ids)))
    x = layers.UnitNormalization()(x)
    if masked:
        x = layers.Masking()(x * ops.cast(ids[:, :1] > 0, x.dtype))
    return keras.Model(ids, one_or_all([x] * heads))


def kinds() -> dict[str, Callable[..., losses.Loss]]:
    """All losses that Keras has, and some with other arguments than the default ones."""
    return classes_in(losses, NOT_TRIED) | VARIANTS


def targets_of(name: str) -> Any:
    if name == "Circle":
        return LABELS[:, 0]
    if name == "CTC":
        return LABELS[:, :2] % 2 + 1
    if name.startswith("Sparse") or "Generalized" in name:
        return LABELS
    if name.startswith(("Mean", "Huber", "LogCosh", "Poisson", "Cosine", "KL")):
        return POSITIVE
    return ONE_HOT


WHOLE = ("Dice", "Tversky", "*(axis*", "a subclass")
"""Computed on the whole batch, and with them all others of the same model."""
ALONE = ("CTC", "Circle", "*(axis*, none, *")
"""In float32, with another model, or with values of a shape that others do not have."""


class Way(NamedTuple):
    name: str
    make: Callable[..., losses.Loss]
    reduction: str
    masks_and_weights: str


def parts() -> list[Part]:
    """Each loss in one reduction and way; in all of them on demand.

    Losses take in turn the next reduction and way that Keras trains them with, so that all are
    tried with one loss or another.
    """
    found = []
    ways = list(itertools.product(REDUCTIONS, WAYS))
    for number, (name, make) in enumerate(kinds().items()):
        every = [Way(name, make, *way) for way in (("mean", "masked, weighted"), *ways)]
        turn = 1 + number % len(ways)
        in_turn = every[turn:] + every[1:turn]
        no = expected.NOT_IN_KERAS
        first = next(way for way in in_turn if expected.outcome("losses", _title(way)) != no)
        found += map(_part, every if more_asked_for() else [first])
    return found


def _title(way: Way) -> str:
    return f"{way.name}, {way.reduction}, {way.masks_and_weights}"


def _part(way: Way) -> Part:
    title = _title(way)
    alone = any(fnmatch(title, pattern) or way.name == pattern for pattern in ALONE)
    return Part(title, way, None if alone else (way.masks_and_weights, _is_whole(way)))


def _is_whole(way: Way) -> bool:
    """Whether a loss is computed on the whole batch, as any is whose output carries a mask."""
    masked, _ = WAYS[way.masks_and_weights]
    return masked or way.reduction == "none" or any(fnmatch(way.name, p) for p in WHOLE)


def trial(parts: Sequence[Part]) -> Trial:
    """A model with an output for each loss; all have the same masks and weights."""
    ways: list[Way] = [part.value for part in parts]
    masked, weights = WAYS[ways[0].masks_and_weights]
    circle = ways[0].name == "Circle"
    body = vectors if circle else sequences
    if circle and weights is not None:
        weights = weights[:, 0]
    case = Case(
        functools.partial(body, masked, len(ways)),
        IDS if circle else STEPS,
        one_or_all([targets_of(way.name) for way in ways]),
        lambda: {
            "optimizer": sgd(),
            "loss": one_or_all([way.make(reduction=way.reduction) for way in ways]),
        },
        {} if weights is None else {"sample_weight": one_or_all([weights] * len(ways))},
    )
    limit = 1e-5 if ways[0].name == "CTC" else ROUNDING  # TensorFlow computes it in float32
    # Micro-batches that are not all of one size are traced for both.
    rows = EVENLY if weights is None or _is_whole(ways[0]) else UNEVENLY
    return Trial(case, functools.partial(training, rows=rows), limit=limit)
