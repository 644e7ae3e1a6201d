"""Recipes: named schedules, the user's own, and all of them on one rank; schedules as text."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tarantella_pp.errors import ScheduleError, TarantellaError
from tarantella_pp.schedule import (
    TRAINING_NAMES,
    V_SHAPED,
    Compute,
    Schedule,
    ScheduleSpec,
    lower,
    make_schedule,
    read_schedule,
    validate,
)
from tarantella_pp.schedule.spec import SEARCHED, on_one_rank
from tests.helpers.schedule_strategies import lowered_schedules, schedules

OWN = """
# nothing but the actions
rank 0: 0F0 0F1  0B0 0F2 0W0 0BW1 0BW2   # the first stage
rank 1: 1F0 1BW0 1F1 1BW1 1F2 1BW2
"""


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
        ({"num_micro_batches": 10**9}, "num_stages=4, num_micro_batches=1000000000. Take fewer"),
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
def test_wrong_options_of_a_schedule_are_refused_by_name(options, named):
    with pytest.raises(TarantellaError) as error:
        make_schedule(**{"name": "1f1b", "num_stages": 4, "num_micro_batches": 4} | options)
    assert named in str(error.value)


@given(
    st.sampled_from(TRAINING_NAMES), st.integers(1, 3), st.sampled_from([1, 2]), st.integers(1, 7)
)
def test_every_recipe_makes_legal_schedules(name, ranks, per_rank, micro_batches):
    stages = ranks * (2 if name in V_SHAPED else per_rank)
    spec = ScheduleSpec.of(name, stages, ranks)
    schedule = spec.make(micro_batches)
    validate(lower(schedule))
    assert (schedule.name, schedule.placement) == (name, spec.placement)
    alone = ScheduleSpec.of(name, stages, 1).make(micro_batches)
    validate(lower(alone))
    assert alone.placement == (0,) * stages
    for stage in range(stages):
        both = on_one_rank(schedule), schedule
        orders = [[a for a in one.computations() if a.stage == stage] for one in both]
        assert orders[0] == orders[1]


@given(st.sampled_from(TRAINING_NAMES), st.integers(1, 4), st.sampled_from([1, 2]), st.data())
def test_what_recomputing_stages_hold_again_is_known_for_every_recipe(name, ranks, per_rank, data):
    spec = ScheduleSpec.of(name, ranks * (2 if name in V_SHAPED else per_rank), ranks)
    micro_batches = data.draw(st.integers(1, 7))
    if name != SEARCHED:
        pairs = st.tuples(st.integers(0, spec.num_stages - 1), st.integers(0, 7))
        spec = replace(spec, repeated=tuple(data.draw(st.sets(pairs))))
    schedule = spec.make(micro_batches)
    found = spec.held_again(micro_batches)
    held = [0] * spec.num_stages
    for stage in range(spec.num_stages):
        backward = set()
        for _, kind, i in (a for a in schedule.computations() if a.stage == stage):
            if kind in ("R", "B", "BW"):
                backward.add(i)
                held[stage] = max(held[stage], len(backward))
            if kind in ("W", "BW"):
                backward.discard(i)
    whole = {stage for stage, i in spec.repeated if i < micro_batches}
    counts = held
    if name == SEARCHED:  # what will be found may hold that much
        counts, whole = spec.make(micro_batches).held, range(spec.num_stages)
    assert [list(one) for one in found] == [[n, i in whole] for i, n in enumerate(counts)]
    assert [one.micro_batches for one in schedule.held_again()] == held


@given(st.integers(1, 8), st.data())
def test_what_is_left_of_a_schedule_is_legal(micro_batches, data):
    whole = make_schedule("zb-h1", 3, micro_batches)
    kept = data.draw(st.integers(1, micro_batches))
    first = whole.first(kept)
    validate(lower(first))
    assert len(list(first.computations())) == 3 * 3 * kept
    assert whole.first(micro_batches) is whole


def test_there_are_no_more_micro_batches_than_a_schedule_has():
    with pytest.raises(ScheduleError, match=r"has 2 micro-batches. Received: num_micro_batches=3"):
        make_schedule("1f1b", 2, 2).first(3)
    with pytest.raises(ScheduleError, match="and messages"):
        lower(make_schedule("1f1b", 2, 2)).first(1)


def test_a_schedule_comes_from_a_file_or_as_it_is(tmp_path):
    path = tmp_path / "mine.txt"
    path.write_text(OWN, encoding="utf-8-sig")  # as Windows writes it
    own = read_schedule(path)
    assert own.name == "custom"
    assert own == read_schedule(str(path)) == read_schedule(Schedule.from_text(OWN))
    spec = ScheduleSpec.of(path, 2, 2)
    assert spec.make(3) == own
    assert spec.make(2).held == (2, 1)
    alone = ScheduleSpec.of(path, 2, 1)
    assert alone.placement == (0, 0)
    assert Compute(1, "BW", 2) in alone.make(3).actions[0]
    assert read_schedule("1f1b") is None
    edited = Schedule.from_text(make_schedule("1f1b", 2, 2).to_text())
    assert read_schedule(edited).name == "1f1b-edited"  # not taken for the one of that name


@pytest.mark.parametrize(
    ("schedule", "match"),
    [
        ("2f2b", r"Expected one of .*zb-auto.*Received: schedule='2f2b'"),
        ("forward", "schedule='forward'"),
        (3, "schedule=3"),
        (make_schedule("forward", 2, 2), "forward passes only"),
        (lower(make_schedule("1f1b", 2, 2)), "give its computations alone"),
        (Schedule.from_text("rank 0: 0F0 0BW0 0F1"), "0B1 is missing"),
        (Schedule.from_text("rank 0: 0BW0 0F0\nrank 1: 1F0 1BW0"), "wait for each other"),
    ],
)
def test_what_cannot_train_is_refused(schedule, match):
    with pytest.raises(ScheduleError, match=match):
        read_schedule(schedule)


def test_unreadable_files_are_refused(tmp_path):
    path = tmp_path / "schedule"
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(ScheduleError, match="Cannot read the schedule"):
        read_schedule(path)
    path.write_text("rank 0: 0F0 nonsense")
    with pytest.raises(ScheduleError, match="Line 1"):
        read_schedule(path)


@pytest.mark.parametrize(
    ("schedule", "stages", "ranks", "named"),
    [
        *((Schedule.from_text(OWN), *size, "on . ranks") for size in ((3, 2), (2, 3), (4, 2))),
        ("zb-v", 3, 3, ""),
        ("1f1b", 3, 2, ""),
    ],
)
def test_a_schedule_is_one_of_its_stages_and_ranks(schedule, stages, ranks, named):
    with pytest.raises(ScheduleError, match=f"num_stages={stages}.*{named}"):
        ScheduleSpec.of(schedule, stages, ranks)


@given(schedules())
def test_round_trip(schedule):
    assert Schedule.from_text(schedule.to_text()) == schedule


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
        ("placement: 0\nrank 0: 99999999999F0", "each of the 100000000000 stages"),
        ("rank 0: 0F0 0BW0 0F99999999999", "of micro-batch 1. Received: none"),
        (f"rank 0: 0F{'9' * 5000}", "Line 1 .*4300 digits"),
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
