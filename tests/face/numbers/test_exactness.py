"""A pipeline gives the numbers of plain Keras: every logged number, predictions, all weights."""

from __future__ import annotations

import functools

import keras
import pytest

from tarantella_pp.runtime.batch_step import BatchStep
from tarantella_pp.schedule import TRAINING_NAMES, ScheduleSpec
from tests.helpers.training import (
    CASES,
    WEIGHTED,
    Case,
    X,
    Y,
    adamw,
    distance,
    finish,
    make,
    piped,
    regression,
    serial,
    sgd,
)
from tests.zoo.models import mlp

pytestmark = pytest.mark.keras

ROUNDING = 1e-10
BITS = 1e-13
"""For the same sums elsewhere: one micro-batch, or another number of stages."""

# The others are trained over ranks in this room, and by the matrix of tests/exactness.
EXACT = (
    "wide", "residual_cnn", "two_in_two_out", "causal_attention", "embedding_sgd", "recurrent",
    "masked_output", "nested", "shared", "positions",
)  # fmt: skip


def quick(names, *first):
    return [n if n in first else pytest.param(n, marks=pytest.mark.slow) for n in names]


@pytest.mark.parametrize("name", quick(EXACT, "masked_output", "positions"))
def test_every_kind_of_model_gives_the_numbers_of_keras(name):
    assert distance(serial(name), piped(name, 2, 3, None)) < ROUNDING


@pytest.mark.parametrize("name", quick(("causal_attention", "residual_cnn")))
def test_more_stages_and_the_other_schedule_give_them_too(name):
    assert distance(serial(name), piped(name, 4, 8, "gpipe")) < ROUNDING


@pytest.mark.parametrize("name", quick(("batch_norm", "embedding_sgd", "recurrent")))
def test_one_micro_batch_gives_them_to_the_last_bits(name):
    assert distance(serial(name), piped(name, 2, 1, None)) < BITS


@pytest.mark.slow
@pytest.mark.parametrize("name", ["dropout", "batch_norm"])
def test_the_number_of_stages_and_the_schedule_change_no_bits(name):
    assert distance(piped(name, 1, 3, "gpipe"), piped(name, 3, 3, "1f1b")) < BITS


OPTIMIZERS = {"sgd": sgd, "adamw": adamw}
MATRIX = [(2, 1), (2, 8), (3, 2), (4, 3)]


def fitted(model):
    told = model.fit(X, Y, batch_size=8, epochs=2, shuffle=False, verbose=0, **WEIGHTED)
    return {"history": told.history, "weights": model.get_weights()}


@functools.cache
def fitted_mlp(optimizer):
    return fitted(make(Case(mlp, X, Y, regression(optimizer=OPTIMIZERS[optimizer]))))


@pytest.mark.parametrize(
    ("stages", "micro_batches"),
    [pytest.param(*m, marks=() if m == (3, 2) else pytest.mark.slow) for m in MATRIX],
)
def test_matrix(stages, micro_batches):
    case = Case(mlp, X, Y, regression(optimizer=sgd))
    model = make(case, num_stages=stages, num_micro_batches=micro_batches)
    start = model.get_weights()
    limit = BITS if micro_batches == 1 else ROUNDING
    schedules = [name for name in TRAINING_NAMES if name != "zb-v" or stages % 2 == 0]
    for name, optimizer in OPTIMIZERS.items():
        model.compile(optimizer(), "mse")
        for schedule in schedules:
            # The compiled stages know nothing of the schedule, and are not compiled again for it.
            model._engine.schedules.spec = ScheduleSpec(schedule, stages, 1)
            model.set_weights(start)
            for variable in model.optimizer.variables:
                if variable is not model.optimizer.learning_rate:
                    variable.assign(keras.ops.zeros_like(variable))
            assert distance(fitted_mlp(name), fitted(model)) < limit, schedule
    assert model.plan.num_stages == stages


def test_a_wrong_share_of_a_micro_batch_is_noticed(monkeypatch):
    honest = BatchStep.loss_gradients

    def wrong(step, micro_batch):
        share = 2.0 if micro_batch == 0 else 1.0
        return {port: share * value for port, value in honest(step, micro_batch).items()}

    monkeypatch.setattr(BatchStep, "loss_gradients", wrong)
    found = finish(make(CASES["mlp"], num_stages=2, num_micro_batches=3), CASES["mlp"])
    assert distance(serial("mlp"), found) > 1e-4


def test_dropout_is_on_in_training_and_off_in_evaluation():
    model = make(CASES["dropout"], num_stages=2, num_micro_batches=2)
    first, second = (model.predict(X, verbose=0) for _ in range(2))
    assert distance(first, second) == 0
    model.compile(keras.optimizers.SGD(0.0), "mse")
    losses = model.fit(X, Y, batch_size=22, epochs=2, verbose=0).history["loss"]
    assert losses[0] != losses[1]
