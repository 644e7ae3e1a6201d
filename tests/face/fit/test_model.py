"""What else people do with a model that trains: as plain Keras does it, or refused by name."""

from __future__ import annotations

import warnings

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers, ops

from tarantella_pp.errors import ConfigurationError, UnsupportedModelError
from tarantella_pp.models.make_plan import make_plan
from tarantella_pp.models.pipeline_model import PipelineModel
from tarantella_pp.partition.graph import keras_reader
from tests.helpers.training import SAMPLES, X, Y, distance, in_eager_steps
from tests.zoo.models import Table, mlp, nested, sequential

pytestmark = pytest.mark.keras

ROUNDING = 1e-10


def both(use, build=mlp, **options):
    """What `use` returns for a model of plain Keras, and for a pipeline."""
    keras.utils.set_random_seed(1)
    with in_eager_steps():
        plain = use(build())
    keras.utils.set_random_seed(1)
    return [plain, use(PipelineModel(build(), **options))]


def trained(model, **fit):
    return model.fit(X, Y, **{"batch_size": 8, "shuffle": False, "verbose": 0, **fit}).history


CUT = {"num_stages": 2, "num_micro_batches": 3}


def test_steps_by_hand():
    def use(model):
        model.compile("adam", "mse", metrics=["mae"])
        data = (tf.constant(X), tf.constant(Y))
        logs = [model.train_step(data), model.train_step(data), model.test_step(data)]
        told = [{name: float(value) for name, value in log.items()} for log in logs]
        return told, np.array(model.predict_step(data[:1])), model.get_weights()

    plain, found = both(use, **CUT)
    assert [list(log) for log in found[0]] == [["loss", "mae"]] * 3
    assert distance(plain, found) < ROUNDING


def test_loss_and_metrics_by_hand():
    def use(model):
        model.compile("adam", "mse", metrics=["mae"])
        outputs = model(X)
        loss = model.compute_loss(X, tf.constant(Y), outputs)
        logs = model.compute_metrics(X, tf.constant(Y), outputs)
        return float(loss), {name: float(value) for name, value in logs.items()}

    plain, found = both(use, **CUT)
    assert plain[1].keys() == found[1].keys() == {"loss", "mae"}
    assert distance(plain, found) < ROUNDING


def test_steps_by_hand_where_they_cannot_run():
    model = PipelineModel(mlp(), **CUT)
    data = (tf.constant(X), tf.constant(Y))
    with pytest.raises(ConfigurationError, match=r"compile\(\)` before `train_step"):
        model.train_step(data)
    model.compile("sgd", "mse")
    compiled = tf.function(lambda: model.train_step(data), autograph=False)
    with pytest.raises(ConfigurationError, match=r"`train_step\(\)` .* outside"):
        compiled()


def test_an_optimizer_is_made_once():
    keras.backend.clear_session()
    model = PipelineModel(mlp(), **CUT)
    model.compile("adam", "mse")
    assert model.optimizer.name == "adam"
    model.compile({"class_name": "sgd", "config": {"learning_rate": 0.5}}, "mse")
    assert model.optimizer.name == "sgd"
    assert float(model.optimizer.learning_rate) == 0.5


@pytest.mark.parametrize("build", [sequential, mlp])
def test_layers_and_names_are_those_of_the_wrapped_model(build):
    plain = build()
    model = PipelineModel(plain, **CUT)
    model.compile("adam", "mse", metrics=["mae"])
    plain.compile("adam", "mse", metrics=["mae"])
    assert model.layers == plain.layers
    assert model.get_layer(index=0) is plain.get_layer(index=0)
    assert [id(w) for w in model.weights] == [id(w) for w in plain.weights]
    for name in ("name", "input_shape", "output_shape", "metrics_names", "loss"):
        assert getattr(model, name) == getattr(plain, name)
    assert model.count_params() == plain.count_params()
    model.layers.clear()
    assert model.layers == plain.layers


@pytest.mark.parametrize("build", [mlp, sequential, nested])
def test_the_summary_is_that_of_the_wrapped_model(build):
    def lines(model):
        found = []
        model.summary(print_fn=found.append)
        return found

    plain = build()
    assert lines(PipelineModel(plain, 2)) == lines(plain)


