"""Replicas reduce in the same order, whatever their numbers of micro-batches."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tarantella_pp.schedule import (
    TRAINING_NAMES,
    Reduce,
    ScheduleSpec,
    lower,
    reductions,
    validate,
)
from tarantella_pp.simulation import search_schedule


@st.composite
def specs(draw: st.DrawFn) -> ScheduleSpec:
    """A schedule for any number of micro-batches up to 8: named, searched for, or a user's own."""
    name = draw(st.sampled_from(TRAINING_NAMES))
    ranks = draw(st.integers(1, 4))
    stages = ranks * (2 if name == "zb-v" else draw(st.integers(1, 3)))
    if draw(st.booleans()):
        found = search_schedule(
            stages, 8, ranks, in_flight_limit=draw(st.none() | st.integers(1, 4))
        )
        return ScheduleSpec.of_custom(found, stages)
    return ScheduleSpec.of(name, stages, ranks)


@given(specs(), st.integers(1, 8), st.integers(1, 8), st.data())
def test_order_does_not_depend_on_the_number_of_micro_batches(spec, one, other, data):
    size = spec.num_stages
    buckets = data.draw(st.lists(st.integers(0, 3), min_size=size, max_size=size))
    for count in (one, other):
        schedule = lower(spec.make(count), buckets=buckets)
        validate(schedule)
        for rank, own in enumerate(schedule.actions):
            found = tuple(action for action in own if isinstance(action, Reduce))
            assert found == reductions(spec.placement, buckets, rank)


def test_the_order_of_last_weight_gradients_does_depend_on_it():
    """Why there is an order of its own: without one, replicas would wait for each other."""
    found = search_schedule(4, 8, 2)

    def order(count: int) -> list[int]:
        own = found.first(count).actions[0]
        last = {a.stage: position for position, a in enumerate(own) if a.kind in ("W", "BW")}
        return sorted(last, key=last.__getitem__)

    assert {tuple(order(count)) for count in range(1, 9)} == {(0, 2), (2, 0)}


def test_the_last_stage_comes_first_and_no_buckets_make_no_reductions():
    assert [str(a) for a in reductions((0, 1, 0, 1), (1, 2, 2, 0), 0)] == ["2R0", "2R1", "0R0"]
    assert reductions((0, 1), (), 0) == ()
