import pytest
from hypothesis import given

from tarantella_pp.errors import TarantellaError
from tarantella_pp.schedule import make_schedule, validate
from tests.helpers.schedule_strategies import lowered_schedules, schedules


@given(lowered_schedules())
def test_every_schedule_is_legal_whatever_the_skips(schedule):
    validate(schedule, [schedule.in_flight(stage) for stage in range(schedule.num_stages)])


@given(schedules())
def test_every_stage_runs_micro_batches_in_increasing_order(schedule):
    for stage in range(schedule.num_stages):
        for part in "FBW" if schedule.has_backward else "F":
            order = [
                action.micro_batch
                for action in schedule.computations()
                if action.stage == stage and part in action.kind
            ]
            assert order == list(range(schedule.num_micro_batches))


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"name": "2f2b"}, "2f2b"),
        ({"num_stages": 0}, "num_stages=0"),
        ({"num_micro_batches": 0}, "num_micro_batches=0"),
        ({"num_micro_batches": 2.5}, "num_micro_batches=2.5"),
        ({"num_ranks": 3}, "num_ranks=3"),
        ({"num_ranks": -1}, "num_ranks=-1"),
        ({"placement": (0, 1)}, "placement=(0, 1)"),
        ({"placement": (0, 2, 0, 2)}, "placement=(0, 2, 0, 2)"),
        ({"name": "interleaved", "placement": (0, 1, 1, 0)}, "placement=(0, 1, 1, 0)"),
        ({"name": "zb-v", "num_stages": 3}, "num_stages=3"),
        ({"name": "zb-v", "num_ranks": 4}, "num_ranks=4"),
        ({"name": "zb-v", "placement": (0, 1, 0, 1)}, "placement=(0, 1, 0, 1)"),
        ({"name": "zb-auto"}, "zb-auto"),
    ],
)
def test_wrong_options_are_refused_by_name(options, named):
    with pytest.raises(TarantellaError) as error:
        make_schedule(**{"name": "1f1b", "num_stages": 4, "num_micro_batches": 4} | options)
    assert named in str(error.value)
