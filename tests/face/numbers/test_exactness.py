"""A pipeline gives the numbers of plain Keras: every logged number, predictions, all weights."""

from __future__ import annotations

import pytest

from tarantella_pp.schedule import TRAINING_NAMES, ScheduleSpec
from tests.helpers.training import (
    BITS,
    CASES,
    ROUNDING,
    begin_again,
    distance,
    finish,
    make,
    piped,
    serial,
)

pytestmark = pytest.mark.keras


# What is trained over ranks in this room, or by the matrix of tests/exactness, is left out.
@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "stages", "micro_batches", "schedule"),
    [
        ("residual_cnn, evenly", 4, 8, "gpipe"),
        ("causal_attention, evenly", 4, 4, "1f1b"),
        ("recurrent", 2, 3, None),
        ("embedding_sgd, evenly", 2, 1, None),
        ("batch_norm, evenly", 2, 1, None),
    ],
)
def test_a_pipeline_gives_the_numbers_of_keras(name, stages, micro_batches, schedule):
    limit = BITS if micro_batches == 1 else ROUNDING
    assert distance(serial(name), piped(name, stages, micro_batches, schedule)) < limit


@pytest.mark.parametrize(
    ("name", "stages", "micro_batches"),
    [("mlp, evenly", 3, 2), pytest.param("mlp", 4, 3, marks=pytest.mark.slow)],
)
def test_every_schedule_gives_them(name, stages, micro_batches):
    case = CASES[name]
    model = make(case, num_stages=stages, num_micro_batches=micro_batches)
    start = model.get_weights()
    for schedule in TRAINING_NAMES:
        if schedule == "zb-v" and stages % 2:
            continue
        # The compiled stages know nothing of the schedule, and are not compiled again for it.
        model._engine.schedules.spec = ScheduleSpec(schedule, stages, 1)
        found = finish(begin_again(model, start), case)
        assert distance(serial(name), found) < ROUNDING, schedule
