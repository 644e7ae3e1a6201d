"""Kinds of data and options of `fit`, `evaluate` and `predict`: as plain Keras takes them."""

from __future__ import annotations

import functools
import itertools

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

from tarantella_pp.models.pipeline_model import PipelineModel
from tests.helpers.training import (
    CASES,
    LABELS,
    WEIGHTS,
    Case,
    X,
    Y,
    adamw,
    distance,
    floats,
    make,
    regression,
    serial,
    sgd,
)
from tests.zoo.models import mlp

pytestmark = pytest.mark.keras

ROUNDING = 1e-10
MLP = Case(mlp, X, Y, regression(optimizer=sgd, metrics=["mae"]))


@functools.cache
def pipelined_mlp():
    """One pipeline for most tests, for its stages take longest to compile."""
    model = make(MLP, num_stages=2, num_micro_batches=3)
    return model, model.get_weights()


def both(use, case=MLP, **options):
    """What `use` returns for a model of plain Keras, and for a pipeline."""
    plain = use(make(case))
    if case is not MLP or options:
        return plain, use(make(case, **{"num_stages": 2, "num_micro_batches": 3, **options}))
    model, start = pipelined_mlp()
    model.set_weights(start)
    model.compile(**case.compiled())
    keras.utils.set_random_seed(1)
    make(case)  # what building draws of the seed
    return plain, use(model)


def fitted(model, **fit):
    """Trains a model; `fit` holds values, or functions that make new ones."""
    made = {name: v() if callable(v) else v for name, v in fit.items()}
    made = {"verbose": 0, "epochs": 2, "shuffle": False, **made}
    return model.fit(**made).history, model.get_weights()


def histories(**fit):
    """Trains the small model both ways."""
    return both(functools.partial(fitted, **fit))


class Batches(keras.utils.PyDataset):
    def __init__(self):
        super().__init__()
        self.ends = 0

    def __len__(self):
        return 3

    def __getitem__(self, i):
        part = slice(8 * i, 8 * i + 8)
        return X[part], Y[part], WEIGHTS[part]

    def on_epoch_end(self):
        self.ends += 1


def generator():
    data = Batches()
    for i in itertools.count():
        yield data[i % 3]


def dataset():
    return tf.data.Dataset.from_tensor_slices((X, Y, WEIGHTS)).batch(8)


def endless_length():
    return dataset().filter(lambda *_: True)


DATA = {
    "tf.data": {"x": dataset},
    "tf.data of unknown length": {"x": endless_length, "validation_data": endless_length},
    "tf.data over epochs": {"x": lambda: dataset().repeat(), "steps_per_epoch": 2, "epochs": 3},
    "generator": {"x": generator, "steps_per_epoch": 3},
    "PyDataset": {"x": Batches, "validation_data": Batches},
    "tensors": {"x": lambda: tf.constant(X), "y": lambda: tf.constant(Y), "batch_size": 5},
    "validation_data": {
        "x": X,
        "y": Y,
        "sample_weight": WEIGHTS,
        "validation_data": (X[:9], Y[:9], WEIGHTS[:9]),
        "validation_batch_size": 4,
        "validation_steps": 2,
    },
    "validation_split": {"x": X, "y": Y, "sample_weight": WEIGHTS, "validation_split": 0.3},
    "validation_freq": {
        "x": X, "y": Y, "epochs": 4, "validation_data": (X, Y), "validation_freq": [2, 4],
        "initial_epoch": 1,
    },
    "one row": {"x": X[:1], "y": Y[:1]},
    "small batches": {"x": X, "y": Y, "batch_size": 2, "epochs": 1},
}  # fmt: skip


QUICK = ("tf.data of unknown length", "generator", "PyDataset", "validation_data", "one row")


@pytest.mark.parametrize(
    "kind", [k if k in QUICK else pytest.param(k, marks=pytest.mark.slow) for k in DATA]
)
def test_data(kind):
    assert distance(*histories(**DATA[kind])) < ROUNDING


def test_more_steps_than_data_end_training_as_in_keras():
    with pytest.warns(UserWarning, match="ran out of data"):
        first, second = histories(x=dataset, steps_per_epoch=5)
    assert distance(first, second) < ROUNDING


def test_validation_without_a_batch_says_nothing():
    """Not a loss of 0, which would be the best of all."""
    empty = tf.data.Dataset.from_tensor_slices((X, Y)).batch(4).take(0)

    def use(model):
        told = fitted(model, x=X, y=Y, batch_size=4, validation_data=empty)
        return told, model.evaluate(empty, return_dict=True)

    (plain, nothing), (ours, same) = both(use)
    assert distance(plain, ours) < ROUNDING
    assert "val_loss" not in ours[0]
    assert same == nothing


