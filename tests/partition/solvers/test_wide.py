"""The solvers for graphs too large to list, on graphs small enough to check them."""

from __future__ import annotations

import time
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tarantella_pp.partition.external.external_graph import to_problem
from tarantella_pp.partition.solvers import strategy as search_module
from tarantella_pp.partition.solvers import tie_breaking as ties_module
from tarantella_pp.partition.solvers.exact import ideals as ideals_module
from tarantella_pp.partition.solvers.exact.chain_dp import OutOfTimeError
from tarantella_pp.partition.solvers.exact.ideals import enumerate_ideals, unpack
from tarantella_pp.partition.solvers.exact.order_dp import OrderDP
from tarantella_pp.partition.solvers.problem.problem import Problem
from tarantella_pp.partition.solvers.reductions import expand, reduce_problem, shrink
from tarantella_pp.partition.solvers.solve import solve
from tarantella_pp.partition.solvers.wide import stage_filling as filling_module
from tarantella_pp.partition.solvers.wide.boundary_weights import Boundaries
from tarantella_pp.partition.solvers.wide.bounds import (
    company_bound,
    granular,
    simple_bound,
    unit_of,
)
from tarantella_pp.partition.solvers.wide.cut_bound import CutBound
from tarantella_pp.partition.solvers.wide.ideal_sweep import IdealRange, IdealSweep
from tarantella_pp.partition.solvers.wide.local_search import LocalSearch
from tarantella_pp.partition.solvers.wide.min_cut import least_cut
from tarantella_pp.partition.solvers.wide.stage_filling import StageFilling
from tarantella_pp.partition.solvers.wide.stage_windows import Closure, window_bound
from tarantella_pp.partition.solvers.wide.two_stages import TwoStages
from tests.helpers.draws import examples
from tests.helpers.problems import (
    loads,
    optimum,
    problems,
)
from tests.zoo.graphs import branching, gpt, layered


def soon(seconds=0.3):
    return time.thread_time() + seconds


def ready(problem, stages=2):
    """Returns the instance and the optimum, or None for problems that are trivial."""
    best = optimum(problem)
    instance = reduce_problem(problem)
    if best is None or problem.num_stages < stages or instance.num_nodes < 2:
        return None
    return instance, best


@examples(150)
@given(loads(), st.integers(0, 10**6))
def test_least_cuts_are_least(problem, seed):
    instance = reduce_problem(problem, join=False)
    n, terms = instance.num_nodes, instance.objective.terms
    random = np.random.default_rng(seed)
    member = unpack(enumerate_ideals(instance, 10_000).words, n).astype(bool)
    low = member[:, random.integers(member.shape[1])]
    high = member[:, random.integers(member.shape[1])]
    inside, outside = low & high, ~(low | high)
    price = random.normal(size=n)
    total, found = least_cut(instance, terms.touch, inside, outside, price)

    def cost(column):
        cut = sum(
            touch
            for pins, touch in zip(terms.pins, terms.touch, strict=True)
            if len({bool(column[pin]) for pin in pins}) > 1
        )
        return cut + price[column & ~inside].sum()

    able = [c for c in member.T if (c >= inside).all() and not (c & outside).any()]
    assert total == pytest.approx(min(cost(column) for column in able), abs=1e-9)
    assert cost(found) == pytest.approx(total, abs=1e-9)
    assert any((column == found).all() for column in able)


def cut_of(terms, column):
    """What an ideal cuts."""
    return sum(
        touch
        for pins, touch in zip(terms.pins, terms.touch, strict=True)
        if len({bool(column[pin]) for pin in pins}) > 1
    )


