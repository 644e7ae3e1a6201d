"""`Model` and `Sequential`: pipelines of one stage, with the face of a Keras model."""

import keras
import numpy as np
import pytest

import tarantella_pp as tnt
from tarantella_pp.errors import ConfigurationError, TarantellaError
from tarantella_pp.runtime.comm.communicator import world
from tests.helpers import training
from tests.helpers.files import refused
from tests.helpers.mpi import mpi_run
from tests.helpers.training import X, Y, adamw, compiled, distance
from tests.zoo.models import mlp

pytestmark = [pytest.mark.keras, pytest.mark.usefixtures("float64")]


def test_layers_make_a_model():
    layers = [keras.Input((3,)), keras.layers.Dense(4), keras.layers.Dense(2)]
    model = tnt.Sequential(layers, name="stack", num_micro_batches=2)
    assert model.name == "stack"
    assert model.output_shape == (None, 2)
    assert model.plan.num_micro_batches == 2
    assert type(tnt.Sequential.from_config(model.get_config())) is keras.Sequential
    model = tnt.Sequential([keras.layers.Dense(4)], inputs=keras.Input((3,)))
    assert model.output_shape == (None, 4)
    assert isinstance(model.get_config()["layers"], list)


class Residual(keras.Model):
    """A subclassed model that adds losses of its own, and calls layers by the data's structure."""

    def __init__(self):
        super().__init__()
        self.first = keras.layers.Dense(6, "tanh", kernel_regularizer="l2")
        self.second = keras.layers.Dense(6, activity_regularizer="l2")
        self.unused = keras.layers.Dense(2)
        self.last = keras.layers.Dense(3)

    def build(self, shape):
        self.unused.build((None, 6))
        super().build(shape)

    def call(self, inputs, training=False):
        hidden = self.first(inputs["a"])
        hidden = hidden + self.second(hidden)
        self.add_loss(0.01 * keras.ops.mean(keras.ops.square(hidden)))
        return {"q": keras.ops.sum(hidden, axis=-1, keepdims=True), "p": self.last(hidden)}


TARGETS = {"p": Y, "q": Y[:, :1]}


def with_inputs(model, **options):
    return tnt.Model(model, inputs={"a": keras.Input(X.shape[1:], name="a")}, **options)


def residual(wrap):
    keras.utils.set_random_seed(2)
    model = Residual()
    model({"a": X[:1]})  # both ways draw the same weights
    return compiled(wrap(model), adamw(), {"p": "mse", "q": "mae"}, metrics={"p": ["mae"]})


def numbers_of(model):
    """What training with two sizes of batches, evaluation and prediction give."""
    weights = np.linspace(0.5, 2.0, len(X))
    quiet = {"shuffle": False, "verbose": 0}
    few = {"a": X[:7]}, {k: y[:7] for k, y in TARGETS.items()}  # the last one for one rank alone
    found = {"few": model.fit(*few, batch_size=3, sample_weight=weights[:7], **quiet).history}
    x, y = {"a": X[:16]}, {k: y[:16] for k, y in TARGETS.items()}  # for batches of one size
    found["more"] = model.fit(x, y, batch_size=8, epochs=2, **quiet).history
    found["evaluated"] = model.evaluate(x, y, batch_size=8, return_dict=True, verbose=0)
    predicted = model.predict({"a": X}, batch_size=5, verbose=0)
    found["predicted"] = [predicted["p"].tolist(), predicted["q"].tolist()]
    found["weights"] = sorted(w.tolist() for w in map(np.ravel, model.get_weights()))
    return found


def train_subclassed():
    training.use_float64()
    model = residual(lambda model: with_inputs(model, num_micro_batches=2))
    found = {"plain": numbers_of(model), "shape": [model.plan.num_stages, model.plan.num_replicas]}
    called, predicted = model({"a": X}), model.predict({"a": X}, verbose=0)
    found["called"] = [np.asarray(p["p"]).tolist() for p in (called, predicted)]
    found["refused"] = refused(lambda: model({"a": X}, training=True))
    if world().rank == 0:  # each rank has all weights
        model.get_weights()
    return found


@pytest.mark.slow
@pytest.mark.mpi
def test_subclassed_models_train_on_two_ranks_as_in_one_process():
    first, second = mpi_run(2, train_subclassed, timeout=240).check().results
    assert first == second
    assert first["shape"] == [1, 2]
    plain = numbers_of(residual(lambda model: model))
    assert distance(plain, first["plain"], "weights") < 1e-10
    assert distance(*first["called"]) < 1e-13
    assert "would part from its replicas" in first["refused"]


class Eager(keras.Model):
    def call(self, inputs):
        return inputs.numpy()


@pytest.mark.parametrize(
    ("wrap", "message"),
    [
        (lambda: tnt.Model(Eager(), inputs=keras.Input((2,))), r"'eager\w*' cannot be called with"),
        (lambda: tnt.Model(mlp(), inputs=keras.Input((2,))), "knows its inputs"),
        (lambda: tnt.Model(Eager()), r"tnt\.Model\(model, inputs=keras\.Input"),
        (lambda: tnt.Sequential([keras.layers.Dense(4)]), r"Begin it with a keras\.Input"),
    ],
)
def test_what_is_refused_says_why(wrap, message):
    with pytest.raises(TarantellaError, match=message):
        wrap()


@pytest.mark.parametrize(
    ("method", "option", "message"),
    [
        ("fit", "tnt_micro_batch_size", "whole batch"),
        ("evaluate", "tnt_distribute_dataset", "Input"),
        ("predict", "batchsize", "'batchsize'"),
        ("save", "tnt_save_all_devices", "One file"),
    ],
)
def test_options_that_there_are_not(method, option, message):
    with pytest.raises(TypeError, match=rf"Model.{method}\(\) .*{message}"):
        getattr(tnt.Model(mlp()), method)("m.keras" if method == "save" else X, **{option: 8})
    with pytest.raises(TypeError, match=r"Model has no option 'num_pipeline_stages'.*num_mi"):
        tnt.Model(mlp(), num_pipeline_stages=2)


def test_compiled_models_stay_compiled_and_a_plan_of_several_stages_is_refused():
    plain = residual(lambda model: model)
    assert with_inputs(plain).optimizer is plain.optimizer
    assert tnt.Model(mlp(), plan=tnt.make_plan(mlp(), 1)).plan.num_stages == 1
    with pytest.raises(ConfigurationError, match="a plan of 2 stages"):
        tnt.Model(mlp(), plan=tnt.make_plan(mlp(), 2))