def test_a_first_training_without_a_batch_trains_nothing():
    """As in compiled steps of Keras; it raises what is hard to understand in eager ones."""
    empty, model = dataset().take(0), pipelined_mlp()[0]
    model.compile(**MLP.compiled())
    with pytest.warns(UserWarning, match="ran out of data"):
        assert fitted(model, x=empty)[0] == {}
    assert model.evaluate(empty, return_dict=True) == {}
    assert set(fitted(model, x=X, y=Y)[0]) == {"loss", "mae"}


def test_shuffled_arrays_come_in_the_order_of_keras():
    first, second = histories(x=X, y=Y, shuffle=True, batch_size=4)
    assert distance(first, second) < ROUNDING
    sorted_ones = fitted(make(MLP), x=X, y=Y, batch_size=4)
    assert distance(sorted_ones, second) > 1e-6


@pytest.mark.parametrize("name", ["known", "unknown", "shared with validation"])
def test_data_sets_are_shuffled_as_in_keras_in_all_epochs(name):
    """Each iterator draws another order, and Keras makes some that it does not read."""

    def shuffled():
        samples = tf.data.Dataset.from_tensor_slices((X, Y, WEIGHTS))
        if name == "unknown":
            samples = samples.filter(lambda *_: True)
        return samples.shuffle(len(X), seed=3).batch(5)

    def train(model):
        data = shuffled()
        held_out = data.take(2) if name == "shared with validation" else None
        return fitted(model, x=data, validation_data=held_out, epochs=3)

    assert distance(*both(train)) < ROUNDING


def dictionaries():
    inputs = {"b": keras.Input((5,), name="b"), "a": keras.Input((4,), name="a")}
    x = layers.Concatenate()([layers.Dense(3)(inputs["a"]), layers.Dense(3)(inputs["b"])])
    outputs = {"second": layers.Dense(2, name="second")(x), "first": layers.Dense(3)(x)}
    return keras.Model(inputs, outputs)


@pytest.mark.slow
def test_dictionaries():
    compiled = regression(lambda: {"first": "mse", "second": "mae"}, metrics={"second": ["mse"]})
    x = {"a": floats(4), "b": floats(5)}
    y = {"first": floats(3), "second": floats(2)}
    case = Case(dictionaries, x, y, compiled)

    def use(model):
        told = model.fit(x, y, batch_size=8, epochs=2, shuffle=False, verbose=0).history
        return told, model.evaluate(x, y, verbose=0), model.predict(x, verbose=0)

    first, second = both(use, case)
    assert distance(first, second) < ROUNDING
    assert set(second[2]) == {"first", "second"}


@pytest.mark.slow
def test_several_steps_per_execution():
    """Keras reports the last batches' logs of each execution; numbers of the epoch are the same."""
    compiled = regression(optimizer=sgd, metrics=["mae"], steps_per_execution=2)

    def use(model):
        count = Count()
        told = model.fit(X, Y, batch_size=4, shuffle=False, verbose=0, callbacks=[count]).history
        predicted = model.predict(X, batch_size=4, verbose=0)
        return told, count.batches, model.evaluate(X, Y, batch_size=4, verbose=0), predicted

    plain = Case(mlp, X, Y, compiled)
    keras.utils.set_random_seed(1)
    model = mlp()
    model.compile(**compiled())
    assert distance(use(model), use(make(plain, num_stages=2, num_micro_batches=2))) < ROUNDING


class Count(keras.callbacks.Callback):
    def __init__(self):
        super().__init__()
        self.batches = []

    def on_train_batch_end(self, batch, logs=None):
        self.batches.append([batch, logs["loss"]])


def test_single_batches():
    def use(model):
        return [
            model.train_on_batch(X, Y, sample_weight=WEIGHTS),
            model.train_on_batch(X[:3], Y[:3], return_dict=True),
            model.test_on_batch(X, Y),
            model.predict_on_batch(X[:1]),
            model.fit(X, Y, batch_size=8, shuffle=False, verbose=0).history,
            model.get_weights(),
        ]

    assert distance(*both(use)) < ROUNDING


@pytest.mark.slow
def test_class_weights_of_single_batches():
    case = Case(mlp, X, LABELS, lambda: {"optimizer": adamw(), "loss": logits()})

    def use(model):
        return model.train_on_batch(X, LABELS, class_weight={0: 1.0, 1: 3.0, 2: 0.5})

    assert distance(*both(use, case)) < ROUNDING