@examples(150)
@given(loads(), st.integers(0, 10**6), st.booleans())
def test_a_sweep_finds_the_least_cut_of_each_work(problem, seed, known):
    instance = reduce_problem(problem, join=False)
    n, objective = instance.num_nodes, instance.objective
    random = np.random.default_rng(seed)
    member = unpack(enumerate_ideals(instance, 10_000).words, n).astype(bool)
    ends = member[:, random.integers(member.shape[1], size=2) if known else [0, -1]]
    inside, outside = ends.all(axis=1), ~ends.any(axis=1)
    low, high = sorted(random.uniform(0, objective.fixed.sum(), 2))
    expected: dict[float, float] = {}
    for column in member.T:
        if (column >= inside).all() and not (column & outside).any():
            work, cut = float(objective.fixed @ column), cut_of(objective.terms, column)
            if work - cut >= low and work + cut <= high:
                key = round(work, 6)
                expected[key] = min(expected.get(key, np.inf), cut)
    sweep = IdealSweep(instance, objective.fixed, objective.terms.touch)
    free = np.flatnonzero(~(inside | outside))
    span = IdealRange(inside, free, low / sweep.unit, high / sweep.unit)
    swept = sweep.run(span, soon(20), limit=10_000)
    columns = swept.members(np.arange(len(swept))).T
    found: dict[float, float] = {}
    for column, work, cut in zip(columns, swept.work, swept.cut, strict=True):
        assert any((column == other).all() for other in member.T)
        assert cut * sweep.unit == pytest.approx(cut_of(objective.terms, column), abs=1e-9)
        assert work * sweep.unit == pytest.approx(objective.fixed @ column, abs=1e-9)
        found[round(work * sweep.unit, 6)] = cut * sweep.unit
    assert found == pytest.approx(expected, abs=1e-9)
    assert len(swept) == len(found)
    few = sweep.run(span, soon(20), limit=2, random=random)
    assert len(few) <= 2
    assert len(swept) == 0 or len(free) == 0 or sweep.run(span, soon(20), limit=0) is None
    assert sweep.run(span, soon(-1), limit=10) is None or not len(free)


@examples(150)
@given(problems(whole=True), st.booleans())
def test_weights_at_boundaries_bound_and_lead_to_plans(problem, irregular):
    changes = {"objective": "time", "tied": "together", "memory_limit": None, "in_flight": None}
    if irregular:
        changes["work"] = problem.work * np.pi
    problem = replace(problem, exactly=False, **changes)
    if given_ := ready(problem):
        instance, best = given_
        whole = np.zeros(instance.num_nodes, np.int64)
        boundaries = Boundaries(instance, Closure.of(instance))
        lower = boundaries.bound(simple_bound(instance), instance.value(whole), soon(20))
        assert simple_bound(instance) <= lower <= best * (1 + 1e-9)
        if problem.num_stages == 2:
            assert lower == pytest.approx(best, rel=1e-9)
        random = np.random.default_rng(0)
        start_value = instance.value(whole)
        tight = lower >= best * (1 - 1e-9)  # then the search ends where a plan has been found
        deadline = soon(60 if tight else 0.2)
        bound, value, stages = boundaries.search(start_value, whole, lower, random, deadline)
        assert bound <= best * (1 + 1e-9)
        assert value >= best * (1 - 1e-9)
        assert value == instance.value(stages)
        assert problem.violation(expand(problem, instance, stages)) is None
        if tight:
            assert value == pytest.approx(best, rel=1e-9)


