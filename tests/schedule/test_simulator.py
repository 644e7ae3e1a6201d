from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tarantella_pp.errors import ScheduleError, TarantellaError
from tarantella_pp.schedule import (
    Compute,
    Costs,
    LinkCosts,
    StageCosts,
    Transfer,
    lower,
    make_schedule,
    search_schedule,
    simulate,
    validate,
)
from tarantella_pp.schedule.schedule_search import repeat_in_bubbles
from tests.helpers.closed_forms import bubble_fraction
from tests.helpers.schedule_strategies import lowered_schedules


def play(name, *numbers, costs=None, **options):
    schedule = lower(make_schedule(name, *numbers, **options))
    return simulate(schedule, costs or Costs.uniform(schedule.num_stages))


SECONDS = st.tuples(*[st.floats(0.1, 9.0)] * 3)


@given(p=st.integers(1, 6), v=st.integers(1, 4), m=st.integers(1, 16), seconds=SECONDS)
def test_closed_forms_of_bubbles(p, v, m, seconds):
    for name in ("gpipe", "1f1b", "forward", "zb-h1"):
        # The bubble of fused schedules does not depend on the seconds.
        costs = None if name == "zb-h1" else Costs.uniform(p, *seconds)
        timeline = play(name, p, m, costs=costs)
        assert timeline.bubble_fraction == pytest.approx(bubble_fraction(name, p, m))
        assert timeline.speed_up == pytest.approx(p * (1 - bubble_fraction(name, p, m)))
    timeline = play("zb-v", 2 * p, m)
    assert timeline.bubble_fraction == pytest.approx(bubble_fraction("zb-v", p, m))
    timeline = play("interleaved", p * v, m, p)
    assert timeline.bubble_fraction == pytest.approx(bubble_fraction("interleaved", p, m, v))


@settings(max_examples=30)
@given(p=st.integers(1, 8), data=st.data())
def test_v_shaped_schedules_hold_a_share_of_1f1b_for_less_of_its_bubble(p, data):
    """Bounds of Qi et al. 2024, in micro-batches of a whole stage; 1F1B holds p of them."""
    m = data.draw(st.integers(1, 4 * p))
    waits = {}
    for name in ("1f1b", "zb-v", "v-half", "v-min"):
        schedule = make_schedule(name, p if name == "1f1b" else 2 * p, m)
        lowered = lower(schedule)
        validate(lowered)
        bubble = simulate(lowered, Costs.uniform(schedule.num_stages)).bubble_fraction
        waits[name] = bubble / (1 - bubble)
        most = {"v-half": p / 2 + 1, "v-min": p / 3 + 1.5}.get(name, p + 0.5)
        ranks = [0] * p
        for rank, held in zip(schedule.placement, schedule.held, strict=True):
            ranks[rank] += held
        assert max(ranks) * p <= most * schedule.num_stages
    assert waits["v-half"] <= (0.53 if m > p else 0.65) * waits["1f1b"] + 1e-9
    assert waits["v-min"] <= 0.65 * waits["1f1b"] + 1e-9
    assert m == 1 or waits["zb-v"] <= waits["v-half"] + 1e-9


@given(lowered_schedules(), st.floats(0, 2), st.floats(0, 1))
def test_timelines_are_consistent(schedule, seconds, latency):
    costs = Costs.uniform(schedule.num_stages, link=LinkCosts(seconds, latency))
    timeline = simulate(schedule, replace(costs, send_seconds=0.1, receive_seconds=0.2))
    counts = schedule.buckets or (0,) * schedule.num_stages
    timeline = timeline.with_reductions([[0.3] * count for count in counts])
    ends = {}
    for rank, (own, reduced) in enumerate(zip(timeline.events, timeline.reductions, strict=True)):
        assert [event.rank for event in own] == [rank] * len(own)
        played = [str(event.action) for event in (*own, *reduced)]
        assert sorted(map(str, schedule.actions[rank])) == sorted(played)
        computed = [event.action for event in own if isinstance(event.action, Compute)]
        assert computed == [a for a in schedule.actions[rank] if isinstance(a, Compute)]
        for before, after in (*pairwise(own), *pairwise(reduced)):
            assert before.start <= before.end <= after.start
        for event in reduced:
            ready = [e.end for e in own if isinstance(e.action, Compute) and e.action.kind != "F"
                     and e.action.stage == event.action.stage]  # fmt: skip
            assert event.start >= max(ready)
        ends.update({event.action: event.end for event in own})
    for action, end in ends.items():
        if not isinstance(action, Compute) and action.operation == "R":
            sent = ends[action._replace(operation="S")]
            assert end >= sent + seconds + latency + 0.2 - 1e-9
    assert 0 <= timeline.bubble_fraction < 1
    assert timeline.speed_up <= schedule.num_ranks + 1e-9
    assert timeline.step_seconds >= max(timeline.busy_seconds)
    assert 0 <= timeline.exposed_seconds <= 0.3 * sum(counts) + 1e-9