def logits():
    return keras.losses.SparseCategoricalCrossentropy(from_logits=True)


@pytest.mark.slow
def test_before_and_between_trainings():
    def use(model):
        told = [model.predict(X, verbose=0), model.evaluate(X, Y, verbose=0)]
        told.append(model.fit(X, Y, batch_size=8, shuffle=False, verbose=0).history)
        told.append(model.fit(X, Y, batch_size=8, shuffle=False, verbose=0).history)
        model.compile(adamw(), "mae")
        told.append(model.fit(X, Y, batch_size=8, shuffle=False, verbose=0).history)
        model.optimizer.learning_rate = 0.5
        told.append(model.fit(X, Y, batch_size=8, shuffle=False, verbose=0).history)
        return [*told, model.get_weights()]

    assert distance(*both(use)) < ROUNDING


def test_prediction_without_compilation():
    keras.utils.set_random_seed(1)
    model = mlp()
    found = PipelineModel(model, num_stages=4).predict(X, batch_size=8, verbose=0)
    assert distance(model.predict(X, batch_size=8, verbose=0), found) < ROUNDING


@pytest.mark.slow
def test_layers_frozen_and_thawed_between_trainings():
    def use(model):
        told = []
        for trainable in (False, True):
            for layer in model.layers[:3]:
                layer.trainable = trainable
            model.compile(adamw(), "mse")
            told.append(model.fit(X, Y, batch_size=8, shuffle=False, verbose=0).history)
            told.append(model.get_weights())
        return told

    assert distance(*both(use, num_stages=3)) < ROUNDING


@pytest.mark.slow
def test_a_model_that_is_wrapped_frozen_trains_once_thawed():
    def use(model):
        told = model.fit(X, Y, batch_size=8, shuffle=False, verbose=0).history
        for layer in model.layers:
            layer.trainable = True
        model.compile(sgd(), "mse")
        return told, model.fit(X, Y, batch_size=8, shuffle=False, verbose=0).history

    case = Case(CASES["frozen"].build, X, Y, regression())
    assert distance(*both(use, case, num_stages=4)) < ROUNDING


@pytest.mark.slow
def test_two_pipelines_take_turns():
    models = [
        make(CASES[name], num_stages=stages, num_micro_batches=3)
        for name, stages in (("mlp", 2), ("long_skip", 3))
    ]
    found = [{}, {}]
    for epoch in range(2):
        for model, name, history in zip(models, ("mlp", "long_skip"), found, strict=True):
            case = CASES[name]
            told = model.fit(
                case.x, case.y, batch_size=8, initial_epoch=epoch, epochs=epoch + 1,
                shuffle=False, verbose=0, **case.fit,
            ).history  # fmt: skip
            for key, values in told.items():
                history.setdefault(key, []).extend(values)
    for name, history in zip(("mlp", "long_skip"), found, strict=True):
        assert distance(serial(name).history, history) < ROUNDING


def lengths():
    rng = np.random.default_rng(0)
    for rows, length in ((8, 5), (8, 3), (6, 5), (7, 9), (8, 5)):
        yield rng.integers(0, 6, size=(rows, length)).astype("int32"), rng.normal(size=(rows, 2))


class AddsInTraining(layers.Layer):
    def call(self, x, training=False):
        if training:
            self.add_loss(keras.ops.mean(keras.ops.square(x)))
        return x


def any_length():
    ids = keras.Input((None,), dtype="int32")
    x = layers.Dense(4)(layers.Embedding(6, 4, mask_zero=True)(ids))
    x = layers.Dense(4, activation="tanh")(AddsInTraining()(x))
    return keras.Model(ids, layers.Dense(2)(layers.GlobalAveragePooling1D()(x)))


@pytest.mark.slow
def test_sequences_of_any_length_and_losses_in_training_only():
    signature = (tf.TensorSpec([None, None], tf.int32), tf.TensorSpec([None, 2], tf.float64))

    def data():
        return tf.data.Dataset.from_generator(lengths, output_signature=signature)

    def use(model):
        told = [model.fit(data(), epochs=2, verbose=0).history, model.evaluate(data(), verbose=0)]
        told.append(model.fit(data(), verbose=0).history)
        return [*told, model.predict(data(), verbose=0), model.get_weights()]

    first, second = both(use, Case(any_length, None, None, regression()), num_stages=3)
    assert distance(first, second) < ROUNDING