LEAD_ON = {
    "one of the ideals of a weight": (4, [3, 2, 1, 2, 4, 2, 1, 4], "03 04 05 25 47", 5),
    "weights rounded to units": (
        3, np.pi * np.array([4, 3, 2, 3, 3, 3]), "02 04 05 12 13 14 23 24 25 34 35 45", 7 * np.pi,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", LEAD_ON)
def test_some_dive_finds_the_plan_that_meets_the_bound(name):
    stages, work, edges, best = LEAD_ON[name]
    pairs = np.array([[int(node) for node in edge] for edge in edges.split()])
    instance = reduce_problem(Problem(stages, "time", work, work, work, edges=pairs))
    whole = np.zeros(instance.num_nodes, np.int64)
    boundaries = Boundaries(instance, Closure.of(instance))
    lower, start = simple_bound(instance), instance.value(whole)
    random = np.random.default_rng(0)
    bound, value, _ = boundaries.search(start, whole, lower, random, soon(20))
    assert bound == pytest.approx(best)
    assert value == pytest.approx(best)


def test_boundaries_that_are_too_many_to_list_bound_nothing(monkeypatch):
    from tarantella_pp.partition.solvers.wide import boundary_weights as module

    problem = to_problem(branching(), 4, "memory")
    instance = reduce_problem(problem)
    lower, upper = simple_bound(instance), 1.2 * simple_bound(instance)
    full = Boundaries(instance, Closure.of(instance)).bound(lower, upper, soon(20))
    monkeypatch.setattr(module, "MAX_WEIGHTS", 40)
    part = Boundaries(instance, Closure.of(instance)).bound(lower, upper, soon(20))
    assert lower <= part <= full


@pytest.mark.parametrize(
    ("costs", "unit"), [([0.5, 1.5], 0.5), ([4, 6], 2), ([np.pi, 1], 0), ([0, 0], 0)]
)
def test_units(costs, unit):
    assert unit_of(np.array(costs, float)) == pytest.approx(unit)


@examples(300)
@given(loads())
def test_two_stages_are_solved(problem):
    problem = replace(problem, num_stages=2, in_flight=None)
    if given_ := ready(problem):
        instance, best = given_
        whole = instance.value(np.zeros(instance.num_nodes, np.int64))
        bound, stages = TwoStages(instance).run(whole, soon(20))
        assert bound == pytest.approx(best, rel=1e-8)
        value = whole if stages is None else instance.value(stages)
        assert value == pytest.approx(best, rel=1e-8)


@examples(150)
@given(loads())
def test_bounds_of_loads_hold(problem):
    if given_ := ready(problem):
        instance, best = given_
        closure = Closure.of(instance)
        bound = window_bound(closure, simple_bound(instance), 1000.0)
        assert bound <= best * (1 + 1e-9)
        assert bound <= company_bound(instance, bound) <= best * (1 + 1e-9)
        assert CutBound(instance, closure).improve(bound, 1.5 * best, soon()) <= best * (1 + 1e-9)


@examples(150)
@given(problems(whole=True))
def test_bounds_of_balance_hold(problem):
    problem = replace(problem, objective="time", tied="together", memory_limit=None, in_flight=None)
    if given_ := ready(problem):
        instance, best = given_
        bound = window_bound(Closure.of(instance), simple_bound(instance), 1000.0)
        assert bound <= best * (1 + 1e-9)
        assert granular(instance, bound) <= best * (1 + 1e-9)


@examples(300)
@given(problems())
def test_bounds_hold_for_every_objective(problem):
    problem = replace(problem, tied="together")
    if given_ := ready(problem):
        instance, best = given_
        closure = Closure.of(instance)
        bound = window_bound(closure, simple_bound(instance), 1.5 * best + 1)
        assert bound <= best * (1 + 1e-9)
        assert CutBound(instance, closure).improve(bound, 1.5 * best, soon()) <= best * (1 + 1e-9)


def counted_unlike():
    """Returns a problem whose four stages hold what they keep 4, 3, 2 and 1 times."""
    problem = to_problem(branching(), 4, "memory")
    return replace(
        problem,
        static_memory=np.zeros(problem.num_nodes),
        activation_memory=problem.work,
        in_flight=[4, 3, 2, 1],
    )


def test_prices_bound_what_stages_hold_that_count_unlike_numbers_of_micro_batches():
    problem = counted_unlike()
    instance = reduce_problem(problem)
    best = solve(problem).certificate
    assert best.optimal
    bound = CutBound(instance, Closure.of(instance)).improve(0.0, 2 * best.value, soon(20))
    assert 0.97 * best.value <= bound <= best.value * (1 + 1e-9)


def test_an_exact_search_that_is_cut_off_has_the_bound_of_prices(monkeypatch):
    problem = counted_unlike()
    tensors = tuple(replace(one, receive_bytes=0.1) for one in problem.tensors)
    problem = replace(problem, tensors=tensors)
    exact = solve(problem).certificate
    assert exact.optimal
    whole = search_module.ChainSearch.run

    def cut_off(self, capacity, deadline, *, goal="bottleneck"):
        if goal == "bottleneck":
            raise OutOfTimeError("cut off")
        return whole(self, capacity, deadline, goal=goal)

    monkeypatch.setattr(search_module.ChainSearch, "run", cut_off)
    found = solve(problem).certificate
    assert "cut off" in found.method
    assert exact.value * 0.97 <= found.lower_bound <= exact.value * (1 + 1e-9)
    assert found.value >= exact.value * (1 - 1e-9)


def test_a_bound_is_rounded_up_to_the_unit():
    work = [0.5, 0.5, 1.5]
    problem = Problem(2, "time", work, work, work, edges=np.array([(0, 1), (1, 2)]))
    assert granular(reduce_problem(problem), 1.26) == pytest.approx(1.5)
    assert granular(reduce_problem(replace(problem, work=[0.5, 0.5, np.pi])), 1.26) == 1.26


@examples(25)
@given(problems())
def test_local_search_gives_plans(problem):
    problem = replace(problem, tied="together")
    if given_ := ready(problem):
        instance, best = given_
        closure = Closure.of(instance)
        search = LocalSearch(instance, OrderDP(instance), closure)
        value, stages = search.run(None, best, soon(0.2))
        if stages is not None:
            assert value >= best * (1 - 1e-9)
            assert problem.violation(expand(problem, instance, stages)) is None


@pytest.mark.parametrize("objective", ["time", "memory", "load"])
@pytest.mark.parametrize("stages", [2, 4])
@pytest.mark.parametrize("make", [branching, layered, lambda: gpt(120)])
def test_what_is_searched_agrees_with_what_is_exact(monkeypatch, make, stages, objective):
    problem = to_problem(make(), stages, objective)
    exact = solve(problem).certificate
    assert exact.optimal
    monkeypatch.setattr(search_module, "MAX_IDEALS", 5)
    monkeypatch.setattr(ties_module, "MAX_IDEALS", 5)
    searched = solve(problem, time_budget=1.0)
    assert problem.violation(searched.assignment) is None
    assert searched.certificate.lower_bound <= exact.value * (1 + 1e-9)
    assert searched.certificate.value >= exact.value * (1 - 1e-9)
    assert searched.certificate.value <= exact.value * 1.15
    if searched.certificate.optimal:
        assert searched.certificate.value == pytest.approx(exact.value)


@pytest.mark.slow
def test_a_gpt_too_large_to_list_has_a_gap(monkeypatch):
    monkeypatch.setattr(ideals_module, "MEMORY_LIMIT", 1_000_000)
    problem = to_problem(gpt(5000), 8, "load")
    solution = solve(problem, time_budget=4.0)
    certificate = solution.certificate
    assert problem.violation(solution.assignment) is None
    assert not certificate.optimal
    assert 0 < certificate.gap < 0.1
    assert "gap <=" in str(certificate)


@pytest.mark.slow
def test_a_large_gpt_is_certified():
    problem = to_problem(gpt(5000), 8, "load")
    certificate = solve(problem).certificate
    assert certificate.optimal
    assert problem.num_nodes > 4900


@pytest.mark.parametrize("few", [False, True])
@examples(150)
@given(problems(whole=True), st.sampled_from(["memory", "time"]), st.floats(0.7, 1.5))
def test_filled_stages_keep_the_capacity_and_refuse_none_in_vain(few, problem, objective, share):
    changes = {"objective": objective, "tied": "together", "memory_limit": None, "tensors": ()}
    if objective == "memory":
        changes.pop("tensors")  # what stages receive
    problem = replace(problem, **changes)
    if given_ := ready(problem):
        instance, best = given_
        if not instance.settled:
            return
        with pytest.MonkeyPatch.context() as patch:
            if few:
                patch.setattr(filling_module, "BEAM", 2)
                patch.setattr(filling_module, "PARTIAL", 3)
            filling = StageFilling(instance, Closure.of(instance))
            found, refused = filling.fill(share * best, soon(20))
            if found is not None:
                assert instance.value(found) >= best * (1 - 1e-9)
                assert problem.violation(expand(problem, instance, found)) is None
            assert not (refused and share > 1 + 1e-9)
            whole = OrderDP(instance).solve(np.arange(instance.num_nodes))[1]
            value, lower = instance.value(whole), simple_bound(instance)
            bound, better = filling.improve(whole, lower, 0.0, soon(20))
        assert lower <= bound <= best * (1 + 1e-9)
        assert best * (1 - 1e-9) <= instance.value(better) <= value


def test_filled_stages_are_the_best_where_all_ways_are_kept():
    met, total, random = 0, 40, np.random.default_rng(0)
    for _ in range(total):
        n = int(random.integers(5, 9))
        edges = [(a, b) for b in range(n) for a in range(b) if random.random() < 0.3]
        work, none = random.integers(1, 9, n).astype(float), np.zeros(n)
        edges = np.array(edges, np.int64).reshape(-1, 2)
        problem = Problem(3, "time", work, none, none, edges=edges)
        instance, best = ready(problem)
        filling = StageFilling(instance, Closure.of(instance))
        found, _ = filling.fill(best, soon(20))
        met += found is not None and instance.value(found) <= best * (1 + 1e-9)
        assert filling.fill(best * (1 - 1e-6), soon(20))[0] is None
    assert met == total


def test_many_stages_of_a_wide_graph_are_filled_almost_to_the_mean():
    random = np.random.default_rng(0)
    width, length = 12, 16
    edges = [
        (layer * width + a, (layer + 1) * width + a)
        for layer in range(length - 1)
        for a in range(width)
    ]
    work = random.choice([1.0, 3.0, 7.0, 20.0], size=width * length)
    none = np.zeros(len(work))
    problem = Problem(16, "time", work, none, none, edges=np.array(edges))
    instance = reduce_problem(problem)
    filling = StageFilling(instance, Closure.of(instance))
    _, stages = filling.improve(None, simple_bound(instance), 0.0, soon(60))
    assert instance.value(stages) <= 1.02 * simple_bound(instance)


def test_a_search_begins_with_the_plan_of_a_problem_that_is_alike(monkeypatch):
    problem = to_problem(layered(), 4, "memory")
    best = solve(problem)
    monkeypatch.setattr(search_module, "MAX_IDEALS", 5)
    monkeypatch.setattr(ties_module, "MAX_IDEALS", 5)
    assert solve(problem, time_budget=0.0).certificate.value > best.certificate.value * 1.001
    again = solve(problem, time_budget=0.0, near=best.assignment)
    assert again.certificate.value == pytest.approx(best.certificate.value)


@examples(100)
@given(problems(), st.booleans())
def test_stages_of_original_nodes_shrink_to_those_of_an_instance(problem, together):
    instance = reduce_problem(problem, together=together)
    if instance.num_nodes:
        stages = np.sort(np.arange(instance.num_nodes) % problem.num_stages)
        full = expand(problem, instance, stages)
        assert (shrink(instance, full) == stages).all()
        first = np.flatnonzero(instance.place >= 0)[0]
        full[first] += 1
        alone = (instance.place == instance.place[first]).sum() == 1
        assert (shrink(instance, full) is not None) == alone
