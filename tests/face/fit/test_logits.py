"""Crossentropies compute with the logits of a softmax or sigmoid, as Keras' own do.

Of a probability that is rounded to 0 or 1 nothing can be learned; of its logits it can.
"""

import keras
import numpy as np
import pytest
from keras import layers, ops

from tests.helpers.training import SAMPLES, Case, distance, finish, floats, integers, make, sgd

pytestmark = [pytest.mark.keras, pytest.mark.usefixtures("untried")]

LARGE = keras.initializers.RandomNormal(0, 40, seed=1)
LABELS = integers(3, seed=2)
ONE_HOT = np.eye(3)[LABELS]
BINARY, SPARSE = "binary_crossentropy", "sparse_categorical_crossentropy"


def sure():
    """Is sure of what it knows: its probabilities are 0 or 1."""
    inputs, ids = keras.Input((4,)), keras.Input((4,), dtype="int32")
    # Comes from the first stage, and is used in the second, too.
    early = layers.Dense(3, "softmax", kernel_initializer=LARGE)(inputs)
    x = layers.Dense(6, activation="tanh")(layers.Dense(5, activation="tanh")(inputs))
    logits = layers.Dense(3, kernel_initializer=LARGE)(x)
    other_axis = layers.Softmax(axis=1)(layers.Reshape((3, 1))(logits))
    both = layers.Concatenate()([x, early])
    sigmoid = layers.Activation("sigmoid")(layers.Dense(3, kernel_initializer=LARGE)(both))
    words = layers.Embedding(5, 4, mask_zero=True, embeddings_initializer=LARGE)(ids)
    masked = layers.Dense(3, activation="softmax")(words)
    outputs = [early, ops.softmax(logits), layers.Flatten()(other_axis), sigmoid, masked]
    return keras.Model([inputs, ids], outputs)


SURE = Case(
    sure,
    [floats(4), integers(5, 4, seed=3)],
    [LABELS, ONE_HOT, ONE_HOT, ONE_HOT, integers(3, 4, seed=4)],
    lambda: {
        "optimizer": sgd(),
        "loss": [SPARSE, BINARY, "categorical_crossentropy", BINARY, SPARSE],
        "metrics": [[], [BINARY], [], [], []],
    },
    batch=SAMPLES,
)


@pytest.mark.slow
def test_what_is_sure_learns_as_in_keras():
    keras.backend.clear_session()
    plain = finish(make(SURE), SURE)
    for output in plain["predictions"][:3]:
        assert np.mean(np.max(output, axis=1) > 1 - 1e-9) > 0.5
    keras.backend.clear_session()
    piped = finish(make(SURE, num_stages=2, num_micro_batches=2), SURE)
    assert distance(plain, piped) < 1e-10
