from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tarantella_pp.errors import ScheduleError
from tarantella_pp.schedule import lower, make_schedule, validate
from tarantella_pp.simulation import (
    Costs,
    LinkCosts,
    StageCosts,
    search_schedule,
    simulate,
)


def alone(schedule, costs):
    return simulate(lower(schedule), costs).step_seconds


@settings(max_examples=60)
@given(data=st.data(), p=st.integers(1, 4), m=st.integers(1, 8))
def test_the_search_is_never_worse_than_what_it_starts_from(data, p, m):
    seconds = st.floats(0.1, 3.0)
    stages = [
        StageCosts(
            data.draw(seconds),
            data.draw(seconds),
            data.draw(seconds),
            data.draw(st.none() | st.floats(0.1, 4.0)),
            waiting_share=data.draw(st.floats(0, 1)),
        )
        for _ in range(p)
    ]
    costs = Costs(tuple(stages), default_link=LinkCosts(data.draw(st.floats(0, 1))))
    limit = data.draw(st.none() | st.floats(1, 8))
    best = search_schedule(p, m, costs=costs, in_flight_limit=limit)
    validate(lower(best))
    shares = [stage.waiting_share for stage in stages]
    assert limit is None or max(best.held(shares)) <= limit + 1e-6
    for name in ("1f1b", "zb-h1", "gpipe"):
        other = make_schedule(name, p, m)
        if limit is None or max(other.held(shares)) <= limit:
            assert alone(best, costs) <= alone(other, costs) * (1 + 1e-8)


def test_the_search_uses_what_it_is_given():
    slow = Costs.uniform(4, 1.0, 2.0, 1.0)
    found = search_schedule(4, 8, costs=slow)
    assert simulate(lower(make_schedule("zb-h1", 4, 8)), slow).step_seconds == 38
    assert simulate(lower(found), slow).step_seconds == 3 + 8 * 4  # no schedule is faster
    held = search_schedule(4, 8, costs=slow, in_flight_limit=2)
    assert max(held.in_flight(stage) for stage in range(4)) == 2
    cheap = StageCosts(1.0, 1.0, 1.0, full_backward=1.2)
    found = search_schedule(2, 8, costs=Costs((cheap,) * 2))
    assert all(action.kind in ("F", "BW") for action in found.computations())
    v_shaped = search_schedule(4, 8, placement=(0, 1, 1, 0))
    assert simulate(lower(v_shaped), Costs.uniform(4)).step_seconds <= 6 * 8 + 1


def test_what_waits_for_its_weight_gradients_takes_less_of_the_limit():
    """The memory of ZB-2p, table 5 of Qi et al. (2024): 16 micro-batches on 8 stages."""
    stage = StageCosts(18.522, 18.086, 9.337, waiting_share=0.366)
    costs = Costs((stage,) * 8, default_link=LinkCosts(latency=0.601))
    found = search_schedule(8, 24, costs=costs, in_flight_limit=16)
    assert max(found.held([stage.waiting_share] * 8)) <= 16 + 1e-6
    assert max(found.in_flight(s) for s in range(8)) > 16  # that is why it is so fast
    timeline = simulate(lower(found), costs)
    assert 1 - 24 * sum((18.522, 18.086, 9.337)) / timeline.step_seconds < 0.1084


def test_what_waits_for_its_weight_gradients_counts_by_its_share():
    schedule = make_schedule("zb-h1", 4, 8)
    assert schedule.held() == tuple(schedule.in_flight(s) for s in range(4)) == (4, 4, 4, 4)
    # Stage 3 runs F and B in turn, and is 3 weight gradients behind: 1 more is whole.
    assert schedule.held([0.5] * 4)[3] == 1 + 3 * 0.5
    stage = StageCosts(1, 1, 1, activation_bytes=10.0, waiting_share=0.5)
    peaks = simulate(lower(schedule), Costs((stage,) * 4)).peak_bytes
    assert peaks == tuple(10 * held for held in schedule.held([0.5] * 4))
    with pytest.raises(ScheduleError, match=r"waiting_share=1\.5"):
        StageCosts(1.0, waiting_share=1.5)


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
def test_wrong_options_are_refused_by_name(options, named):
    with pytest.raises(ScheduleError) as error:
        search_schedule(**{"num_stages": 4, "num_micro_batches": 4} | options)
    assert named in str(error.value)
