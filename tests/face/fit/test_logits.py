"""Crossentropies compute with the logits of a softmax or sigmoid, as Keras' own do.

Of a probability that is rounded to 0 or 1 nothing can be learned; of its logits it can.
"""

from __future__ import annotations

import keras
import numpy as np
import pytest
from keras import layers, ops

from tarantella_pp.partition.graph.keras_reader import extract
from tarantella_pp.runtime.stage.model_outputs import find_activations
from tests.helpers.training import Case, distance, finish, floats, integers, make, sgd

pytestmark = pytest.mark.keras

ROUNDING = 1e-10
LARGE = keras.initializers.RandomNormal(0, 40, seed=1)
LABELS = integers(3, seed=2)
ONE_HOT = np.eye(3)[LABELS]
X = floats(4)


def sure(*ends):
    """Is sure of what it knows: its probabilities are 0 or 1."""
    x = inputs = keras.Input((4,))
    x = layers.Dense(5, activation="tanh")(x)
    x = layers.Dense(3, kernel_initializer=LARGE)(x)
    for end in ends:
        x = end(x)
    return keras.Model(inputs, x)


def early():
    """The first output comes from the first stage, and is used in the second, too."""
    inputs = keras.Input((4,))
    first = layers.Dense(3, "softmax", kernel_initializer=LARGE, name="first")(inputs)
    x = layers.Dense(6, activation="tanh")(layers.Dense(6, activation="tanh")(inputs))
    x = layers.Concatenate()([layers.Dense(6, activation="tanh")(x), first])
    return keras.Model(inputs, [first, layers.Dense(3, "sigmoid", name="second")(x)])


def masked():
    ids = keras.Input((4,), dtype="int32")
    x = layers.Embedding(5, 4, mask_zero=True, embeddings_initializer=LARGE)(ids)
    return keras.Model(ids, layers.Dense(3, activation="softmax")(x))


def compiled(loss):
    def options():
        metrics = [] if isinstance(loss, list) else ["binary_crossentropy"]
        return {"optimizer": sgd(), "loss": loss, "metrics": metrics}

    return options


def softmax_of_dense():
    return sure(layers.Dense(3, activation="softmax", kernel_initializer=LARGE))


def first_axis():
    return sure(layers.Reshape((3, 1)), layers.Softmax(axis=1), layers.Flatten())


CASES = {
    "binary of softmax": Case(softmax_of_dense, X, ONE_HOT, compiled("binary_crossentropy")),
    "other axis": Case(first_axis, X, ONE_HOT, compiled("categorical_crossentropy")),
    "early": Case(
        early, X, [LABELS, ONE_HOT],
        compiled(["sparse_categorical_crossentropy", "binary_crossentropy"]),
    ),
    "masked": Case(
        masked, integers(5, 4, seed=3), np.eye(3)[integers(3, 4, seed=4)],
        compiled("categorical_crossentropy"),
    ),
}  # fmt: skip


@pytest.mark.parametrize(
    "name", ["early", *(pytest.param(n, marks=pytest.mark.slow) for n in CASES if n != "early")]
)
def test_what_is_sure_learns_as_in_keras(name):
    case = CASES[name]
    plain = finish(make(case), case, epochs=1)
    piped = make(case, num_stages=2, num_micro_batches=3)
    assert distance(plain, finish(piped, case, epochs=1)) < ROUNDING


@pytest.mark.parametrize(
    ("build", "count"),
    [
        (lambda: sure(ops.softmax), 1),
        (lambda: sure(layers.Activation("sigmoid")), 1),
        (first_axis, 0),
    ],
)
def test_outputs_that_know_their_logits_are_found(build, count):
    assert len(find_activations(extract(build()))) == count


def test_the_models_are_sure():
    predicted = softmax_of_dense().predict(X, verbose=0)
    assert np.mean(predicted.max(axis=1) > 1 - 1e-9) > 0.5
