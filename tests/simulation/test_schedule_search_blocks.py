"""V-shaped schedules of little memory: lawful, and as small and as fast as published."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tarantella_pp.schedule import Schedule, lower, validate
from tarantella_pp.simulation import Costs, simulate
from tarantella_pp.simulation.schedule_search import V_HALF, V_MIN, v_orders


def block_of(ranks, micro_batches, steps):
    placement = (*range(ranks), *range(ranks)[::-1])
    orders = v_orders(ranks, micro_batches, steps)
    return Schedule("v", 2 * ranks, micro_batches, ranks, placement, orders)


def held(ranks, micro_batches, steps):
    """The most that a rank holds, in micro-batches of both of its stages."""
    timeline = simulate(lower(block_of(ranks, micro_batches, steps)), Costs.uniform(2 * ranks))
    return max(timeline.peak_bytes) / 2


@given(
    st.integers(1, 9),
    st.integers(1, 12),
    st.lists(st.integers(1, 3), min_size=4, max_size=4),
)
def test_all_of_them_are_lawful(ranks, micro_batches, steps) -> None:
    validate(lower(block_of(ranks, micro_batches, steps)))


@pytest.mark.parametrize("ranks", [4, 5, 8, 16, 32])
def test_they_hold_a_third_and_half_of_1f1b(ranks) -> None:
    assert held(ranks, 4 * ranks, V_MIN) <= ranks / 3 + 4 / 3
    assert held(ranks, 4 * ranks, V_HALF) <= ranks / 2 + 1.5


@pytest.mark.parametrize(("ranks", "micro_batches"), [(4, 8), (8, 32), (16, 32)])
def test_their_bubbles_are_below_that_of_1f1b(ranks, micro_batches) -> None:
    theirs = 3 * (ranks - 1)
    for steps, most in ((V_MIN, 2 / 3), (V_HALF, 1 / 2 + 1 / ranks)):
        step = simulate(lower(block_of(ranks, micro_batches, steps)), Costs.uniform(2 * ranks))
        idle = (step.pipeline_seconds - 6 * micro_batches) / 2
        assert idle <= most * theirs + 1
