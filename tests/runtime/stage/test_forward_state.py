"""Moving averages of batch normalizations: of the batch, as in one process."""

import functools

import keras
import numpy as np
import pytest
from keras import layers

from tarantella_pp.models.pipeline_model import PipelineModel
from tests.helpers.training import begun, distance

pytestmark = [pytest.mark.keras, pytest.mark.usefixtures("float64")]

ROWS = np.random.default_rng(0).normal(3.0, 2.0, size=(11, 4, 3))


def normalized(*, shared_and_masked=False):
    """Batch normalizations of what no weight changes, so that all must see what Keras sees."""
    inputs = keras.Input((4, 3))
    x = layers.Masking()(inputs) if shared_and_masked else inputs
    norm = layers.BatchNormalization(momentum=0.7, center=False, scale=False)
    normed = norm(x)
    if shared_and_masked:
        normed = layers.Add()([normed, norm(layers.Rescaling(2.0, 1.0)(x))])
    x = layers.TimeDistributed(layers.BatchNormalization(momentum=0.9))(inputs)
    x = layers.Flatten()(layers.Add()([normed, x]))
    return keras.Model(inputs, layers.Dense(1)(layers.Dense(5)(x)))


def averages(model):
    return [np.asarray(w) for w in model.non_trainable_variables if "moving" in w.path]


def piped(model):
    return PipelineModel(model, num_stages=2, num_micro_batches=4)


def trained(rows, wrap, steps=3, build=normalized):
    model = begun(build, wrap, "sgd", "mse")
    for _ in range(steps):
        model.train_on_batch(rows, np.ones((len(rows), 1)))
    return averages(model)


@pytest.mark.slow
def test_they_are_those_of_the_batch_where_a_layer_is_called_twice_with_masks():
    rows = ROWS.copy()
    rows[2, 1:] = rows[7] = 0.0
    build = functools.partial(normalized, shared_and_masked=True)
    found = [trained(rows, wrap, build=build) for wrap in (None, piped)]
    assert distance(*found) < 1e-6  # Keras adds epsilon to the number of values


@pytest.mark.slow
def test_a_step_that_fails_leaves_nothing_of_its_batch():
    model = begun(normalized, piped, "sgd", "mse")
    target = np.ones((len(ROWS), 1))
    model.train_on_batch(ROWS, target)
    before = averages(model)
    last = model._engine.stages[1]
    forward, last.forward = last.forward, None
    with pytest.raises(TypeError):
        model.train_on_batch(ROWS * 7, target)
    last.forward = forward
    assert distance(before, averages(model)) == 0
    model.train_on_batch(ROWS, target)
    assert distance(averages(model), trained(ROWS, None, steps=2)) < 1e-13
