"""Weights and optimizer slots are those of plain Keras, whatever rank they are on."""

from __future__ import annotations

import inspect
from pathlib import Path

import keras
import numpy as np
import pytest
from keras import layers

from tarantella_pp.pipeline_model import PipelineModel
from tarantella_pp.runtime.communicator import world
from tests.mpi import mpi_run
from tests.training import X, Y, distance, mlp, use_float64

pytestmark = pytest.mark.keras

ROUNDING = 1e-10
QUIET = {"batch_size": 8, "epochs": 1, "shuffle": False, "verbose": 0}


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


OPTIMIZERS = {
    name: kind
    for name, kind in inspect.getmembers(keras.optimizers, inspect.isclass)
    if issubclass(kind, keras.optimizers.Optimizer)
    and name not in ("Optimizer", "LossScaleOptimizer", "MultiOptimizer")
} | {
    "several": several,
    "momentum": lambda: keras.optimizers.SGD(0.05, momentum=0.9, nesterov=True),
    "accumulating": lambda: keras.optimizers.AdamW(1e-2, gradient_accumulation_steps=2),
    "decaying": lambda: keras.optimizers.Adam(
        keras.optimizers.schedules.ExponentialDecay(0.05, 2, 0.5), amsgrad=True
    ),
}


def whole(name):
    """A model of plain Keras, trained without a break."""
    keras.utils.set_random_seed(1)
    model = towers()
    model.compile(OPTIMIZERS[name](), "mse")
    model.optimizer.build(model.trainable_variables)
    model.run_eagerly = True
    model.fit(X, Y, **{**QUIET, "epochs": 2})
    return model


def state_of(model):
    return [*model.get_weights(), *(variable.numpy() for variable in model.optimizer.variables)]


def interrupted(name, folder, **options):
    """Trains as a pipeline, saves, loads, and trains on as a pipeline."""
    keras.utils.set_random_seed(1)
    model = PipelineModel(towers(), num_micro_batches=2, **options)
    model.compile(OPTIMIZERS[name](), "mse")
    model.fit(X, Y, **QUIET)
    model.save(folder / f"{name}.keras")
    model.save_weights(folder / f"{name}.weights.h5")
    loaded = keras.saving.load_model(folder / f"{name}.keras")
    again = PipelineModel(loaded, num_micro_batches=2, **options)
    again.compile(loaded.optimizer, "mse")
    again.save(folder / f"{name}.loaded.keras")
    again.fit(X, Y, **QUIET)
    again.save(folder / f"{name}.on.keras")
    if name == "several":  # back by the file of weights, with slots that have gone on meanwhile
        again.load_weights(folder / f"{name}.weights.h5")
        again.fit(X, Y, **QUIET)
        again.save(folder / f"{name}.on.keras")
    return sum(int(np.prod(variable.shape)) for variable in again.optimizer.variables)


def check(name, folder, slots):
    """What plain Keras reads, and makes of it; how many numbers each rank has in slots."""
    files = [folder / f"{name}{part}.keras" for part in ("", ".loaded", ".on")]
    stock, loaded, on = map(keras.saving.load_model, files)
    assert distance(state_of(stock), state_of(loaded)) == 0, name
    stock.run_eagerly = True
    stock.fit(X, Y, **QUIET)
    expected = state_of(whole(name))
    for model in (stock, on):
        assert distance(state_of(model), expected) < ROUNDING, name
    every = sum(int(np.prod(variable.shape)) for variable in stock.optimizer.variables)
    assert len(slots) == 1 or max(slots) < every or every < 10, name


@pytest.mark.parametrize(
    "name", [n if n == "several" else pytest.param(n, marks=pytest.mark.slow) for n in OPTIMIZERS]
)
def test_a_break_changes_nothing_with_several_stages_in_one_process(tmp_path, name):
    check(name, tmp_path, [interrupted(name, tmp_path, num_stages=3)])


def interrupt_all(folder, names, stages):
    use_float64()
    if world().rank == 1:
        mlp()  # so that Keras counts its layers otherwise
    return [interrupted(name, Path(folder), num_stages=stages) for name in names]


@pytest.mark.mpi
@pytest.mark.parametrize(
    ("ranks", "stages", "names"),
    [
        (2, 4, ["several", "Adafactor"]),
        pytest.param(2, 2, [*OPTIMIZERS], marks=pytest.mark.slow),
        pytest.param(4, 4, ["Adam"], marks=pytest.mark.slow),
    ],
)
def test_a_break_changes_nothing_on_several_ranks(tmp_path, ranks, stages, names):
    run = mpi_run(ranks, interrupt_all, str(tmp_path), names, stages, timeout=400).check()
    for name, slots in zip(names, zip(*run.results, strict=True), strict=True):
        check(name, tmp_path, slots)
