"""Kinds of data and options of `fit`, `evaluate` and `predict`: as plain Keras takes them."""

import functools
import itertools

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers, ops

from tarantella_pp.models.pipeline_model import PipelineModel
from tarantella_pp.schedule import TRAINING_NAMES, ScheduleSpec
from tests.helpers import training
from tests.helpers.training import ROUNDING, WEIGHTS, Case, X, Y, distance, make, regression, sgd
from tests.zoo.models import chain, mlp

pytestmark = pytest.mark.keras

CUT = {"num_stages": 2, "num_micro_batches": 3}
MLP = Case(mlp, X, Y, regression(metrics=["mae"]))
"""For what compiles no model anew, which all tests would see."""


@training.compiled_once
def shared_mlp(**options):
    """A plain model, or a pipeline, for most tests: compiling takes longer than training."""
    return make(MLP, **options)


def both(use, case=MLP, **options):
    """What `use` returns for a model of plain Keras, and for a pipeline."""
    if case is MLP:
        return use(shared_mlp()), use(shared_mlp(**CUT))
    return use(make(case)), use(make(case, **{**CUT, "num_micro_batches": 2, **options}))


def fitted(model, **fit):
    """Trains a model; `fit` holds values, or functions that make new ones."""
    made = {name: v() if callable(v) else v for name, v in fit.items()}
    made = {"verbose": 0, "epochs": 2, "shuffle": False, **made}
    return model.fit(**made).history, model.get_weights()


def generator():
    for i in itertools.cycle((0, 8, 16)):
        part = slice(i, i + 8)
        yield X[part], Y[part], WEIGHTS[part]


def dataset():
    return tf.data.Dataset.from_tensor_slices((X, Y, WEIGHTS)).batch(8)


def endless_length():
    return dataset().filter(lambda *_: True)


DATA = {
    "tf.data of unknown length": {"x": endless_length, "validation_data": endless_length},
    "tf.data that ends too early": {"x": dataset, "steps_per_epoch": 5},
    "tf.data over epochs": {"x": lambda: dataset().repeat(), "steps_per_epoch": 2},
    "generator": {"x": generator, "steps_per_epoch": 3},
    "validation_data": {
        "x": X, "y": Y, "sample_weight": WEIGHTS, "batch_size": 8, "validation_steps": 1,
        "validation_data": (X[:9], Y[:9], WEIGHTS[:9]), "validation_batch_size": 6,
    },
    "one row": {"x": X[:1], "y": Y[:1]},
    "weights of samples, between which other data run": {
        "x": X, "y": Y, "batch_size": 8, "sample_weight": WEIGHTS, "steps_per_epoch": 1,
        "validation_data": (X, Y),
    },
}  # fmt: skip


@pytest.mark.parametrize("kind", DATA)
def test_data(kind):
    assert distance(*both(functools.partial(fitted, **DATA[kind]))) < ROUNDING


def test_without_a_batch_nothing_is_trained_and_validation_says_nothing():
    """Not a loss of 0, which would be the best of all; Keras' eager steps end with an error."""
    empty, model = dataset().take(0), make(MLP, **CUT)
    with pytest.warns(UserWarning, match="ran out of data"):
        assert fitted(model, x=empty)[0] == {}
    assert model.evaluate(empty, return_dict=True) == {}
    told = fitted(model, x=X[:6], y=Y[:6], epochs=1, validation_data=empty)[0]
    assert set(told) == {"loss", "mae"}


@pytest.mark.parametrize("name", ["known", "unknown", "shared with validation"])
def test_data_sets_are_shuffled_as_in_keras_in_all_epochs(name):
    """Each iterator draws another order, and Keras makes some that it does not read."""

    def shuffled():
        samples = tf.data.Dataset.from_tensor_slices((X, Y, WEIGHTS))
        if name == "unknown":
            samples = samples.filter(lambda *_: True)
        return samples.shuffle(len(X), seed=3).batch(8)

    def train(model):
        data = shuffled()
        held_out = data.take(2) if name == "shared with validation" else None
        return fitted(model, x=data, validation_data=held_out, epochs=3)

    assert distance(*both(train)) < ROUNDING


def taught(model, **fit):
    two = {"batch_size": 8, "shuffle": False, "verbose": 0}  # steps of one size
    return model.fit(X[:16], Y[:16], **two, **fit).history


