"""A pipeline gives the numbers of plain Keras: every logged number, predictions, all weights."""

from __future__ import annotations

import keras
import pytest

from tarantella_pp.runtime.batch_step import BatchStep
from tarantella_pp.schedule import TRAINING_NAMES, ScheduleSpec
from tests.helpers.training import CASES, X, Y, distance, finish, make, piped, serial

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


@pytest.mark.parametrize(
    ("stages", "micro_batches"),
    [
        pytest.param(2, 1, marks=pytest.mark.slow),
        pytest.param(2, 8, marks=pytest.mark.slow),
        (3, 2),
        pytest.param(4, 3, marks=pytest.mark.slow),
    ],
)
def test_every_schedule_gives_them(stages, micro_batches):
    case = CASES["mlp"]
    model = make(case, num_stages=stages, num_micro_batches=micro_batches)
    start = model.get_weights()
    for schedule in TRAINING_NAMES:
        if schedule == "zb-v" and stages % 2:
            continue
        # The compiled stages know nothing of the schedule, and are not compiled again for it.
        model._engine.schedules.spec = ScheduleSpec(schedule, stages, 1)
        model.set_weights(start)
        for variable in model.optimizer.variables:
            if variable is not model.optimizer.learning_rate:
                variable.assign(keras.ops.zeros_like(variable))
        limit = BITS if micro_batches == 1 else ROUNDING
        assert distance(serial("mlp"), finish(model, case)) < limit, schedule


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
