"""Each solver alone, started without a plan: nothing may hide behind a lucky first order."""

from __future__ import annotations

import time
from dataclasses import replace
from unittest import mock

import networkx as nx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tarantella_pp.partition.solvers.contraction import contract, fuse_uncuttable
from tarantella_pp.partition.solvers.exact import chain_dp, order_dp
from tarantella_pp.partition.solvers.exact.balance_dp import solve_balance
from tarantella_pp.partition.solvers.exact.chain_dp import ChainSearch, OutOfTimeError
from tarantella_pp.partition.solvers.exact.ideals import (
    enumerate_ideals,
    pack,
    unpack,
)
from tarantella_pp.partition.solvers.exact.order_dp import OrderDP
from tarantella_pp.partition.solvers.exact.orders import random_order, starting_orders
from tarantella_pp.partition.solvers.exact.reversal import (
    reversed_family,
    reversed_instance,
    reversed_stages,
)
from tarantella_pp.partition.solvers.exact.stage_pricing import IdealFamily, Pricer
from tarantella_pp.partition.solvers.problem.problem import Problem, TensorCost
from tarantella_pp.partition.solvers.reductions import expand, reduce_problem
from tarantella_pp.partition.solvers.wide.bounds import simple_bound
from tests.helpers.draws import examples
from tests.helpers.problems import (
    loads,
    optimum,
    plans,
    problems,
)

FOREVER = time.thread_time() + 1e6


def close(value):
    return pytest.approx(value, rel=1e-9, abs=1e-12)


@examples(200)
@given(problems(), st.booleans())
def test_chains_alone_find_the_optimum(problem, join):
    problem = replace(problem, tied="together")
    instance = reduce_problem(problem, join=join)
    lattice = enumerate_ideals(instance, 10_000)
    found = ChainSearch(IdealFamily(instance, lattice.words)).run(np.inf, FOREVER)
    best = optimum(problem)
    if best is None:
        assert found is None
    else:
        value, stages = found
        assert value == close(best)
        assert problem.evaluate(expand(problem, instance, stages)).value == close(best)
        assert ChainSearch(IdealFamily(instance, lattice.words)).run(np.inf, FOREVER, goal="any")
        if best > 0:
            less = best * (1 - 1e-6)
            assert ChainSearch(IdealFamily(instance, lattice.words)).run(less, FOREVER) is None


@examples(200)
@given(problems())
def test_balance_alone_finds_the_optimum(problem):
    objective = "memory" if problem.objective == "load" else problem.objective
    limit = problem.memory_limit if objective == "memory" else None
    problem = replace(
        problem,
        objective=objective,
        tied="together",
        exactly=False,
        memory_limit=limit,
        tensors=tuple(replace(t, receive_bytes=0.0) for t in problem.tensors),
    )
    instance = reduce_problem(problem)
    if not instance.num_nodes:
        return
    lattice = enumerate_ideals(instance, 10_000, steps=True)
    assert (np.diff(lattice.target) >= 0).all()
    assert (lattice.source < lattice.target).all()
    result = solve_balance(instance, lattice, 0.0, 1e9, FOREVER)
    best = optimum(problem)
    if best is None:
        assert result.stages is None
    else:
        assert problem.evaluate(expand(problem, instance, result.stages)).value == close(best)
        assert result.lower_bound == pytest.approx(best, rel=1e-9, abs=1e-9)


@examples(200)
@given(problems())
def test_bounds_stay_below_and_orders_above(problem):
    problem = replace(problem, tied="together")
    best = optimum(problem)
    instance = reduce_problem(problem)
    if best is None or instance.num_nodes < instance.num_stages:
        return
    assert simple_bound(instance) <= best * (1 + 1e-9)
    random = np.random.default_rng(0)
    orders = OrderDP(instance)
    for order in [*starting_orders(instance), random_order(instance, random)]:
        assert sorted(order.tolist()) == list(range(instance.num_nodes))
        value, stages = orders.solve(order)
        if np.isfinite(value):
            assert value >= best * (1 - 1e-9)
            assert instance.value(stages) == close(value)
            assert problem.violation(expand(problem, instance, stages)) is None


