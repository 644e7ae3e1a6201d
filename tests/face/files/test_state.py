"""Weights and optimizer slots are those of plain Keras, whatever rank they are on."""

from __future__ import annotations

import dataclasses
import inspect
from pathlib import Path

import keras
import numpy as np
import pytest
from keras import layers

from tarantella_pp.errors import ConfigurationError, UnsupportedModelError
from tarantella_pp.models.pipeline_model import PipelineModel
from tarantella_pp.runtime.comm.communicator import Communicator, world
from tarantella_pp.runtime.weights.optimizer_state import OptimizerState
from tests.helpers.draws import more_asked_for
from tests.helpers.mpi import mpi_run
from tests.helpers.training import (
    IDS,
    X,
    Y,
    distance,
    integers,
    squared_of_largest,
    use_float64,
)
from tests.zoo.models import mlp, tied_head

pytestmark = pytest.mark.keras

ROUNDING = 1e-10
QUIET = {"batch_size": 6, "epochs": 1, "shuffle": False, "verbose": 0}
ROWS = 18  # samples for three batches of one size, for which stages are traced once


def towers():
    """Two towers whose inner layers have the same names, and weights whose results nobody needs."""

    def tower(name):
        inputs = keras.Input((6,))
        x = layers.Dense(5, activation="tanh", name="hidden")(inputs)
        more = layers.Dense(4, name="more", kernel_regularizer="l2")(x)
        return keras.Model(inputs, [layers.Dense(4, name="out")(x), more], name=name)

    inputs = keras.Input((6,))
    both = layers.Add()([tower("left")(inputs)[0], tower("right")(inputs)[0]])
    return keras.Model(inputs, layers.Dense(3)(layers.Dense(5, activation="elu")(both)))


def several():
    """Each kind of weight has an optimizer, of which one rank has not all."""
    kinds = keras.optimizers.OptimizerMap(
        keras.optimizers.SGD(0.05, momentum=0.9),
        {".*hidden/kernel": keras.optimizers.Adam(1e-2), "dense.*": keras.optimizers.Lion(1e-3)},
    )
    return keras.optimizers.MultiOptimizer(kinds)


def scaled(inner=None):
    inner = keras.optimizers.AdamW(1e-2) if inner is None else inner
    return keras.optimizers.LossScaleOptimizer(inner, dynamic_growth_steps=2)


OPTIMIZERS = {
    name: kind
    for name, kind in inspect.getmembers(keras.optimizers, inspect.isclass)
    if issubclass(kind, keras.optimizers.Optimizer)
    and name not in ("Optimizer", "LossScaleOptimizer", "MultiOptimizer")
} | {
    "several": several,
    "scaled": scaled,
    "scaled several": lambda: scaled(several()),
    "momentum": lambda: keras.optimizers.SGD(0.05, momentum=0.9, nesterov=True),
    "accumulating": lambda: keras.optimizers.AdamW(1e-2, gradient_accumulation_steps=2),
    "averaging": lambda: keras.optimizers.Adam(1e-2, use_ema=True, ema_momentum=0.5),
    "clipped": lambda: keras.optimizers.Adam(1e-2, global_clipnorm=0.05),
    "decaying": lambda: keras.optimizers.Adam(
        keras.optimizers.schedules.ExponentialDecay(0.05, 2, 0.5), amsgrad=True
    ),
}

# Each kind of state once: two optimizers in one, slots of no weight, none, steps between updates.
ON_RANKS = ["Muon", "Nadam", "SGD", "accumulating", "averaging", "scaled several"]
if more_asked_for():
    ON_RANKS = sorted(OPTIMIZERS)

TIED = "tied weights"


def data_of(name):
    x, y = (IDS, integers(6, 5, seed=8)) if name == TIED else (X, Y)
    return x[:ROWS], y[:ROWS]


def compiled_as(name, model):
    if name == TIED:
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(keras.optimizers.Adam(1e-2), loss)
    else:
        model.compile(OPTIMIZERS[name](), "mse")
    return model


def built(name):
    keras.utils.set_random_seed(1)
    return tied_head() if name == TIED else towers()


def whole(name):
    """A model of plain Keras, trained without a break."""
    model = compiled_as(name, built(name))
    model.optimizer.build(model.trainable_variables)
    model.run_eagerly = True
    for _ in range(2):  # the end of `fit` makes weights the averages that some optimizers keep
        model.fit(*data_of(name), **QUIET)
    return model


def state_of(model):
    return [*model.get_weights(), *(variable.numpy() for variable in model.optimizer.variables)]


def begun(name, folder, **options):
    """Trains as a pipeline and saves."""
    model = compiled_as(name, PipelineModel(built(name), num_micro_batches=2, **options))
    model.fit(*data_of(name), **QUIET)
    model.save(folder / f"{name}.keras")
    model.save_weights(folder / f"{name}.weights.h5")


