"""What else people do with a model that trains: as plain Keras does it, or refused by name."""

import warnings

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers, ops

from tarantella_pp.errors import ConfigurationError, UnsupportedModelError
from tarantella_pp.models.pipeline_model import PipelineModel
from tests.helpers.training import SAMPLES, X, Y, compiled, distance
from tests.zoo.models import Table, mlp, nested, sequential

pytestmark = pytest.mark.keras

CUT = {"num_stages": 2, "num_micro_batches": 3}


def test_an_optimizer_is_made_once_and_nothing_trained_without_one():
    keras.backend.clear_session()
    model = compiled(PipelineModel(mlp(), **CUT), "adam", "mse")
    assert model.optimizer.name == "adam"
    model.compile({"class_name": "sgd", "config": {"learning_rate": 0.5}}, "mse")
    assert model.optimizer.name == "sgd"
    assert float(model.optimizer.learning_rate) == 0.5
    model.compile(optimizer=None, loss="mse")
    for train in (model.fit, model.train_on_batch):
        with pytest.raises(ConfigurationError, match="optimizer=None"):
            train(X, Y)


@pytest.mark.parametrize("build", [sequential, mlp, nested])
def test_layers_names_and_summary_are_those_of_the_wrapped_model(build):
    def lines(model):
        found = []
        model.summary(print_fn=found.append)
        return found

    plain = build()
    model = PipelineModel(plain, **CUT)
    assert lines(model) == lines(plain)
    for each in (model, plain):
        each.compile("adam", "mse", metrics=["mae"])
    assert model.layers == plain.layers
    assert model.get_layer(index=0) is plain.get_layer(index=0)
    assert [id(w) for w in model.weights] == [id(w) for w in plain.weights]
    for name in ("name", "input_shape", "output_shape", "metrics_names", "loss"):
        assert getattr(model, name) == getattr(plain, name)
    assert model.count_params() == plain.count_params()
    model.layers.clear()
    assert model.layers == plain.layers


def test_how_stages_are_compiled_is_warned_of():
    model = PipelineModel(mlp(), 2, num_micro_batches=2)
    for option in ("run_eagerly", "jit_compile"):
        with pytest.warns(UserWarning, match=f"{option}.*attributes") as said:
            model.compile("sgd", "mse", **{option: True})
        assert [warning.filename for warning in said] == [__file__]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model.compile("sgd", "mse")


def test_strategies_of_tensorflow_are_refused():
    strategy = tf.distribute.MirroredStrategy(["CPU:0"])
    with strategy.scope():
        inside = mlp()
        with pytest.raises(ConfigurationError, match="MirroredStrategy"):
            PipelineModel(inside, **CUT)
    with pytest.raises(ConfigurationError, match="MirroredStrategy"):
        PipelineModel(inside, **CUT)
    model = compiled(PipelineModel(mlp(), **CUT), "sgd", "mse")
    with strategy.scope(), pytest.raises(ConfigurationError, match="MirroredStrategy"):
        model.fit(X, Y, verbose=0)
    assert model.fit(X[:8], Y[:8], verbose=0).history


def test_data_without_a_dense_row_for_each_sample_is_refused():
    inputs = keras.Input((None,))
    model = keras.Model(inputs, layers.Dense(1)(ops.mean(inputs, axis=1, keepdims=True)))
    model = compiled(PipelineModel(model, **CUT), "sgd", "mse")
    ragged = tf.ragged.constant([[1.0], [2.0, 3.0]] * (SAMPLES // 2), dtype="float64")
    with pytest.raises(UnsupportedModelError, match="an input that is a RaggedTensor"):
        model.fit(ragged, Y[:, :1], verbose=0)
    with pytest.raises(UnsupportedModelError, match="a target that is a RaggedTensor"):
        model.fit(X, ragged, verbose=0)
    with pytest.raises(ConfigurationError, match=r"samples of a batch, .*num_micro_batches=1"):
        model.train_on_batch(X, Y[:1])
    assert model.fit(X, Y[:, :1], verbose=0).history


def test_samples_may_come_second_between_stages():
    """Micro-batches of several sizes leave the first dimension as it is."""
    inputs = keras.Input((6,))
    x = layers.Dense(5)(ops.expand_dims(layers.Dense(4)(inputs), 0))
    plain = keras.Model(inputs, layers.Dense(3)(ops.squeeze(layers.Dense(5)(x), 0)))
    model = PipelineModel(keras.models.clone_model(plain), 2, num_micro_batches=3)
    model.set_weights(plain.get_weights())
    for each in (plain, model):
        each.compile("sgd", "mse")
        each.train_on_batch(X[:7], Y[:7])
    assert distance(plain.get_weights(), model.get_weights(), "weights") < 1e-10


def test_outputs_without_a_row_for_each_sample_are_refused():
    def with_table():
        inputs = keras.Input((4, 6))
        table, _ = Table()(inputs)
        return keras.Model(inputs, [layers.Dense(2)(inputs), table])

    with pytest.raises(UnsupportedModelError, match=r"shape \(1, 4, 6\) .* num_micro_batches=1"):
        PipelineModel(with_table(), **CUT)
    model, x = PipelineModel(plain := with_table(), 2, num_micro_batches=1), np.ones((4, 4, 6))
    assert distance(plain.predict(x, verbose=0), model.predict(x, verbose=0)) < 1e-10
