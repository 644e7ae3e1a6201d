"""The shortest path over down-sets against all plans of small graphs, one by one."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tarantella_pp.partition.cut import Prices, best_cut
from tarantella_pp.partition.graph import ideals
from tarantella_pp.partition.graph.ideals import Blocks

numbers = st.sampled_from([0.0, 1.0, 2.0, 5.0, 9.0])


@st.composite
def problems(draw):
    """Small graphs with groups and prices."""
    count = draw(st.integers(1, 7))
    pairs = list(itertools.combinations(range(count), 2))
    edges = draw(st.sets(st.sampled_from(pairs), max_size=9)) if pairs else set()
    groups = []
    if count > 1:
        groups = draw(st.lists(st.sets(st.integers(0, count - 1), min_size=2), max_size=1))
    stages = draw(st.integers(1, min(count, 4)))
    once, each = (
        np.array(draw(st.lists(numbers, min_size=count, max_size=count))) for _ in range(2)
    )
    times = draw(st.lists(st.sampled_from([0.0, 1.0, 2.0, 3.0]), min_size=stages, max_size=stages))
    wires = [((a, b), 1.0 + a) for a, b in edges]
    extra = draw(numbers)

    def price(begin, end, stage):
        """What is sent and received comes on top, and every third stage costs more."""
        inside = [i for i in range(count) if (end & ~begin) >> i & 1]
        cut = sum((a in inside) != (b in inside) for a, b in edges)
        return (once + times[stage] * each)[inside].sum() + extra * cut + (stage % 3 == 2)

    prices = Prices(once, each, np.array(times), price, wires=wires)
    return edges, groups, prices


def all_plans(edges, groups, prices):
    """Yields the value and the stages of every plan."""
    count, stages = len(prices.once), prices.num_stages
    for one in itertools.product(range(stages), repeat=count):
        ordered = all(one[a] <= one[b] for a, b in edges)
        together = all(len({one[node] for node in group}) == 1 for group in groups)
        if ordered and together and len(set(one)) == stages:
            sets = [sum(1 << i for i in range(count) if one[i] < s) for s in range(stages + 1)]
            costs = (
                max(prices.price(a, b, s), _sums(prices, one, s))
                for s, (a, b) in enumerate(itertools.pairwise(sets))
            )
            yield max(costs), one


def _sums(prices, assignment, stage):
    own = np.array(assignment) == stage
    return (prices.once + prices.times[stage] * prices.each)[own].sum()


@settings(max_examples=200, deadline=None)
@given(problems(), st.booleans())
def test_no_plan_costs_less(problem, priced):
    edges, groups, prices = problem
    if not priced:
        sums = replace(prices, price=lambda *stage: 0.0)
        plans = {one: value for value, one in all_plans(edges, groups, sums)}
        prices = replace(prices, price=None)
    else:
        plans = {one: value for value, one in all_plans(edges, groups, prices)}
    blocks = Blocks.joined(len(prices.once), edges, groups)
    found = best_cut(blocks, prices)
    if not plans:
        assert found is None
        return
    best = min(plans.values())
    assert plans[found.assignments[0]] == pytest.approx(best)
    assert found.bound == pytest.approx(best)
    assert prices.bound(blocks) <= best * (1 + 1e-9)

    def cut(one):
        return sum(size * (one[b] - one[a]) for (a, b), size in prices.wires)

    if not priced:
        equal = [one for one, value in plans.items() if value <= best * (1 + 1e-10)]
        assert cut(found.assignments[0]) == pytest.approx(min(map(cut, equal)))


@settings(max_examples=60, deadline=None)
@given(problems())
def test_some_orders_give_plans_and_bounds(problem):
    edges, groups, prices = problem
    plans = {one: value for value, one in all_plans(edges, groups, prices)}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ideals, "MOST_IDEALS", 1)
        blocks = Blocks.joined(len(prices.once), edges, groups)
        assert blocks.ideals is None
        found = best_cut(blocks, prices)
    if not plans:
        assert found is None
        return
    assert found.bound <= min(plans.values()) * (1 + 1e-9)
    assert found.bound <= plans[found.assignments[0]] * (1 + 1e-9)


def test_stages_that_cannot_be_are_avoided():
    blocks = Blocks.joined(4, [(0, 1), (1, 2), (2, 3)])
    prices = Prices(np.ones(4), np.zeros(4), np.ones(2))
    assert best_cut(blocks, prices).assignments[0] == (0, 0, 1, 1)
    limited = replace(
        prices, price=lambda begin, end, stage: math.inf if begin == 0 < end == 3 else 0
    )
    assert best_cut(blocks, limited).assignments[0] in ((0, 1, 1, 1), (0, 0, 0, 1))
    assert best_cut(blocks, replace(prices, price=lambda *stage: math.inf)) is None


def test_down_sets_of_a_diamond():
    blocks = Blocks.joined(4, [(0, 1), (0, 2), (1, 3), (2, 3)])
    assert blocks.ideals.sets == [0b0, 0b1, 0b11, 0b101, 0b111, 0b1111]
    assert blocks.ideals.inside.sum() == 14  # of 15 pairs, {0 1} and {0 2} are none


def test_what_lies_between_a_group_is_in_it():
    blocks = Blocks.joined(4, [(0, 1), (1, 2), (2, 3)], [{0, 2}])
    assert [bin(one) for one in blocks.nodes] == ["0b111", "0b1000"]
