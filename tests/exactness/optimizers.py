"""All optimizers of Keras, their options, and all schedules of learning rates."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
from keras import layers, optimizers

from tests.exactness.classes import arguments_of, classes_in
from tests.exactness.trials import EVENLY, Trial, training
from tests.helpers.draws import more_asked_for
from tests.helpers.training import SAMPLES, Case, integers

NOT_TRIED = {
    "Optimizer": "the base class of all optimizers",
    "OptimizerMap": "the table of MultiOptimizer",
}
NO_SCHEDULES = {"LearningRateSchedule": "the base class of all schedules"}

ARGUMENTS: dict[str, Callable[[], Any]] = {
    "alpha": lambda: 0.1,
    "boundaries": lambda: [1, 2],
    "decay_rate": lambda: 0.5,
    "decay_steps": lambda: 2,
    "first_decay_steps": lambda: 2,
    "initial_learning_rate": lambda: 0.05,
    "inner_optimizer": lambda: sgd("inner"),
    "optimizer_map": lambda: optimizers.OptimizerMap(sgd("first")),
    "default_optimizer": lambda: sgd("second"),
    "values": lambda: [0.05, 0.02, 0.01],
}
OPTIONS: tuple[dict[str, Any], ...] = (
    {"clipnorm": 0.01},
    {"clipvalue": 0.001},
    {"global_clipnorm": 0.01},
    {"gradient_accumulation_steps": 2},
    {"use_ema": True},
    {"weight_decay": 0.1},
)

WITH_ADAM = ("use_ema", "weight_decay")
"""Options usually tried with Adam; others change gradients, whose size only SGD shows."""

IDS = integers(6, 4, seed=1)
LABELS = integers(3, seed=2)
WEIGHTS = {"sample_weight": np.random.default_rng(4).uniform(0.2, 2, size=SAMPLES)}


def build() -> keras.Model:
    """A model with matrices, vectors and an embedding, whose gradients are sparse."""
    ids = keras.Input((4,), dtype="int32")
    x = layers.Flatten()(layers.Embedding(6, 3)(ids))
    x = layers.Dense(5, activation="tanh")(x)
    return keras.Model(ids, layers.Dense(3)(layers.LayerNormalization()(x)))


def kinds() -> dict[str, Callable[[], optimizers.Optimizer]]:
    """All optimizers, options and schedules that Keras has; on demand options with two of them."""
    found: dict[str, Callable[[], optimizers.Optimizer]] = {
        name: functools.partial(made, kind)
        for name, kind in classes_in(optimizers, NOT_TRIED).items()
    }
    for kind, options in itertools.product((optimizers.SGD, optimizers.Adam), OPTIONS):
        option = next(iter(options))
        if more_asked_for() or (kind is optimizers.Adam) == (option in WITH_ADAM):
            found[f"{kind.__name__}({option})"] = functools.partial(kind, 0.05, **options)
    for name, kind in classes_in(optimizers.schedules, NO_SCHEDULES).items():
        found[f"SGD({name})"] = functools.partial(scheduled, kind)
    return found


def sgd(name: str) -> optimizers.Optimizer:
    """One whose name does not count those that this rank has made before."""
    return optimizers.SGD(0.05, name=name)


def made(kind: type) -> optimizers.Optimizer:
    return kind(**arguments_of(kind, ARGUMENTS))


def scheduled(kind: type) -> optimizers.Optimizer:
    return optimizers.SGD(kind(**arguments_of(kind, ARGUMENTS)), momentum=0.9)


def trials() -> dict[str, Callable[[], Trial]]:
    """What makes the trial of each optimizer, with the same model."""
    return {name: functools.partial(_trial, name, make) for name, make in kinds().items()}


def _trial(name: str, make: Callable[[], optimizers.Optimizer]) -> Trial:
    return Trial(name, _case(make), functools.partial(training, rows=EVENLY), again=True)


def _case(make: Callable[[], optimizers.Optimizer]) -> Case:
    def compiled() -> dict[str, Any]:
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        return {"optimizer": make(), "loss": loss}

    return Case(build, IDS, LABELS, compiled, WEIGHTS)