def test_reductions_go_on_beside_other_stages():
    # Stage 1 of the only rank has its gradients at 4, stage 0 at 6.
    timeline = play("gpipe", 2, 1, 1).with_reductions([[0.5], [1.0, 2.0]])
    times = [(str(e.action), e.start, e.end) for e in timeline.reductions[0]]
    assert times == [("1A0", 4.0, 5.0), ("1A1", 5.0, 7.0), ("0A0", 7.0, 7.5)]
    assert (timeline.pipeline_seconds, timeline.step_seconds) == (6.0, 7.5)
    assert timeline.to_text(45) == (
        "rank 0 |0F0>>>1F0>>>1BW0<<======0BW0<<======.........|\n"
        "       |                        1A0~~~1A1~~~~~~~~~~~~|\n"
        "gpipe: step 7.5 s, bubble 0.0%, exposed reduction 1.5 s, speed-up 0.80 of 1   "
        "(> forward, < input gradient, = weight gradient, . idle, ~ reduction)\n"
    )


def test_what_is_repeated_before_its_gradient_is_there_takes_no_time():
    stage = StageCosts(1.0, 2.0, 1.0, repeated=1.0)  # of which B is the second second
    costs = Costs((stage,) * 3)
    plain = make_schedule("1f1b", 3, 4)
    found = repeat_in_bubbles(plain, costs, range(3))
    validate(lower(found))
    # The last stage never waits; the others hide one R each of the last micro-batches.
    assert alone(plain, costs) - alone(found, costs) == 2.0
    assert all(stage < 2 for stage, _ in found.repeated)
    timeline = simulate(lower(found), costs)
    again = [e for own in timeline.events for e in own if str(e.action) in ("0R3", "0BW3")]
    assert [e.end - e.start for e in again] == [1.0, 2.0]
    assert "+ forward again" in timeline.to_text()
    assert "R3" in timeline.to_text().splitlines()[0]
    # Only where memory allows it, and where anything is repeated
    assert {stage for stage, _ in repeat_in_bubbles(plain, costs, {1}).repeated} <= {1}
    assert repeat_in_bubbles(plain, Costs.uniform(3), range(3)) == plain


@given(data=st.data(), p=st.integers(1, 4), m=st.integers(1, 6))
def test_repeating_early_makes_no_step_longer(data, p, m):
    seconds = st.floats(0.125, 4.0, width=16)
    draw = data.draw
    stages = [StageCosts(draw(seconds), 4.0 + draw(seconds), draw(seconds), repeated=draw(seconds))
              for _ in range(p)]  # fmt: skip
    costs = Costs(tuple(stages), default_link=LinkCosts(draw(seconds)))
    plain = make_schedule(draw(st.sampled_from(["gpipe", "1f1b", "zb-h1"])), p, m)
    pairs = st.sets(st.tuples(st.integers(0, p - 1), st.integers(0, m - 1)))
    assert alone(plain.repeating(draw(pairs)), costs) <= alone(plain, costs) + 1e-9
    assert alone(repeat_in_bubbles(plain, costs, range(p)), costs) <= alone(plain, costs)


TWO, LINK = Costs.uniform(2), LinkCosts(seconds=0.5, latency=0.25)
AT_ITS_ENDS = {"send_seconds": 0.125, "receive_seconds": 0.0625}
APART = {(0, 1): LinkCosts(1.0), (1, 0): LinkCosts(2.0)}


@pytest.mark.parametrize(
    ("name", "micro_batches", "costs", "seconds"),
    [
        ("gpipe", 1, {"default_link": LINK}, 6 + 2 * 0.75),
        ("gpipe", 1, {"default_link": LINK, **AT_ITS_ENDS}, 6 + 2 * (0.75 + 0.1875)),
        # Messages of one direction wait for each other.
        ("forward", 4, {"default_link": LinkCosts(seconds=3.0)}, 1 + 4 * 3 + 1),
        ("forward", 4, {"default_link": LinkCosts(latency=3.0)}, 1 + 3 + 4),
        ("1f1b", 1, {"links": APART, "default_link": LinkCosts(9.0)}, 6 + 1 + 2),
        ("1f1b", 1, {"links": {(0, 1): LinkCosts(1.0)}}, 6 + 1 + 1),
    ],
)
def test_a_message_takes_its_time(name, micro_batches, costs, seconds):
    assert play(name, 2, micro_batches, costs=replace(TWO, **costs)).step_seconds == seconds


def test_other_work_fills_a_wait_and_may_outlast_it():
    first = Transfer(1, 0, "R", "B", 0)
    for seconds, step in ((0.0, 6.0), (2.0, 6.0), (3.0, 6.0), (3.5, 6.5)):  # a wait of 3 seconds
        costs = replace(Costs.uniform(2), before={first: seconds})
        timeline = play("1f1b", 2, 1, costs=costs)
        assert timeline.step_seconds == step
        wait = next(event for event in timeline.events[0] if event.action == first)
        assert wait.start == 1.0 + seconds
    costs = replace(Costs.uniform(2), before={Compute(1, "F", 0): 0.5})
    assert play("1f1b", 2, 1, costs=costs).step_seconds == 6.5


