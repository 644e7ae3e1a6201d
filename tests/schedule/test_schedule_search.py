import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tarantella_pp.errors import TarantellaError
from tarantella_pp.schedule import (
    Costs,
    LinkCosts,
    StageCosts,
    lower,
    make_schedule,
    search_schedule,
    simulate,
    validate,
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
        )
        for _ in range(p)
    ]
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
    held = search_schedule(4, 8, costs=slow, in_flight_limit=2)
    assert max(held.in_flight(stage) for stage in range(4)) == 2
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
def test_wrong_options_are_refused_by_name(options, named):
    with pytest.raises(TarantellaError) as error:
        search_schedule(**{"num_stages": 4, "num_micro_batches": 4} | options)
    assert named in str(error.value)