def test_every_schedule_gives_the_numbers_of_keras():
    plain, model = make(MLP), make(MLP, num_stages=4, num_micro_batches=2)
    start, expected = model.get_weights(), [taught(plain), plain.get_weights()]
    for schedule in TRAINING_NAMES:
        # The compiled stages know nothing of the schedule, and are not compiled again for it.
        model._engine.schedules.spec = ScheduleSpec.of(schedule, 4, 1)
        found = [taught(training.begin_again(model, start)), model.get_weights()]
        assert distance(expected, found) < ROUNDING, schedule


def between_trainings(model):
    found = [model.predict(X[:16], batch_size=8, verbose=0)]
    found += [model.evaluate(X[:16], Y[:16], batch_size=8, verbose=0)]
    found.append(taught(model))
    model.compile(training.adamw(), "mae")
    found.append(taught(model))
    model.optimizer.learning_rate = 0.5
    return [*found, taught(model), model.get_weights()]


def frozen_and_thawed(model):
    """Dense layers and statistics, while a rate changes."""
    found = [taught(model)]
    for trainable, rate in ((False, 0.1), (True, 0.5)):
        for layer in model.layers[:3]:
            layer.trainable = trainable
        model.layers[3].rate = rate
        model.compile("sgd", "mse")
        found += [taught(model), model.get_weights()]
    return found


def normalized():
    norm = layers.BatchNormalization(scale=False, center=False)
    return chain((6,), layers.Dense(5), norm, layers.Dropout(0.5, seed=3), layers.Dense(3))


def functions_forced(model):
    def thaw(epoch, logs):
        model.layers[1].trainable = epoch > 0
        model.make_train_function(force=True)

    model.optimizer.build(model.trainable_variables)
    thaws = keras.callbacks.LambdaCallback(on_epoch_begin=thaw)
    return taught(model, epochs=2, callbacks=[thaws]), model.get_weights()


def steps_by_hand(model):
    data = (tf.constant(X[:8]), tf.constant(Y[:8]))
    logs = [model.train_step(data), model.train_step(data), model.test_step(data)]
    found = [{name: float(value) for name, value in log.items()} for log in logs]
    outputs = np.array(model.predict_step(data[:1]))
    return found, outputs, model.get_weights()


def losses_by_hand(model):
    outputs = model(X)
    loss = model.compute_loss(X, tf.constant(Y), outputs)
    logs = model.compute_metrics(X, tf.constant(Y), outputs)
    return float(loss), {name: float(value) for name, value in logs.items()}


def compiled_as_it_is(model):
    first = taught(model)
    model.compile_from_config(model.get_compile_config())
    return first, taught(model), model.get_weights()


def without_an_optimizer(model):
    model.compile(optimizer=None, loss="mse", metrics=["mae"])
    return model.evaluate(X, Y, verbose=0), model.predict(X, verbose=0)


def nothing_trained(model):
    found = [model.predict(X, verbose=0), model.evaluate(X, Y, verbose=0), taught(model)]
    assert int(model.optimizer.iterations) == 0
    return [*found, model.get_weights()]


def without_weights():
    drop, tanh = layers.Dropout(0.5, seed=3), layers.Activation("tanh")
    return chain((6,), drop, layers.Rescaling(2.0), tanh, lambda x: x[:, :3])


def frozen():
    model = mlp()
    model.trainable = False
    model.layers[-1].trainable = True  # Keras trains nothing of a model frozen as a whole
    return model


def other_shapes(model):
    """Those that were not declared, although the layers would take them."""
    with pytest.raises(ValueError, match=r"expected shape=\(None, 6\), found shape=\(\w+, 5\)"):
        model.fit(X[:, :5], Y, verbose=0)
    return taught(model)


def mean_of_all():
    return chain((6,), lambda x: ops.mean(x, axis=1, keepdims=True), layers.Dense(3))


def lengths():
    rng = np.random.default_rng(0)
    for length in (5, 3, 3):
        yield rng.integers(0, 6, size=(6, length)).astype("int32"), rng.normal(size=(6, 2))


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


def sequences(model):
    """Of any length, and with losses in training only."""
    signature = (tf.TensorSpec([None, None], tf.int32), tf.TensorSpec([None, 2], tf.float64))
    data = tf.data.Dataset.from_generator(lengths, output_signature=signature)
    told = model.fit(data, verbose=0).history
    return told, model.evaluate(data, verbose=0), model.get_weights()


