"""Weights and optimizer slots are those of plain Keras, whatever rank they are on."""

import functools
import inspect
import re
from pathlib import Path

import keras
import numpy as np
import pytest
from keras import layers

from tarantella_pp.models.pipeline_model import PipelineModel
from tarantella_pp.runtime.comm.communicator import world
from tests.helpers import training
from tests.helpers.draws import more_asked_for
from tests.helpers.files import error_of
from tests.helpers.mpi import mpi_run
from tests.helpers.training import IDS, ROUNDING, X, Y, distance, integers, state_of
from tests.zoo.models import mlp, tied_head

pytestmark = [pytest.mark.keras, pytest.mark.usefixtures("untried")]

QUIET = {"batch_size": 6, "epochs": 1, "shuffle": False, "verbose": 0}
ROWS = 12  # samples for two batches of one size, for which stages are traced once


def towers():
    """Two towers whose inner layers have the same names, and weights whose results nobody needs."""

    def tower(name):
        inputs = keras.Input((6,))
        x = layers.Dense(5, activation="tanh", name="hidden")(inputs)
        more = layers.Dense(4, name="more", kernel_regularizer="l2")(x)
        return keras.Model(inputs, [layers.Dense(4, name="out")(x), more], name=name)

    inputs = keras.Input((6,))
    both = layers.Add()([tower("left")(inputs)[0], tower("right")(inputs)[0]])
    return keras.Model(inputs, layers.Dense(3)(both))


def several():
    """Kinds of weights have optimizers of their own, of which one rank has not all; scaled.

    Some slots are unlike weights.
    """
    kinds = keras.optimizers.OptimizerMap(
        keras.optimizers.SGD(0.05, momentum=0.9, nesterov=True),
        {
            ".*hidden/kernel": keras.optimizers.Adam(1e-2, amsgrad=True),
            "dense.*": keras.optimizers.Adafactor(1e-2),
        },
    )
    several = keras.optimizers.MultiOptimizer(kinds)
    return keras.optimizers.LossScaleOptimizer(several, dynamic_growth_steps=2)


def averaging():
    """The break comes between two updates; has a slot of no weight."""
    rate = keras.optimizers.schedules.ExponentialDecay(0.05, 2, 0.5)
    return keras.optimizers.Nadam(
        rate, use_ema=True, ema_momentum=0.5, global_clipnorm=0.05, gradient_accumulation_steps=3
    )


SEVERAL, TIED = "several", "tied weights"
OPTIMIZERS = {
    name: kind
    for name, kind in inspect.getmembers(keras.optimizers, inspect.isclass)
    if issubclass(kind, keras.optimizers.Optimizer)
    and name not in ("Optimizer", "LossScaleOptimizer", "MultiOptimizer")
} | {SEVERAL: several, TIED: averaging}
NAMES = sorted(OPTIMIZERS) if more_asked_for() else [SEVERAL, TIED]


def data_of(name):
    x, y = (IDS, integers(6, 5, seed=8)) if name == TIED else (X, Y)
    return x[:ROWS], y[:ROWS]


def compiled_as(name, model):
    loss = training.from_logits() if name == TIED else "mse"
    return training.compiled(model, OPTIMIZERS[name](), loss)


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
    if name == SEVERAL:
        again.compile(loaded.optimizer, "mse")
    again.save(folder / f"{name}.loaded.keras")
    again.fit(*data_of(name), **QUIET)
    again.save(folder / f"{name}.on.keras")
    if name == SEVERAL:  # back by the file of weights, with slots that have gone on meanwhile
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
    assert max(slots) < every or every < 10, name


class OddOptimizer(keras.optimizers.SGD):
    """Keeps its slots where nobody can tell whose they are."""

    def build(self, variables):
        super().build(variables)
        self.slots_by_name = {v.path: self.add_variable_from_reference(v) for v in variables}


def begin_and_resume(folder, names):
    training.use_float64()
    slots = []
    for name in names:
        if world().rank == 1:
            mlp()  # so that Keras counts its layers otherwise
        stages = 4 if name == TIED else 2  # two on each rank, or one
        begun(name, Path(folder), num_stages=stages)
        slots.append(resumed(name, Path(folder), num_stages=stages))
    # Optimizers that cannot be divided among ranks
    model, foreign = PipelineModel(mlp(), num_stages=2), keras.optimizers.Adam()
    foreign.build(mlp().trainable_variables)
    kinds = foreign, OddOptimizer(0.1)
    return slots, [error_of(functools.partial(model.compile, kind, "mse")) for kind in kinds]


@pytest.mark.slow
@pytest.mark.mpi
def test_a_break_changes_nothing_on_several_ranks(tmp_path):
    results = mpi_run(2, begin_and_resume, str(tmp_path), NAMES, timeout=300).check().results
    slots, refused = zip(*results, strict=True)
    for foreign, odd in refused:
        assert re.search("built for other weights, .* Pass a new optimizer", foreign)
        assert re.search("OddOptimizer .* divided among ranks", odd)
    for name, of_ranks in zip(NAMES, zip(*slots, strict=True), strict=True):
        check(name, tmp_path, of_ranks)


@pytest.mark.slow
def test_a_wrapped_model_is_compiled_as_it_was():
    uneven = {**QUIET, "batch_size": 8}  # a last execution of one step, with fewer samples

    def compiled():
        keras.utils.set_random_seed(1)
        model, metrics = mlp(), ["mae", keras.metrics.RootMeanSquaredError()]
        model.compile("adam", "huber", loss_weights=2.0, metrics=metrics, steps_per_execution=2)
        model.run_eagerly = True
        model.fit(X, Y, **uneven)
        return model

    expected, plain = compiled(), compiled()
    model = PipelineModel(plain, num_stages=2, num_micro_batches=2)
    assert model.optimizer is plain.optimizer
    assert model.steps_per_execution == 2
    every = expected, model
    told = [[m.fit(X, Y, **uneven).history, m.evaluate(X, Y, verbose=0)] for m in every]
    assert distance(*told) < ROUNDING
    assert distance(*map(state_of, every)) < ROUNDING
    assert not PipelineModel(mlp(), num_stages=2).compiled
