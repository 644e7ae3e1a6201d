"""Ranks with several stages: the largest rank is small, not just the largest stage."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tarantella_pp.partition import rank_balancing
from tarantella_pp.partition.rank_balancing import (
    balance_ranks,
    lower_bound,
    rank_totals,
)
from tarantella_pp.partition.solvers.problem.problem import Problem
from tarantella_pp.partition.solvers.solve import solve
from tests.helpers.problems import plans, problems

RANKS = {3: (0, 1, 0), 4: (0, 1, 1, 0), 5: (0, 1, 0, 1, 0), 6: (0, 1, 2, 0, 1, 2)}


def chain(work, num_stages):
    n = len(work)
    edges = np.array([(i, i + 1) for i in range(n - 1)])
    nothing = np.zeros(n)
    return Problem(num_stages, "flops", work, nothing, nothing, edges=edges, exactly=True)


def largest(problem, assignment, ranks):
    return max(rank_totals(problem.evaluate(assignment).stage_values, ranks))


def smallest_of_all(work, ranks, bubble_weight=0.0):
    """The largest rank, and a share of the largest stage, of the best cuts, which are listed."""
    cuts = itertools.combinations(range(1, len(work)), len(ranks) - 1)
    stages = ([sum(work[a:b]) for a, b in itertools.pairwise((0, *c, len(work)))] for c in cuts)
    return min(max(rank_totals(own, ranks)) + bubble_weight * max(own) for own in stages)


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("num_stages", RANKS)
def test_the_best_boundaries_of_a_chain(seed, num_stages):
    work = np.random.default_rng(seed).integers(1, 20, 11).astype(float)
    problem, ranks = chain(work, num_stages), RANKS[num_stages]
    moved = balance_ranks(problem, solve(problem).assignment, ranks)
    best = smallest_of_all(work, ranks)
    assert (
        best
        <= largest(problem, moved, ranks)
        <= best * (1 + 2 * rank_balancing.LEAST_BUBBLE_WEIGHT)
    )
    assert best >= lower_bound(problem, ranks)


def test_where_too_many_to_list_boundaries_are_moved(monkeypatch):
    work = np.random.default_rng(0).integers(1, 20, 40).astype(float)
    problem, ranks = chain(work, 4), RANKS[4]
    start = solve(problem).assignment
    listed = largest(problem, balance_ranks(problem, start, ranks), ranks)
    monkeypatch.setattr(rank_balancing, "MOST_CHOICES", 0)
    monkeypatch.setattr(rank_balancing, "MOST_POSITIONS", 20)
    moved = largest(problem, balance_ranks(problem, start, ranks), ranks)
    assert listed <= moved < largest(problem, start, ranks)


def test_of_equal_ranks_the_largest_stage_decides_and_then_what_is_cut():
    even = chain([1.0] * 8, 4)
    assert balance_ranks(even, (0, 1, 1, 1, 2, 2, 2, 3), RANKS[4]) == (0, 0, 1, 1, 2, 2, 3, 3)


@given(problems(max_nodes=7, max_stages=4), st.data())
def test_what_comes_out_is_a_plan_and_its_ranks_are_no_larger(problem, data):
    problem = replace(problem, exactly=True)
    ranks = RANKS.get(problem.num_stages)
    table = plans(problem)
    if ranks is None or not len(table):
        return
    start = data.draw(st.sampled_from(table.tolist()))
    limits = [1e-9 + max(1.0, held) for held in problem.evaluate(start).stage_memory]
    problem = replace(problem, memory_limit=limits)
    moved = balance_ranks(problem, start, ranks)
    assert list(moved) in table.tolist()
    if problem.objective in ("time", "flops"):
        once = largest(problem, start, ranks)
        assert largest(problem, moved, ranks) <= once + 0.03 * problem.work.sum()


@pytest.mark.parametrize("bubble_weight", [0.1, 0.5])
@pytest.mark.parametrize("seed", range(5))
def test_the_largest_stage_counts_as_much_as_it_is_told_to(seed, bubble_weight):
    work = np.random.default_rng(seed).integers(1, 20, 11).astype(float)
    problem, ranks = chain(work, 4), RANKS[4]
    moved = balance_ranks(problem, solve(problem).assignment, ranks, bubble_weight)
    found = largest(problem, moved, ranks) + bubble_weight * max(
        problem.evaluate(moved).stage_values
    )
    best = smallest_of_all(work, ranks, bubble_weight)
    assert best <= found <= best + 3 * rank_balancing.LAST * work.sum()


def test_equal_ranks_of_very_unequal_stages_are_no_good_plan():
    almost = chain(np.array([10.0, 10.0, 9.8, 10.2, 0.1]), 4)
    assert balance_ranks(almost, (0, 1, 2, 3, 3), RANKS[4]) == (0, 0, 1, 2, 3)
    assert balance_ranks(almost, (0, 1, 2, 3, 3), RANKS[4], 1 / 8) == (0, 1, 2, 3, 3)


def test_a_stage_keeps_its_limit():
    work = np.array([4.0, 1.0, 1.0, 2.0])
    problem = replace(chain(work, 3), static_memory=np.array([9.0, 1.0, 1.0, 1.0]))
    assert balance_ranks(problem, (0, 1, 1, 2), RANKS[3]) == (0, 1, 1, 2)
    free = replace(problem, work=np.array([1.0, 1.0, 4.0, 2.0]))
    assert balance_ranks(free, (0, 0, 1, 2), RANKS[3]) == (0, 0, 1, 2)
    limited = replace(free, memory_limit=[9.5, 20.0, 20.0])
    assert balance_ranks(limited, (0, 1, 1, 2), RANKS[3]) == (0, 1, 1, 2)


def test_a_bound_of_memory_counts_what_is_held_the_least():
    problem = Problem(
        3, "memory", np.zeros(4), np.array([6.0, 2.0, 2.0, 2.0]), np.ones(4), in_flight=[3, 2, 1]
    )
    assert lower_bound(problem, (0, 1, 0)) == (12 + 4) / 2
