"""A pipeline gives the numbers of plain Keras: every logged number, predictions, all weights."""

import pytest

from tarantella_pp.schedule import TRAINING_NAMES, ScheduleSpec
from tests.helpers import training
from tests.helpers.training import CASES, ROUNDING, distance, make, piped, serial, trained

pytestmark = pytest.mark.keras


# What is trained over ranks in this room, or by the matrix of tests/exactness, is left out.
@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "stages", "micro_batches", "schedule"),
    [("residual_cnn, evenly", 4, 8, "gpipe"), ("causal_attention, evenly", 4, 4, "1f1b")],
)
def test_a_pipeline_gives_the_numbers_of_keras(name, stages, micro_batches, schedule):
    assert distance(serial(name), piped(name, stages, micro_batches, schedule)) < ROUNDING


def test_every_schedule_gives_them():
    name, stages = "mlp, evenly", 4
    model = make(CASES[name], num_stages=stages, num_micro_batches=2)
    start = model.get_weights()
    for schedule in TRAINING_NAMES:
        # The compiled stages know nothing of the schedule, and are not compiled again for it.
        model._engine.schedules.spec = ScheduleSpec(schedule, stages, 1)
        found = trained(training.begin_again(model, start), name)
        assert distance(serial(name), found) < ROUNDING, schedule