@examples(100)
@given(problems(), st.sampled_from([0.01, 0.5, 1.3]))
def test_stages_too_dear_to_be_looked_at_are_nothing_to_the_plan(problem, guess):
    instance = reduce_problem(replace(problem, tied="together"))
    orders, order = OrderDP(instance), np.arange(instance.num_nodes)
    with mock.patch.object(order_dp, "FIRST_GUESS", 1e6):
        value, stages = orders.solve(order)
    with mock.patch.object(order_dp, "FIRST_GUESS", guess):
        found, same = orders.solve(order)
    assert found == value
    if np.isfinite(value):
        assert same.tolist() == stages.tolist()
        total, tight = orders.solve(order, capacity=value * (1 + 1e-9))
        assert np.isfinite(total)
        assert instance.value(tight) <= value * (1 + 1e-9)


@examples(200)
@given(problems())
def test_thinned_orders_still_give_plans(problem):
    problem = replace(problem, tied="together", exactly=False, memory_limit=None)
    instance = reduce_problem(problem)
    value, stages = OrderDP(instance, max_cuts=3).solve(np.arange(instance.num_nodes))
    assert instance.value(stages) == close(value)


@examples(100)
@given(problems(), st.sampled_from(["bottleneck", "sum", "any"]))
def test_pairs_priced_at_once_are_priced_one_by_one(problem, goal):
    instance = reduce_problem(replace(problem, tied="together"))
    family = IdealFamily(instance, enumerate_ideals(instance, 10_000).words)
    found = []
    for pairs in (1, 1 << 15):
        with mock.patch.object(chain_dp, "PAIRS_AT_ONCE", pairs):
            found.append(ChainSearch(family).run(np.inf, FOREVER, goal=goal))
    assert (found[0] is None) == (found[1] is None)
    if found[0] is not None:
        assert found[0][0] == found[1][0]
        assert found[0][1].tolist() == found[1][1].tolist()


@examples(200)
@given(problems(), st.integers(0, 10**6))
def test_the_stage_between_two_ideals_costs_what_it_should(problem, seed):
    problem = replace(problem, tied="together", exactly=False)
    instance = reduce_problem(problem)
    if not instance.num_nodes or instance.num_stages < 3:
        return
    words = enumerate_ideals(instance, 10_000).words
    family = IdealFamily(instance, words)
    member = unpack(words, instance.num_nodes)
    row = np.random.default_rng(seed).integers(len(family))
    rows = np.flatnonzero((member >= member[:, [row]]).all(axis=0))
    for index, resource in enumerate(instance.resources):
        pricer = Pricer.of(instance, index)
        fixed, held = pricer.stages(family, np.full(len(rows), row), family, rows)
        for at, end in enumerate(rows):
            stages = np.where(member[:, row], 0, np.where(member[:, end], 1, 2))
            expected = resource.stage_costs(stages)[1]
            assert resource.price(1, fixed, held)[at] == pytest.approx(expected, abs=1e-9)


@examples(300)
@given(loads(), st.sampled_from([0.8, 1.0001, 1.1, 1.5]))
def test_fusing_loads_loses_no_better_plan(problem, part):
    best = optimum(problem)
    if problem.num_stages < 2:
        return
    instance = reduce_problem(problem)
    if not instance.num_nodes:
        return
    small, place = fuse_uncuttable(instance, best * part)
    lattice = enumerate_ideals(small, 10_000)
    _, stages = ChainSearch(IdealFamily(small, lattice.words)).run(np.inf, FOREVER)
    if part > 1:
        assert instance.value(stages[place]) == close(best)


@examples(200)
@given(problems(), st.floats(0.5, 1.5))
def test_fusing_loses_no_better_plan(problem, part):
    problem = replace(problem, tied="together", exactly=False)
    best = optimum(problem)
    if best is None or problem.num_stages < 2:
        return
    instance = reduce_problem(problem)
    small, place = fuse_uncuttable(instance, best * part)
    lattice = enumerate_ideals(small, 10_000)
    found = ChainSearch(IdealFamily(small, lattice.words)).run(np.inf, FOREVER)
    if part > 1:
        assert instance.value(found[1][place]) == close(best)


