"""Losses that layers add count as in one process, sums and means alike, or are refused by name."""

from __future__ import annotations

import keras
import numpy as np
import pytest
from keras import layers, ops

from tarantella_pp.errors import UnsupportedModelError
from tarantella_pp.models.pipeline_model import PipelineModel
from tests.helpers.mpi import mpi_run
from tests.helpers.training import (
    distance,
    sgd,
    use_float64,
)

pytestmark = [pytest.mark.keras, pytest.mark.usefixtures("float64")]

X, Y = np.random.default_rng(3).normal(size=(2, 7, 5))
IDS = np.random.default_rng(4).integers(0, 7, size=(7, 5))


class Adds(layers.Layer):
    """Scales its input and adds losses of it."""

    def __init__(self, *functions, **kwargs):
        super().__init__(**kwargs)
        self.functions = functions
        self.gain = self.add_weight(shape=(), initializer="ones", name="gain")

    def call(self, x):
        x = self.gain * x
        for function in self.functions:
            self.add_loss(function(x))
        return x

    def compute_output_shape(self, shape):
        return shape


def model_of(*inner, ids=False):
    keras.utils.set_random_seed(1)
    inputs = keras.Input((5,), dtype="int32" if ids else None)
    x = layers.Flatten()(layers.Embedding(7, 2)(inputs)) if ids else inputs
    x = layers.Dense(5, activation="tanh")(x)
    for layer in inner:
        x = layer(x)
    x = layers.Dense(4, activity_regularizer="l2")(x)
    return keras.Model(inputs, layers.Dense(5)(x))


def total(x):
    return 0.01 * ops.sum(ops.square(x))


def average(x):
    return 0.1 * ops.mean(ops.abs(x))


def divergence(x):
    """Of a variational autoencoder, as in Keras' documentation."""
    return -0.05 * ops.sum(1 + x - ops.square(x) - ops.exp(x), axis=-1)


def hinge(x):
    """Zero for most samples, and for the first micro-batch all over."""
    return ops.sum(ops.relu(x[:, 0] - 0.55))


def weighed_by_the_others(x):
    return ops.sum(ops.square(ops.mean(x, axis=0)))


def rare_hinge(x):
    return ops.sum(ops.relu(x[:, 0] - 20.0))


class Annealed(Adds):
    """Its loss counts from the second step on."""

    def __init__(self, *functions):
        super().__init__(*functions)
        self.share = self.add_weight(shape=(), initializer="zeros", trainable=False)

    def call(self, x):
        self.add_loss(self.share * ops.sum(ops.square(x)))
        return super().call(x)


KINDS = {
    "zero for these": (rare_hinge, average),
    "zero for all": (lambda x: 0.0 * ops.sum(ops.square(x)), keras.regularizers.L2(0.0)),
    "sum": (total,),
    "mean": (average,),
    "vector": (divergence,),
    "both": (total, average, divergence),
    "zero at first": (hinge, average),
}


def outcome(model, x=X):
    model.compile(sgd(), "mse", run_eagerly=not isinstance(model, PipelineModel))
    found = [model.train_on_batch(x, Y) for _ in range(2)]
    weights = model.get_weights()
    return [*found, *weights, model.evaluate(x, Y, batch_size=7, verbose=0)]


@pytest.mark.parametrize("name", KINDS)
def test_sums_and_means_are_told_apart_and_are_exact(name):
    plain = outcome(model_of(Adds(*KINDS[name])))
    piped = PipelineModel(model_of(Adds(*KINDS[name])), 2, num_micro_batches=3)
    assert distance(plain, outcome(piped)) < 1e-10


def test_losses_that_do_not_count_at_first_are_known_before_they_do():
    found = []
    for wrap in (lambda model: model, lambda m: PipelineModel(m, 2, num_micro_batches=3)):
        layer = Annealed()
        model = wrap(model_of(layer))
        found.append(outcome(model))
        layer.share.assign(0.1)
        found[-1] += outcome(model)
    assert distance(*found) < 1e-10


@pytest.mark.parametrize("micro_batches", [3, 7])
def test_so_they_are_where_nothing_but_integers_goes_in(micro_batches):
    plain = outcome(model_of(Adds(total, average), ids=True), IDS)
    model = model_of(Adds(total, average), ids=True)
    piped = PipelineModel(model, 1, num_micro_batches=micro_batches)
    assert distance(plain, outcome(piped, IDS)) < 1e-10


def test_so_they_are_behind_random_layers():
    """Of the same masks for each number of micro-batches, as only the first rows are looked at."""
    found = []
    for function in (total, lambda x: 7 * ops.mean(ops.sum(0.01 * ops.square(x), -1))):
        model = model_of(layers.Dropout(0.4, seed=2), Adds(function))
        piped = PipelineModel(model, 2, num_micro_batches=7)
        found.append(outcome(piped)[:-1])
    assert distance(*found) < 1e-10


MIXED = {
    "of means": weighed_by_the_others,
    "variance": lambda x: ops.sum(ops.var(x, axis=0)),
    "later": lambda x: ops.maximum(ops.sum(ops.square(x)), 1e-6),
    "never seen": lambda x: ops.sum(ops.cast(ops.isnan(x), x.dtype)),
    "gradient alone": lambda x: ops.sum(ops.mean(x) * (x - ops.stop_gradient(x))),
}


@pytest.mark.parametrize("name", MIXED)
def test_losses_that_are_neither_are_refused_by_name(name):
    model = PipelineModel(model_of(Adds(average, MIXED[name], name="odd")), 2, num_micro_batches=3)
    model.compile(sgd(), "mse")
    before = model.get_weights()
    with pytest.raises(UnsupportedModelError, match=r"'odd' adds a loss.*num_micro_batches=1"):
        model.train_on_batch(X, Y)
    assert distance(before, model.get_weights()) == 0


def on_a_rank():
    use_float64()
    return [float(np.sum(part)) for part in on_stages(keras.layers.Dropout(0.3, seed=1))]


def on_stages(*inner):
    model = model_of(Adds(total, average), *inner, Adds(divergence))
    return outcome(PipelineModel(model, 2, num_micro_batches=3))


def refused_on_a_rank():
    use_float64()
    model = PipelineModel(model_of(Adds(ops.max, name="odd")), 2, num_micro_batches=3)
    outcome(model)


@pytest.mark.slow
@pytest.mark.mpi
def test_on_two_ranks_they_are_the_same_and_a_refusal_ends_both():
    """Also of random numbers, whose seeds no trial moves."""
    alone = [float(np.sum(part)) for part in on_stages(keras.layers.Dropout(0.3, seed=1))]
    for found in mpi_run(2, on_a_rank).check().results:
        assert distance(alone, found) < 1e-13
    ended = mpi_run(2, refused_on_a_rank)
    assert ended.returncode != 0
    assert not ended.timed_out
    assert "Layer 'odd' adds a loss" in ended.stderr
