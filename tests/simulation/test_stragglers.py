"""Ranks of different speed: closed forms of the normal distribution."""

from __future__ import annotations

import math

import pytest

from tarantella_pp.schedule import lower, make_schedule
from tarantella_pp.simulation import Costs, StageCosts
from tarantella_pp.simulation.stragglers import expected_maximum, step_spread


def spread_of(ranks, micro_batches, spread, costs=None):
    schedule = lower(make_schedule("1f1b", ranks, micro_batches))
    return step_spread(schedule, costs or Costs.uniform(ranks), spread)


@pytest.mark.parametrize(
    ("count", "wanted"),
    [
        (1, 0.0),
        (2, 1 / math.sqrt(math.pi)),
        (3, 1.5 / math.sqrt(math.pi)),
        (10, 1.5387527308),
        (1000, 3.2414357677),
    ],
)
def test_the_largest_of_normal_numbers(count, wanted) -> None:
    assert expected_maximum(count) == pytest.approx(wanted, abs=1e-5)


def test_one_rank_is_as_slow_as_it_is_drawn() -> None:
    found = spread_of(1, 4, 0.1)
    assert found.mean == pytest.approx(12.0)
    assert found.deviation == pytest.approx(1.2)
    assert found.slowest_of(1) == pytest.approx(12.0)
    assert found.slowest_of(2) == pytest.approx(12.0 + 1.2 / math.sqrt(math.pi), abs=1e-5)


def test_without_a_spread_all_steps_are_alike() -> None:
    found = spread_of(3, 4, 0.0)
    assert found.mean == pytest.approx(18.0)
    assert found.deviation == pytest.approx(0.0)


def test_of_two_ranks_the_slower_one_counts() -> None:
    """With many micro-batches a step takes what the slower rank computes."""
    count = 400
    found = spread_of(2, count, 0.1)
    mean = 3 * count * (1 + 0.1 / math.sqrt(math.pi))
    assert found.mean == pytest.approx(mean, rel=0.01)
    assert found.mean > 3 * count * 1.04


def test_what_is_repeated_and_run_together_is_slower_as_well() -> None:
    stage = StageCosts(1.0, 2.0, 3.0, full_backward=4.0, repeated=1.0)
    found = spread_of(1, 2, 0.1, Costs((stage,)))
    # One stage keeps what runs backward at once.
    assert found.mean == pytest.approx(2 * (1 + 3))
    assert found.deviation == pytest.approx(0.8)