@examples(200)
@given(problems())
def test_every_ideal_is_listed_once(problem):
    instance = reduce_problem(replace(problem, tied="together"), join=False)
    lattice = enumerate_ideals(instance, 10_000, steps=True)
    member = unpack(lattice.words, instance.num_nodes)
    assert (pack(member.astype(bool)) == lattice.words).all()
    assert (member.sum(axis=0) == lattice.size).all()
    ours = {tuple(column) for column in member.T.tolist()}
    assert len(ours) == lattice.count
    table = plans(
        replace(
            problem,
            num_stages=2,
            exactly=False,
            groups=(),
            tied="together",
            group_bytes=(),
            in_flight=None,
            memory_limit=None,
        )
    )
    if not problem.groups:
        assert lattice.count == len(table)
    steps = sum(
        1
        for column in ours
        for node in range(len(column))
        if not column[node] and (*column[:node], 1, *column[node + 1 :]) in ours
    )
    assert steps == len(lattice.source)
    assert enumerate_ideals(instance, lattice.count - 1) is None


@examples(200)
@given(problems())
def test_from_behind_all_is_the_same(problem):
    instance = reduce_problem(replace(problem, tied="together"))
    turned = reversed_instance(instance)
    if turned is None or not instance.num_nodes:
        assert turned is None or not turned.num_nodes
        return
    family = IdealFamily(instance, enumerate_ideals(instance, 10_000).words)
    behind = ChainSearch(reversed_family(family)).run(np.inf, FOREVER)
    ahead = ChainSearch(family).run(np.inf, FOREVER)
    assert (behind is None) == (ahead is None)
    if behind is not None:
        stages = reversed_stages(behind[1], instance.num_stages)
        assert behind[0] == close(ahead[0])
        assert instance.value(stages) == close(ahead[0])


def test_a_heavy_end_is_searched_from_behind():
    # Long tensors over a chain, and a last node as heavy as a stage may be.
    n = 60
    work = np.array([1.0] * (n - 1) + [30.0])
    tensors = tuple(TensorCost(i, (i, i + 1), 0.3) for i in range(n - 1))
    problem = Problem(4, "load", work, work, work, tensors=tensors)
    instance = reduce_problem(problem)
    family = IdealFamily(instance, enumerate_ideals(instance, 1000).words)
    ahead, behind = ChainSearch(family), ChainSearch(reversed_family(family))
    assert behind.pairs(30.5) < ahead.pairs(30.5)
    assert behind.run(30.2, FOREVER) is None
    assert behind.run(30.3 + 1e-9, FOREVER)[0] == close(30.3)


def test_contracting_fuses_what_lies_between():
    ones = np.ones(4)
    problem = Problem(2, "time", ones, ones, ones, edges=np.array([(0, 1), (1, 2), (2, 3)]))
    small, place = contract(reduce_problem(problem), [(0, 2)])
    assert small.num_nodes == 2
    assert place.tolist() == [0, 0, 0, 1]


def test_a_search_stops_after_its_pairs():
    ones = np.ones(30)
    problem = Problem(4, "time", ones, ones, ones, edges=np.array([(i, i + 1) for i in range(29)]))
    instance = reduce_problem(problem)
    lattice = enumerate_ideals(instance, 100)
    with pytest.raises(OutOfTimeError):
        ChainSearch(IdealFamily(instance, lattice.words), max_pairs=10).run(100.0, FOREVER)
    with pytest.raises(OutOfTimeError):
        ChainSearch(IdealFamily(instance, lattice.words)).run(100.0, time.thread_time() - 1)


def test_reductions_keep_precedence_acyclic():
    random = np.random.default_rng(1)
    for _ in range(50):
        n = 12
        edges = [(i, j) for i in range(n) for j in range(i + 1, n) if random.random() < 0.2]
        zero = random.integers(0, 2, n).astype(float)
        problem = Problem(3, "time", zero, zero, zero, edges=np.array(edges).reshape(-1, 2))
        instance = reduce_problem(problem)
        graph = nx.DiGraph((b, a) for b, after in enumerate(instance.succs) for a in after)
        assert nx.is_directed_acyclic_graph(graph)
        assert instance.num_nodes <= max(1, int(zero.sum()))
