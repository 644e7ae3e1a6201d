"""A pipeline gives the numbers of plain Keras: every logged number, predictions, all weights."""

import pytest

from tarantella_pp.schedule import TRAINING_NAMES, ScheduleSpec
from tests.helpers import training
from tests.helpers.training import CASES, ROUNDING, distance, make, serial, trained

pytestmark = pytest.mark.keras


def test_every_schedule_gives_them():
    name, stages = "mlp, evenly", 4
    model = make(CASES[name], num_stages=stages, num_micro_batches=2)
    start = model.get_weights()
    for schedule in TRAINING_NAMES:
        # The compiled stages know nothing of the schedule, and are not compiled again for it.
        model._engine.schedules.spec = ScheduleSpec(schedule, stages, 1)
        found = trained(training.begin_again(model, start), name)
        assert distance(serial(name), found) < ROUNDING, schedule
