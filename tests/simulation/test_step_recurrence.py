"""The period of steps in a row, against many steps that are played as one."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tarantella_pp.schedule import Compute, Reduce, Schedule, Transfer, lower, make_schedule
from tarantella_pp.simulation import Costs, LinkCosts, StageCosts, StepRecurrence, simulate
from tests.helpers.schedule_strategies import lowered_schedules

MANY = 40


def in_a_row(schedule: Schedule, steps: int) -> Schedule:
    """Several steps as one: each has micro-batches of its own, and begins where a rank ends."""
    count = schedule.num_micro_batches
    actions = tuple(
        tuple(
            action._replace(micro_batch=action.micro_batch + step * count)
            for step in range(steps)
            for action in own
            if isinstance(action, Compute | Transfer)
        )
        for own in schedule.actions
    )
    return replace(schedule, num_micro_batches=steps * count, actions=actions, buckets=())


def grows_by(schedule: Schedule, costs: Costs, steps: int = MANY) -> float:
    """Seconds more of each step, after as many others."""
    long, longer = (simulate(in_a_row(schedule, n), costs).step_seconds for n in (steps, 2 * steps))
    return (longer - long) / steps


@settings(max_examples=80)
@given(lowered_schedules(4, 6), st.data())
def test_the_period_is_what_a_step_more_takes_in_the_long_run(schedule, data):
    seconds = st.integers(1, 9)
    stages = [StageCosts(*data.draw(st.tuples(*[seconds] * 3))) for _ in schedule.placement]
    link = LinkCosts(data.draw(st.integers(0, 3)), data.draw(st.integers(0, 9)))
    costs = Costs(tuple(stages), default_link=link, send_seconds=data.draw(st.integers(0, 1)))
    found = StepRecurrence.of(schedule, costs).period_seconds
    alone = replace(schedule, buckets=())
    alone = replace(alone, actions=tuple(
        tuple(a for a in own if not isinstance(a, Reduce)) for own in schedule.actions
    ))  # fmt: skip
    assert found == pytest.approx(grows_by(alone, costs), rel=0.03)
    assert max(simulate(alone, costs).busy_seconds) <= found * (1 + 1e-9)
    step = simulate(alone, costs).step_seconds
    assert StepRecurrence.of(schedule, costs).step_seconds == pytest.approx(step)
    assert found <= step * (1 + 1e-9)


def test_a_rank_that_is_done_goes_on():
    ranks = "0F0 0F1 0F2 0B0 0W0 0B1 0W1 0B2 0W2", "1F0 1B0 1F1 1B1 1F2 1B2 1W0 1W1 1W2"
    schedule = lower(
        Schedule.from_text("".join(f"rank {i}: {own}\n" for i, own in enumerate(ranks)))
    )
    costs = Costs.uniform(2)
    assert simulate(schedule, costs).step_seconds == 10
    assert StepRecurrence.of(schedule, costs).period_seconds == 9  # no rank is ever idle
    late = replace(costs, default_link=LinkCosts(latency=0.5))
    # The last gradient comes 1 s too late for rank 0 to go on at once: two messages.
    assert StepRecurrence.of(schedule, late).period_seconds == 10


def test_ranks_wait_for_their_own_reductions_only():
    schedule = lower(make_schedule("gpipe", 2, 1), buckets=(1, 1))
    recurrence = StepRecurrence.of(schedule, Costs.uniform(2))
    assert recurrence.period_seconds == 6
    assert recurrence.reduced_period([[(0, 2.0)], []]) == 8
    assert recurrence.reduced_period([[], [(1, 2.0)]]) == 6  # rank 0 is done at 6, this at 6
    assert recurrence.reduced_period([[], [(1, 4.0)]]) == 7
