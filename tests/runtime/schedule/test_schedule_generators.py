from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tarantella_pp.errors import ScheduleError
from tarantella_pp.runtime.schedule import SCHEDULE_NAMES, Schedule, lower, make_schedule, validate


@st.composite
def schedules(draw, names=SCHEDULE_NAMES) -> Schedule:
    name = draw(st.sampled_from(names))
    num_stages = draw(st.integers(1, 6))
    divisors = [ranks for ranks in range(1, num_stages + 1) if num_stages % ranks == 0]
    backward = draw(st.sampled_from(["fused", "split"])) if name[:2] not in ("zb", "fo") else None
    return make_schedule(
        name,
        num_stages,
        draw(st.integers(1, 12)),
        draw(st.sampled_from(divisors)),
        backward=backward,
    )


@st.composite
def linked(draw) -> Schedule:
    schedule = draw(schedules())
    stages = range(schedule.num_stages)
    every = [(source, target) for target in stages for source in range(target)]
    links = draw(st.lists(st.sampled_from(every), unique=True)) if every else []
    gradient_links = draw(st.lists(st.sampled_from(links), unique=True)) if links else []
    return lower(schedule, links, gradient_links)


@given(schedules())
def test_every_schedule_of_a_chain_is_legal(schedule):
    lowered = lower(schedule)
    validate(lowered, [schedule.in_flight(stage) for stage in range(schedule.num_stages)])
    assert [list(lowered.computations())] == [list(schedule.computations())]


@given(linked())
def test_every_schedule_is_legal_whatever_the_skips(schedule):
    validate(schedule)


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


@given(st.integers(1, 6), st.integers(1, 12))
def test_in_flight_of_one_stage_per_rank(p, m):
    for name, most in (
        ("gpipe", lambda s: m),
        ("1f1b", lambda s: min(p - s, m)),
        ("zb-h1", lambda s: min(p, m)),
        ("forward", lambda s: 0),
    ):
        schedule = make_schedule(name, p, m)
        assert [schedule.in_flight(s) for s in range(p)] == [most(s) for s in range(p)], name


@given(st.integers(1, 6), st.integers(1, 12))
def test_one_rank_holds_no_more_than_many(p, m):
    for name in ("gpipe", "1f1b"):
        one, many = make_schedule(name, p, m, 1), make_schedule(name, p, m)
        for stage in range(p):
            assert one.in_flight(stage) == many.in_flight(stage)


def test_megatron_order():
    rank_0, rank_1 = make_schedule("interleaved", 4, 4, 2).actions
    assert " ".join(map(str, rank_0)) == (
        "0F0 0F1 2F0 2F1 0F2 2BW0 0F3 2BW1 2F2 0BW0 2F3 0BW1 2BW2 2BW3 0BW2 0BW3"
    )
    assert " ".join(map(str, rank_1)) == (
        "1F0 1F1 3F0 3BW0 3F1 3BW1 1F2 1BW0 1F3 1BW1 3F2 3BW2 3F3 3BW3 1BW2 1BW3"
    )


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"name": "2f2b"}, "2f2b"),
        ({"num_stages": 0}, "num_stages=0"),
        ({"num_micro_batches": 0}, "num_micro_batches=0"),
        ({"num_micro_batches": 2.5}, "num_micro_batches=2.5"),
        ({"num_ranks": 3}, "num_ranks=3"),
        ({"num_ranks": -1}, "num_ranks=-1"),
        ({"backward": "both"}, "both"),
        ({"placement": (0, 1)}, "placement=(0, 1)"),
        ({"placement": (0, 2, 0, 2)}, "placement=(0, 2, 0, 2)"),
        ({"name": "interleaved", "placement": (0, 1, 1, 0)}, "placement=(0, 1, 1, 0)"),
        ({"name": "zb-h1", "backward": "fused"}, "zb-h1"),
    ],
)
def test_wrong_options_are_refused_by_name(options, named):
    with pytest.raises(ScheduleError) as error:
        make_schedule(**{"name": "1f1b", "num_stages": 4, "num_micro_batches": 4} | options)
    assert named in str(error.value)


def test_placement_of_the_user():
    schedule = make_schedule("1f1b", 4, 4, placement=(0, 1, 1, 0))
    assert schedule.num_ranks == 2
    validate(lower(schedule))