def test_a_model_without_an_optimizer_is_evaluated():
    def use(model):
        model.compile(optimizer=None, loss="mse", metrics=["mae"])
        return model.evaluate(X, Y, verbose=0), model.predict(X, verbose=0)

    assert distance(*both(use, **CUT)) < ROUNDING
    model = PipelineModel(mlp(), **CUT)
    model.compile(optimizer=None, loss="mse")
    for train in (model.fit, model.train_on_batch):
        with pytest.raises(ConfigurationError, match="optimizer=None"):
            train(X, Y)


def without_weights():
    inputs = keras.Input((6,))
    x = layers.Dropout(0.5, seed=3)(inputs)
    return keras.Model(inputs, layers.Activation("tanh")(layers.Rescaling(2.0)(x))[:, :3])


def frozen():
    model = mlp()
    model.trainable = False
    model.layers[-1].trainable = True  # Keras trains nothing of a model frozen as a whole
    return model


@pytest.mark.filterwarnings("ignore:The model does not have any trainable weights")
@pytest.mark.parametrize(
    ("build", "parts"), [(without_weights, 1), pytest.param(frozen, 3, marks=pytest.mark.slow)]
)
def test_a_model_with_nothing_to_train(build, parts):
    def use(model):
        first = model.predict(X, verbose=0)
        model.compile("adam", "mse", metrics=["mae"])
        told = [model.evaluate(X, Y, verbose=0), trained(model, epochs=2)]
        assert int(model.optimizer.iterations) == 0
        return [*told, first, model.get_weights()]

    assert distance(*both(use, build, num_stages=2, num_micro_batches=parts)) < ROUNDING


@pytest.mark.parametrize(
    "option", ["run_eagerly", pytest.param("jit_compile", marks=pytest.mark.slow)]
)
def test_how_stages_are_compiled_is_warned_of_and_changes_nothing(option):
    def use(model):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            model.compile("sgd", "mse", **{option: True})
        said = [w for w in caught if option in str(w.message)]
        if isinstance(model, PipelineModel):
            assert len(said) == 1
            assert said[0].filename == __file__
        assert getattr(model, option) is True
        return trained(model)

    assert distance(*both(use, **CUT)) < ROUNDING


def test_what_is_changed_in_layers_takes_effect_at_compile():
    def build():
        x = inputs = keras.Input((6,))
        x = layers.BatchNormalization(scale=False, center=False)(layers.Dense(5)(x))
        return keras.Model(inputs, layers.Dense(3)(layers.Dropout(0.5, seed=3)(x)))

    def use(model):
        model.compile("sgd", "mse")
        told = [trained(model)]
        _, _, norm, drop, _ = model.layers
        norm.trainable, drop.rate = False, 0.1
        model.compile("sgd", "mse")
        return [*told, trained(model), model.get_weights()]

    assert distance(*both(use, build, num_stages=2, num_micro_batches=1)) < ROUNDING


@pytest.mark.slow
def test_training_functions_that_are_forced():
    class Thaw(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch, logs=None):
            self.model.layers[1].trainable = epoch > 0
            self.model.make_train_function(force=True)

    def use(model):
        model.layers[1].trainable = True
        model.compile("sgd", "mse")
        model.optimizer.build(model.trainable_variables)
        return trained(model, epochs=2, callbacks=[Thaw()]), model.get_weights()

    assert distance(*both(use, **CUT)) < ROUNDING


@pytest.mark.parametrize("balance", ["memory", "time"])
def test_a_model_is_read_once(balance, monkeypatch):
    read = []
    network = keras_reader._supported_network
    monkeypatch.setattr(keras_reader, "_supported_network", lambda m: read.append(m) or network(m))
    model = mlp()
    pipeline = PipelineModel(model, 2, 2, balance=balance, batch_size=4)
    pipeline.compile("sgd", "mse")
    pipeline.train_on_batch(X[:4], Y[:4])
    assert read == [model]