BINARY, SPARSE = "binary_crossentropy", "sparse_categorical_crossentropy"
LABELS, LARGE = training.LABELS, keras.initializers.RandomNormal(0, 40, seed=1)
ONE_HOT = np.eye(3)[LABELS]


def sure_model():
    """Says probabilities of 0 and 1, of which nothing can be learned; of their logits it can."""
    inputs, ids = keras.Input((4,)), keras.Input((4,), dtype="int32")
    # Comes from the first stage, and is used in the second, too. Both models have logs in the order
    # of names, which must not depend on how many layers there were before.
    early = layers.Dense(3, "softmax", kernel_initializer=LARGE, name="early")(inputs)
    x = layers.Dense(6, activation="tanh")(layers.Dense(5, activation="tanh")(inputs))
    logits = layers.Dense(3, kernel_initializer=LARGE)(x)
    other_axis = layers.Softmax(axis=1)(layers.Reshape((3, 1))(logits))
    both = layers.Concatenate()([x, early])
    sigmoid = layers.Activation("sigmoid")(layers.Dense(3, kernel_initializer=LARGE)(both))
    words = layers.Embedding(5, 4, mask_zero=True, embeddings_initializer=LARGE)(ids)
    masked = layers.Dense(3, activation="softmax", name="masked")(words)
    outputs = [early, ops.softmax(logits), layers.Flatten()(other_axis), sigmoid, masked]
    return keras.Model([inputs, ids], outputs)


SURE = Case(
    sure_model,
    [training.floats(4), training.integers(5, 4, seed=3)],
    [LABELS, ONE_HOT, ONE_HOT, ONE_HOT, training.integers(3, 4, seed=4)],
    lambda: {
        "optimizer": sgd(),
        "loss": [SPARSE, BINARY, "categorical_crossentropy", BINARY, SPARSE],
        "metrics": [[], [BINARY], [], [], []],
    },
    batch=training.SAMPLES,
)


def sure(model):
    found = training.finish(model, SURE)
    for output in found["predictions"][:3]:
        assert np.mean(np.max(output, axis=1) > 1 - 1e-9) > 0.5
    return [[*found.pop("history").values()], [*found.pop("evaluation").values()], found]


def case(build=mlp, **more):
    return Case(build, X, Y, regression(**more))


ANEW = case(metrics=["mae"])
USES = [
    (steps_by_hand, MLP, {}),
    (losses_by_hand, MLP, {}),
    (without_an_optimizer, ANEW, {}),
    (compiled_as_it_is, ANEW, {}),
    (nothing_trained, case(without_weights), {"num_micro_batches": 1}),
    (other_shapes, case(mean_of_all), {}),
]
SLOW = [
    (between_trainings, ANEW, {}),
    (functions_forced, ANEW, {}),
    (nothing_trained, case(frozen), {}),
    (frozen_and_thawed, case(normalized), {"num_micro_batches": 1}),
    (sure, SURE, {}),
    (sequences, Case(any_length, None, None, regression()), {}),
]


@pytest.mark.filterwarnings("ignore:The model does not have any trainable weights")
@pytest.mark.parametrize(
    ("use", "case", "options"),
    [*USES, *(pytest.param(*slow, marks=pytest.mark.slow) for slow in SLOW)],
)
def test_what_users_do_gives_the_numbers_of_keras(use, case, options):
    plain, ours = both(use, case, **options)
    assert distance(plain, ours) < ROUNDING


def test_prediction_without_compilation_and_of_a_layer_that_is_another_since_evaluation():
    keras.utils.set_random_seed(1)
    model = mlp()
    pipeline = PipelineModel(model, num_stages=2)
    for activation in (None, keras.ops.tanh):
        model.layers[-1].activation = activation
        found = [each.predict(X[:16], batch_size=8, verbose=0) for each in (model, pipeline)]
        assert distance(*found) < ROUNDING
        for each in (model, pipeline):
            each.compile("sgd", "mse", jit_compile=False)
            each.evaluate(X[:16], Y[:16], batch_size=8, verbose=0)


def test_a_file_gets_a_line_for_each_epoch_and_a_terminal_a_bar(monkeypatch, capsys):
    model = shared_mlp(**CUT)
    for terminal, backs in (("0", False), ("1", True)):
        monkeypatch.setenv("TNT_TERMINAL", terminal)
        model.fit(X[:8], Y[:8], batch_size=4, epochs=2)
        shown = capsys.readouterr().out
        assert shown.count("Epoch") == 2
        assert ("\b" in shown) == backs
        assert "loss: " in shown
