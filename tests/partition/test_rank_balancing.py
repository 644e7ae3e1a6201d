"""Ranks with several stages: the largest rank is small, not just the largest stage."""

from __future__ import annotations

import itertools
import tracemalloc

import numpy as np
import pytest

from tarantella_pp.partition import rank_balancing
from tarantella_pp.partition.cut import Prices, best_cut
from tarantella_pp.partition.graph.ideals import Blocks
from tarantella_pp.partition.rank_balancing import balance_ranks, rank_totals

RANKS = {3: (0, 1, 0), 4: (0, 1, 1, 0), 5: (0, 1, 0, 1, 0), 6: (0, 1, 2, 0, 1, 2)}


def chain(work, num_stages):
    return Prices(np.array(work, float), np.zeros(len(work)), np.ones(num_stages))


def balanced(prices):
    """Stages of a chain of which the largest is small."""
    count = len(prices.once)
    blocks = Blocks.joined(count, itertools.pairwise(range(count)))
    return best_cut(blocks, prices).assignments[0]


def values(prices, assignment):
    return np.bincount(assignment, prices.once, prices.num_stages)


def largest(prices, assignment, ranks):
    return max(rank_totals(values(prices, assignment), ranks))


def smallest_of_all(work, ranks, bubble_weight=0.0):
    """The largest rank, and a share of the largest stage, of the best cuts, which are listed."""
    cuts = itertools.combinations(range(1, len(work)), len(ranks) - 1)
    stages = ([sum(work[a:b]) for a, b in itertools.pairwise((0, *c, len(work)))] for c in cuts)
    return min(max(rank_totals(own, ranks)) + bubble_weight * max(own) for own in stages)


@pytest.mark.parametrize("bubble_weight", [0.0, 0.1, 0.5])
@pytest.mark.parametrize("num_stages", RANKS)
def test_the_best_boundaries_of_a_chain(num_stages, bubble_weight):
    """The largest stage counts as much as it is told to, and never nothing."""
    ranks = RANKS[num_stages]
    for seed in range(5):
        work = np.random.default_rng(seed).integers(1, 20, 11).astype(float)
        problem = chain(work, num_stages)
        moved = balance_ranks(problem, balanced(problem), ranks, bubble_weight)
        found = largest(problem, moved, ranks) + bubble_weight * max(values(problem, moved))
        best = smallest_of_all(work, ranks, bubble_weight)
        slack = 3 * rank_balancing.LAST * work.sum()
        if not bubble_weight:
            slack = 2 * rank_balancing.LEAST_BUBBLE_WEIGHT * best
        assert best <= found <= best + slack


def test_where_too_many_to_list_boundaries_are_moved(monkeypatch):
    work = np.random.default_rng(0).integers(1, 20, 40).astype(float)
    problem, ranks = chain(work, 4), RANKS[4]
    start = balanced(problem)
    listed = largest(problem, balance_ranks(problem, start, ranks), ranks)
    monkeypatch.setattr(rank_balancing, "MOST_CHOICES", 0)
    moved = largest(problem, balance_ranks(problem, start, ranks), ranks)
    assert listed <= moved < largest(problem, start, ranks)


def test_long_graphs_are_not_tried_place_by_place():
    work = np.random.default_rng(0).random(2000)
    start = (0,) * 100 + (1,) * 100 + (2,) * 1700 + (3,) * 100
    tracemalloc.start()
    moved = balance_ranks(chain(work, 4), start, (0, 1, 0, 1))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 1700 * 1700 * 8
    assert largest(chain(work, 4), moved, (0, 1, 0, 1)) <= 1.001 * work.sum() / 2


def test_of_equal_ranks_the_largest_stage_decides_and_then_what_is_cut():
    even = chain([1.0] * 8, 4)
    assert balance_ranks(even, (0, 1, 1, 1, 2, 2, 2, 3), RANKS[4]) == (0, 0, 1, 1, 2, 2, 3, 3)


def test_equal_ranks_of_very_unequal_stages_are_no_good_plan():
    almost = chain(np.array([10.0, 10.0, 9.8, 10.2, 0.1]), 4)
    assert balance_ranks(almost, (0, 1, 2, 3, 3), RANKS[4]) == (0, 0, 1, 2, 3)
    assert balance_ranks(almost, (0, 1, 2, 3, 3), RANKS[4], 1 / 8) == (0, 1, 2, 3, 3)


def test_a_stage_keeps_its_limit():
    memory = chain([9.0, 1.0, 1.0, 1.0], 3)
    free = chain([1.0, 1.0, 4.0, 2.0], 3)
    assert balance_ranks(free, (0, 0, 1, 2), RANKS[3]) == (0, 0, 1, 2)
    limits = (memory, [9.5, 20.0, 20.0])
    assert balance_ranks(free, (0, 1, 1, 2), RANKS[3], limits=limits) == (0, 1, 1, 2)


def test_what_must_stay_together_does():
    work = chain([1.0] * 8, 4)
    moved = balance_ranks(work, (0, 1, 1, 1, 2, 2, 2, 3), RANKS[4], groups=[{1, 2}])
    assert moved[1] == moved[2]