def test_strategies_of_tensorflow_are_refused():
    strategy = tf.distribute.MirroredStrategy(["CPU:0"])
    with strategy.scope():
        inside = mlp()
        with pytest.raises(ConfigurationError, match="MirroredStrategy"):
            PipelineModel(inside, **CUT)
    with pytest.raises(ConfigurationError, match="MirroredStrategy"):
        PipelineModel(inside, **CUT)
    model = PipelineModel(mlp(), **CUT)
    model.compile("sgd", "mse")
    with strategy.scope(), pytest.raises(ConfigurationError, match="MirroredStrategy"):
        model.fit(X, Y, verbose=0)
    assert trained(model)


def test_one_process_runs_the_micro_batches_of_all_replicas():
    two = PipelineModel(mlp(), num_replicas=2, **CUT)
    assert two.plan.num_replicas == 2
    assert PipelineModel(mlp(), plan=make_plan(mlp(), 2, num_replicas=2)).plan.num_replicas == 2
    with pytest.raises(ConfigurationError, match="num_replicas=0"):
        PipelineModel(mlp(), num_replicas=0, **CUT)


def test_a_pipeline_is_not_wrapped_again():
    with pytest.raises(UnsupportedModelError, match="pipeline already"):
        PipelineModel(PipelineModel(mlp(), **CUT), **CUT)


def test_data_that_is_not_dense_is_refused():
    inputs = keras.Input((None,))
    model = keras.Model(inputs, layers.Dense(1)(ops.mean(inputs, axis=1, keepdims=True)))
    model = PipelineModel(model, **CUT)
    model.compile("sgd", "mse")
    ragged = tf.ragged.constant([[1.0], [2.0, 3.0]] * (SAMPLES // 2), dtype="float64")
    with pytest.raises(UnsupportedModelError, match="an input that is a RaggedTensor"):
        model.fit(ragged, Y[:, :1], verbose=0)
    with pytest.raises(UnsupportedModelError, match="a target that is a RaggedTensor"):
        model.fit(X, ragged, verbose=0)
    assert model.fit(X, Y[:, :1], verbose=0).history


def test_inputs_of_other_shapes_than_declared():
    """Although the layers would take them."""

    def build():
        inputs = keras.Input((6,))
        return keras.Model(inputs, layers.Dense(3)(ops.mean(inputs, axis=1, keepdims=True)))

    def use(model):
        model.compile("sgd", "mse")
        with pytest.raises(ValueError, match=r"expected shape=\(None, 6\), found shape=\(\w+, 5\)"):
            model.fit(X[:, :5], Y, verbose=0)
        return trained(model)

    assert distance(*both(use, build, **CUT)) < ROUNDING


def test_training_without_any_loss():
    def use(model):
        model.compile("sgd")
        for call in (model.fit, model.evaluate, model.train_on_batch):
            with pytest.raises(ValueError, match="No loss to compute"):
                call(X, Y)
        model.compile("sgd", "mse")
        return trained(model)

    assert distance(*both(use, **CUT)) < ROUNDING


def test_layers_that_add_the_only_loss():
    def build():
        inputs = keras.Input((6,))
        x = layers.Dense(4, activity_regularizer="l2", kernel_regularizer="l2")(inputs)
        return keras.Model(inputs, layers.Dense(3)(x))

    def use(model):
        model.compile("sgd")
        return trained(model), model.evaluate(X, Y, verbose=0), model.get_weights()

    assert distance(*both(use, build, **CUT)) < ROUNDING


def test_outputs_without_a_row_for_each_sample_are_refused():
    def with_table():
        inputs = keras.Input((4, 6))
        table, _ = Table()(inputs)
        return keras.Model(inputs, [layers.Dense(2)(inputs), table])

    with pytest.raises(UnsupportedModelError, match=r"shape \(1, 4, 6\) .* num_micro_batches=1"):
        PipelineModel(with_table(), **CUT)
    plain = with_table()
    x = np.ones((4, 4, 6))
    model = PipelineModel(plain, num_stages=2, num_micro_batches=1)
    assert distance(plain.predict(x, verbose=0), model.predict(x, verbose=0)) < ROUNDING