def test_memory_is_what_is_in_flight():
    stage = StageCosts(1.0, 1.0, 1.0, activation_bytes=10.0, static_bytes=100.0)
    costs = Costs((stage,) * 4)
    assert play("1f1b", 4, 8, costs=costs).peak_bytes == (140.0, 130.0, 120.0, 110.0)
    assert play("gpipe", 4, 8, costs=costs).peak_bytes == (180.0,) * 4
    assert play("forward", 4, 8, costs=costs).peak_bytes == (100.0,) * 4
    assert play("gpipe", 4, 8, 2, costs=costs).peak_bytes == (360.0,) * 2


def test_what_cannot_be_simulated():
    schedule = make_schedule("1f1b", 2, 2)
    with pytest.raises(ScheduleError, match="lower"):
        simulate(schedule, Costs.uniform(2))
    with pytest.raises(ScheduleError, match=r"2 stages\. Received: 3"):
        simulate(lower(schedule), Costs.uniform(3))
    with pytest.raises(ScheduleError, match="forward=-1"):
        StageCosts(-1.0)
    with pytest.raises(ScheduleError, match="input_gradient=nan"):
        StageCosts(1.0, float("nan"))
    deadlock = replace(lower(schedule), actions=(lower(schedule).actions[0], ()))
    with pytest.raises(ScheduleError, match="Deadlock"):
        simulate(deadlock, Costs.uniform(2))


@given(lowered_schedules(4, 6), st.integers(1, 120))
def test_drawings_have_the_width_asked_for(schedule, width):
    counts = schedule.buckets or (0,) * schedule.num_stages
    timeline = simulate(schedule, Costs.uniform(schedule.num_stages))
    timeline = timeline.with_reductions([[1.0] * count for count in counts])
    lines = timeline.to_text(width).splitlines()
    assert len(lines) == schedule.num_ranks * (1 + any(counts)) + 1
    assert {len(line) for line in lines[:-1]} == {len("rank 0 ||") + width}


def alone(schedule, costs):
    return simulate(lower(schedule), costs).step_seconds


@settings(max_examples=60)
@given(data=st.data(), p=st.integers(1, 4), m=st.integers(1, 8))
def test_the_search_is_never_worse_than_what_it_starts_from(data, p, m):
    seconds = st.tuples(*[st.floats(0.1, 3.0)] * 3, st.none() | st.floats(0.1, 4.0))
    stages = [StageCosts(*data.draw(seconds)) for _ in range(p)]
    costs = Costs(tuple(stages), default_link=LinkCosts(data.draw(st.floats(0, 1))))
    limit = data.draw(st.none() | st.integers(1, 8))
    best = search_schedule(p, m, costs=costs, in_flight_limit=limit)
    validate(lower(best))
    assert limit is None or max(best.held) <= limit
    for name in ("1f1b", "zb-h1", "gpipe"):
        other = make_schedule(name, p, m)
        if limit is None or max(other.held) <= limit:
            assert alone(best, costs) <= alone(other, costs) * (1 + 1e-8)


def test_the_search_uses_what_it_is_given():
    slow = Costs.uniform(4, 1.0, 2.0, 1.0)
    found = search_schedule(4, 8, costs=slow)
    assert simulate(lower(make_schedule("zb-h1", 4, 8)), slow).step_seconds == 38
    assert simulate(lower(found), slow).step_seconds == 3 + 8 * 4  # no schedule is faster
    assert max(search_schedule(4, 8, costs=slow, in_flight_limit=2).held) == 2
    cheap = StageCosts(1.0, 1.0, 1.0, full_backward=1.2)
    found = search_schedule(2, 8, costs=Costs((cheap,) * 2))
    assert all(action.kind in ("F", "BW") for action in found.computations())
    v_shaped = search_schedule(4, 8, placement=(0, 1, 1, 0))
    assert simulate(lower(v_shaped), Costs.uniform(4)).step_seconds <= 6 * 8 + 1


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"num_stages": 0}, "num_stages=0"),
        ({"num_ranks": 3}, "num_ranks=3"),
        ({"costs": Costs.uniform(3)}, "costs of 4 stages. Received: 3"),
        ({"in_flight_limit": 0}, "in_flight_limit=0"),
        ({"in_flight_limit": (2, 2)}, "in_flight_limit=(2, 2)"),
    ],
)
def test_wrong_options_of_a_search_are_refused_by_name(options, named):
    with pytest.raises(TarantellaError) as error:
        search_schedule(**{"num_stages": 4, "num_micro_batches": 4} | options)
    assert named in str(error.value)
