"""Ranks with several stages: the largest rank is small, not just the largest stage."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

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


def largest(prices, assignment, ranks, weight=0.0):
    own = np.bincount(assignment, prices.once, prices.num_stages)
    return max(rank_totals(own, ranks)) + weight * max(own)


def smallest_of_all(work, ranks, weight):
    """The largest rank, and a share of the largest stage, of the best cuts, which are listed."""
    cuts = itertools.combinations(range(1, len(work)), len(ranks) - 1)
    stages = ([sum(work[a:b]) for a, b in itertools.pairwise((0, *c, len(work)))] for c in cuts)
    return min(max(rank_totals(own, ranks)) + weight * max(own) for own in stages)


@pytest.mark.parametrize("weight", [0.0, 0.5])
@pytest.mark.parametrize("num_stages", RANKS)
def test_boundaries_of_a_chain(num_stages, weight):
    ranks, best, found, before = RANKS[num_stages], 0.0, 0.0, 0.0
    for seed in range(8):
        work = np.random.default_rng(seed).integers(1, 20, 11).astype(float)
        problem = chain(work, num_stages)
        start = balanced(problem)
        moved = balance_ranks(problem, start, ranks, weight=weight)
        before += largest(problem, start, ranks, weight)
        found += largest(problem, moved, ranks, weight)
        best += smallest_of_all(work, ranks, weight)
    assert best <= found <= min(1.05 * best, before)


def test_boundaries_go_a_long_way():
    work = np.random.default_rng(0).random(2000)
    start = (0,) * 100 + (1,) * 100 + (2,) * 1700 + (3,) * 100
    moved = balance_ranks(chain(work, 4), start, (0, 1, 0, 1))
    assert largest(chain(work, 4), moved, (0, 1, 0, 1)) <= 1.001 * work.sum() / 2


def test_of_equal_ranks_the_largest_stage_decides():
    even = chain([1.0] * 8, 4)
    assert balance_ranks(even, (0, 1, 1, 1, 2, 2, 2, 3), RANKS[4]) == (0, 0, 1, 1, 2, 2, 3, 3)


def test_what_must_stay_together_does():
    work = chain([1.0] * 8, 4)
    moved = balance_ranks(work, (0, 1, 1, 1, 2, 2, 2, 3), RANKS[4], groups=[{1, 2}])
    assert moved[1] == moved[2]
