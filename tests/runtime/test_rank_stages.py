"""What fails before anything is trained fails on all ranks alike, and they train on."""

import functools
import re

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers, ops

from tarantella_pp.models.pipeline_model import PipelineModel
from tarantella_pp.runtime.comm.communicator import world
from tests.helpers.files import error_of
from tests.helpers.mpi import mpi_run
from tests.helpers.training import compiled, distance, sgd, use_float64

pytestmark = pytest.mark.keras

X, Y = np.random.default_rng(3).normal(size=(2, 6, 4))


class Fails(layers.Layer):
    """Cannot be differentiated, or run, as is seen in training only."""

    def call(self, x, training=None):
        if training:
            raise ValueError("not in training")
        return x


ODD = {"mixes early": lambda: layers.Lambda(lambda x: x - ops.mean(x, axis=0)), "fails late": Fails}


def model_of(early=None, late=None):
    """A model with a layer in the first or in the last of three stages, and a link past one."""
    keras.utils.set_random_seed(1)
    inputs = keras.Input((4,))
    x = first = layers.Dense(4, activation="tanh")(layers.Dropout(0.3, seed=2)(inputs))
    x = x if early is None else early(x)
    x = layers.Dense(4, activation="tanh")(x)
    x = layers.Dense(4, activation="tanh")(x) + first
    x = x if late is None else late(x)
    return keras.Model(inputs, layers.Dense(4)(layers.Dense(4)(x)))


def piped(model):
    made = PipelineModel(model, num_stages=4, num_micro_batches=3, schedule="1f1b")
    return compiled(made, sgd(), "mse", metrics=["mae"])


def outcome(model):
    logs = model.fit(X, Y, epochs=2, shuffle=False, verbose=0).history
    return {"logs": logs, "weights": [w.tolist() for w in model.get_weights()]}


UNSEEDED = {
    "layer": "Layer 'odd' has other constants",
    "captured": "Layer 'odd' has other constants",
    "loss": "The loss has other constants",
    "metric": "A metric has other constants",
    "regularizer": "The regularizer of .*kernel' has other constants",
    "variable": "Layer 'odd' has other constants",
    "rounding": "^$",
    "infinite": "Layer 'odd' has other constants",
    "slope": "Layer 'odd' has other constants",
    "table": "Layer 'odd' has other constants",
    "smallest": "^$",
    "values": "Replicas add up their losses.*num_replicas=2",
    "fails": "^TypeError: of its own$",
    "fails, whole": "^TypeError: of its own$",
}
"""What is said where each rank has drawn numbers of its own."""


def fails(weight):
    raise TypeError("of its own")


def unseeded(where):
    own = 1.0 + world().rank
    large = tf.constant(np.full((200, 1), own if where == "captured" else 1.0))
    drawn = tf.Variable(own if where == "variable" else 1.0, dtype="float64")
    factor = {"layer": own, "rounding": 1 + 1e-12 * own}.get(where, 1.0)
    order = [1, 2, 3][:: (-1) ** world().rank if where == "table" else 1]
    table = layers.IntegerLookup(vocabulary=order)
    more = {
        "infinite": lambda x: x + np.where(np.arange(4) == own, -np.inf, 0),
        "slope": lambda x: tf.nn.leaky_relu(x, 0.1 * own),
        "table": lambda x: x + ops.cast(table(ops.cast(x, "int64")), x.dtype),
        "smallest": lambda x: x + ops.cast(ops.argmin(x, -1, keepdims=True), x.dtype),
    }.get(where, ops.relu)
    odd = layers.Lambda(lambda x: factor * drawn * more(x) * large[0, 0], name="odd")
    stages = 1 + (where == "fails")
    model = PipelineModel(keras.Sequential([keras.Input((4,)), odd, layers.Dense(4)]), stages)
    if where == "regularizer":
        model.trainable_variables[0].regularizer = lambda w: own * ops.sum(w)
    elif "fails" in where:
        model.trainable_variables[0].regularizer = fails
    elif where == "values":
        model.compile(sgd(), keras.losses.MeanSquaredError("none"))
        return error_of(lambda: model.fit(X, Y, verbose=0))

    def of(place):
        return lambda y, p: ops.mean((own if where == place else 1.0) * (y - p) ** 2, -1)

    model.compile(sgd(), of("loss"), metrics=[of("metric")])
    return error_of(lambda: model.fit(X, Y, verbose=0)).rpartition("of its weights: ")[2]


def attempts():
    """What is said of each odd layer, wherever it is, and what other models train meanwhile."""
    use_float64()
    texts = {}
    for name, make in ODD.items():
        model = piped(model_of(**{name.split()[1]: make()}))
        calls = model.train_on_batch, functools.partial(model.fit, verbose=0)
        texts[name] = [error_of(lambda c=c: c(X, Y)).split(": ", 1) for c in calls]
        if name.startswith("fails"):
            model.predict(X, verbose=0)
    return texts, outcome(piped(model_of())), {where: unseeded(where) for where in UNSEEDED}


@pytest.mark.slow
@pytest.mark.mpi
@pytest.mark.usefixtures("float64")
def test_all_ranks_refuse_alike_and_train_on():
    first, second = mpi_run(2, attempts, timeout=300, env={"TNT_TIMEOUT": "60"}).check().results
    assert [name for name, said in first[0].items() if said[0] != [""]] == [*ODD]
    for name, said in first[0].items():
        other = second[0][name]
        assert said == [said[0]] * 2, name
        assert other == [other[0]] * 2, name
        (own, text), (kind, told) = sorted([said[0], other[0]], key=lambda each: len(each[1]))
        expected = "ValueError" if name.startswith("fails") else "UnsupportedModelError"
        assert own == expected
        assert kind == ("ConfigurationError" if name.startswith("fails") else expected)
        shown = re.escape(text if kind == own else f"{own}: {text}")
        what = r"stage \d" if name.startswith("fails") else "its stages"  # when it is tried out
        assert re.search(f"Rank [01] could not run {what}: {shown}", told)
    assert first[1:] == second[1:]
    for where, expected in UNSEEDED.items():
        assert re.search(expected, first[2][where]), where
    assert distance(outcome(piped(model_of())), first[1]) < 1e-13
