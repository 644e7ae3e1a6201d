import pytest
from hypothesis import given

from tarantella_pp.errors import ScheduleError
from tarantella_pp.schedule import Schedule, lower, make_schedule, simulate, validate
from tarantella_pp.schedule.simulator import Costs
from tests.helpers.schedule_strategies import schedules


@given(schedules())
def test_round_trip(schedule):
    assert Schedule.from_text(schedule.to_text()) == schedule


def test_a_schedule_of_the_user():
    schedule = Schedule.from_text(
        """
        # my own, with nothing but the actions
        rank 0: 0F0 0F1  0B0 0W0 0BW1   # the first stage
        rank 1: 1F0 1BW0 1F1 1BW1
        """
    )
    assert schedule.name == "custom"
    assert (schedule.num_stages, schedule.num_micro_batches, schedule.num_ranks) == (2, 2, 2)
    lowered = lower(schedule)
    validate(lowered, [2, 1])
    assert simulate(lowered, Costs.uniform(2)).step_seconds == 9
    assert str(lowered.actions[1][0]) == "0>1RF0"


def test_text_of_a_lowered_schedule():
    assert lower(make_schedule("1f1b", 2, 1)).to_text() == (
        "schedule: 1f1b\n"
        "stages: 2\n"
        "micro_batches: 1\n"
        "placement: 0 1\n"
        "links: 0>1\n"
        "gradient_links: 0>1\n"
        "rank 0: 0F0 0>1SF0 1>0RB0 0BW0\n"
        "rank 1: 0>1RF0 1F0 1BW0 1>0SB0\n"
    )


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("", "one line for each rank"),
        ("rank 0: 1F0", "Stage 0 has none"),
        ("rank 0: 0F0 0G0", r"Line 1 .*'0G0'"),
        ("stages: 1\nrank 0: 0F0\nrank 0: 0F0", "Line 3 .* rank 0 is given twice"),
        ("stages: one\nrank 0: 0F0", "Line 1 .* whole numbers"),
        ("stage: 1\nrank 0: 0F0", "Line 1 .* one of schedule, stages"),
        ("0F0 0F1", "Line 1 .* 'rank N:'"),
        ("links: 0>1\nrank 0: 0F0", "Line 1 .* one of schedule, stages"),
        ("rank 0: 0F0 0>1SF0", "Line 1 .* computations only.*'0>1SF0'"),
        ("placement: 0 1\nrank 0: 0F0", r"placement=\(0, 1\)"),
    ],
)
def test_text_that_cannot_be_read(source, message):
    with pytest.raises(ScheduleError, match=message):
        Schedule.from_text(source)