def resumed(name, folder, **options):
    """Loads what was saved and trains on as a pipeline; returns how many numbers are in slots."""
    loaded = keras.saving.load_model(folder / f"{name}.keras")
    again = PipelineModel(loaded, num_micro_batches=2, **options)
    assert again.optimizer is loaded.optimizer  # wrapping has compiled it
    if name in ("Adam", "several", "scaled"):
        again.compile(loaded.optimizer, "mse")
    again.save(folder / f"{name}.loaded.keras")
    again.fit(*data_of(name), **QUIET)
    again.save(folder / f"{name}.on.keras")
    if name == "several":  # back by the file of weights, with slots that have gone on meanwhile
        again.load_weights(folder / f"{name}.weights.h5")
        again.fit(*data_of(name), **QUIET)
        again.save(folder / f"{name}.on.keras")
    return sum(int(np.prod(variable.shape)) for variable in again.optimizer.variables)


def check(name, folder, slots):
    """What plain Keras reads, and makes of it; how many numbers each rank has in slots."""
    files = [folder / f"{name}{part}.keras" for part in ("", ".loaded", ".on")]
    stock, loaded, on = map(keras.saving.load_model, files)
    assert distance(state_of(stock), state_of(loaded)) == 0, name
    stock.run_eagerly = True
    stock.fit(*data_of(name), **QUIET)
    expected = state_of(whole(name))
    for model in (stock, on):
        assert distance(state_of(model), expected) < ROUNDING, name
    every = sum(int(np.prod(variable.shape)) for variable in stock.optimizer.variables)
    assert len(slots) == 1 or max(slots) < every or every < 10, name


def test_a_break_changes_nothing_with_several_stages_in_one_process(tmp_path):
    begun("several", tmp_path, num_stages=3)
    check("several", tmp_path, [resumed("several", tmp_path, num_stages=3)])


def begin_all(folder, names, stages):
    use_float64()
    if world().rank == 1:
        mlp()  # so that Keras counts its layers otherwise
    for name in names:
        begun(name, Path(folder), num_stages=stages)


def resume_all(folder, names, stages, begin):
    use_float64()
    if begin:
        begin_all(folder, names, stages)
    return [resumed(name, Path(folder), num_stages=stages) for name in names]


@pytest.mark.slow
@pytest.mark.mpi
@pytest.mark.parametrize(("stages", "names"), [(4, ["several", "Adafactor", TIED]), (2, ON_RANKS)])
def test_a_break_changes_nothing_on_several_ranks(tmp_path, stages, names):
    """In new processes, or in the same ones."""
    given = str(tmp_path), names, stages
    if stages == 4:
        mpi_run(2, begin_all, *given, timeout=300).check()
    run = mpi_run(2, resume_all, *given, stages == 2, timeout=550).check()
    for name, slots in zip(names, zip(*run.results, strict=True), strict=True):
        check(name, tmp_path, slots)


@pytest.mark.slow
def test_a_wrapped_model_is_compiled_as_it_was():
    uneven = {**QUIET, "batch_size": 8}  # a last execution of one step, with fewer samples

    def compiled():
        keras.utils.set_random_seed(1)
        model, metrics = mlp(), ["mae", keras.metrics.RootMeanSquaredError()]
        model.compile("adam", "huber", loss_weights=2.0, metrics=metrics, steps_per_execution=2)
        model.fit(X, Y, **uneven)
        return model

    expected, plain = compiled(), compiled()
    model = PipelineModel(plain, num_stages=2, num_micro_batches=2)
    assert model.optimizer is plain.optimizer
    assert model.steps_per_execution == 2
    for _ in range(2):
        told = [m.fit(X, Y, **uneven).history for m in (expected, model)]
        assert distance(*told) < ROUNDING
        told = [m.evaluate(X, Y, return_dict=True, verbose=0) for m in (expected, model)]
        assert distance(*told) < ROUNDING
    assert distance(state_of(expected), state_of(model)) < ROUNDING
    assert not PipelineModel(mlp(), num_stages=2).compiled


def test_what_a_pipeline_cannot_be_compiled_with_is_refused_when_it_is_wrapped():
    plain = mlp()
    plain.compile("sgd", squared_of_largest)
    with pytest.raises(ConfigurationError, match="squared_of_largest"):
        PipelineModel(plain, num_stages=2, num_micro_batches=2, schedule="1f1b")


def test_an_optimizer_for_other_weights_is_refused_by_name():
    """As one rank of several sees it; the others hear of it."""
    plain = mlp()
    model = PipelineModel(plain, num_stages=2)
    weights = model.trainable_variables

    class Alone(Communicator):
        size = 2

    table = dataclasses.replace(model._engine.weights.table, ranks=Alone())
    foreign = keras.optimizers.Adam()
    foreign.build(mlp().trainable_variables)
    with pytest.raises(
        ConfigurationError, match=r"built for other weights, .* Pass a new optimizer"
    ):
        OptimizerState(foreign, weights, table, nothing)
    with pytest.raises(UnsupportedModelError, match=r"OddOptimizer .* divided among ranks"):
        OptimizerState(OddOptimizer(0.1), weights, table, nothing)


def nothing():
    """No weights change behind the last step."""


class OddOptimizer(keras.optimizers.SGD):
    """Keeps its slots where nobody can tell whose they are."""

    def build(self, variables):
        super().build(variables)
        self.slots_by_name = {v.path: self.add_variable_from_reference(v) for v in variables}
