"""All optimizers of Keras, their options, and all schedules of learning rates."""

import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import keras
from keras import layers, optimizers

from tests.exactness.trials import Part, Trial, arguments_of, classes_in, training
from tests.helpers.training import WEIGHTED, Case, from_logits, integers
from tests.zoo.models import chain

NOT_TRIED = {
    "Optimizer": "the base class of all optimizers",
    "OptimizerMap": "the table of MultiOptimizer",
}
NO_SCHEDULES = {"LearningRateSchedule": "the base class of all schedules"}

ARGUMENTS: dict[str, Callable[[], Any]] = {
    "alpha": lambda: 0.1,
    "boundaries": lambda: [1, 2],
    "decay_rate": lambda: 0.5,
    "decay_steps": lambda: 9,
    "first_decay_steps": lambda: 2,
    "initial_learning_rate": lambda: 0.05,
    "inner_optimizer": lambda: sgd("inner"),
    "optimizer_map": lambda: optimizers.OptimizerMap(sgd("first")),
    "default_optimizer": lambda: sgd("second"),
    "values": lambda: [0.05, 0.02, 0.01],
}
# Some change gradients, whose size shows with SGD, but not with Adam.
SGD = functools.partial(optimizers.SGD, 0.05, momentum=0.9)
OPTIONS: dict[str, Callable[[], optimizers.Optimizer]] = {
    "SGD(clipnorm)": lambda: SGD(clipnorm=0.01),
    "SGD(clipvalue)": lambda: SGD(clipvalue=0.001),
    "SGD(global_clipnorm)": lambda: SGD(global_clipnorm=0.01),
    "SGD(gradient_accumulation_steps)": lambda: SGD(gradient_accumulation_steps=2),
    "Adam(use_ema)": lambda: optimizers.Adam(0.05, use_ema=True),
    "Adam(weight_decay)": lambda: optimizers.Adam(0.05, weight_decay=0.1),
}

IDS = integers(6, 4, seed=1)
LABELS = integers(3, seed=2)


def build() -> keras.Model:
    """A model with a matrix, a vector and an embedding, whose gradients are sparse."""
    return chain((4,), layers.Embedding(6, 3), layers.Flatten(), layers.Dense(3), dtype="int32")


def kinds() -> dict[str, Callable[[], optimizers.Optimizer]]:
    """All optimizers, those with a learning rate with the next of all schedules, and options."""
    found = dict(OPTIONS)
    schedules = itertools.cycle(classes_in(optimizers.schedules, NO_SCHEDULES).items())
    for name, kind in classes_in(optimizers, NOT_TRIED).items():
        # Some are made of others, which have the rates; Muon takes no schedule in float64.
        if name == "Muon" or arguments_of(kind, ARGUMENTS):
            found[name] = functools.partial(made, kind)
        else:
            schedule_name, schedule = next(schedules)
            found[f"{name}({schedule_name})"] = lambda kind=kind, schedule=schedule: kind(
                learning_rate=made(schedule)
            )
    return found


def sgd(name: str) -> optimizers.Optimizer:
    """One whose name does not count those that this rank has made before."""
    return optimizers.SGD(0.05, name=name)


def made(kind: type) -> Any:
    return kind(**arguments_of(kind, ARGUMENTS))


def parts() -> list[Part]:
    return [Part(name, make) for name, make in kinds().items()]


def trial(parts: Sequence[Part]) -> Trial:
    (part,) = parts

    def compiled() -> dict[str, Any]:
        return {"optimizer": part.value(), "loss": from_logits()}

    case = Case(build, IDS, LABELS, compiled, WEIGHTED)
    return Trial(case, training)
