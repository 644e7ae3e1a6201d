"""The exact solvers against all plans of small problems."""

from __future__ import annotations

import re
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given

from tarantella_pp.errors import PlanError
from tarantella_pp.partition.solvers.solve import solve
from tests.helpers.draws import examples
from tests.helpers.problems import (
    costs,
    loads,
    optimum,
    plans,
    problems,
)


def check(problem):
    best = optimum(problem)
    if best is None:
        with pytest.raises(PlanError):
            solve(problem)
        return
    solution = solve(problem)
    assert problem.violation(solution.assignment) is None
    certificate = solution.certificate
    assert certificate.optimal
    assert certificate.value == pytest.approx(best, rel=1e-9, abs=1e-12)
    assert certificate.value == problem.evaluate(solution.assignment).value
    assert certificate.lower_bound <= certificate.value
    assert certificate.gap == 0.0


@examples(250)
@given(problems())
def test_every_plan_is_optimal_and_claimed_so(problem):
    check(problem)


@examples(400)
@given(loads())
def test_loads_are_optimal(problem):
    check(problem)


@examples(40)
@given(problems(max_nodes=9, max_stages=3))
def test_nine_nodes(problem):
    check(problem)


@examples(250)
@given(problems())
def test_the_price_of_a_plan_is_that_of_the_definition(problem):
    table = plans(problem)[:50]
    if len(table):
        values, _ = costs(problem, table)
        for row, value in zip(table, values, strict=True):
            assert problem.evaluate(row).value == pytest.approx(value, rel=1e-9, abs=1e-12)


@examples(250)
@given(problems())
def test_a_refused_limit_names_the_smallest_that_works(problem):
    problem = replace(problem, tied="together", memory_limit=1e-3)
    table = plans(problem)
    if not len(table):
        return
    values, _ = costs(replace(problem, objective="memory"), table)
    if values.min() <= 1e-3 * (1 + 1e-9):
        return
    with pytest.raises(PlanError, match="smallest that works is") as caught:
        solve(problem)
    named = float(re.search(r"works is (\d+) bytes", str(caught.value)).group(1))
    assert named == pytest.approx(values.min(), abs=0.5)


@examples(250)
@given(problems(whole=True))
def test_ties_go_to_the_plan_that_cuts_least(problem):
    problem = replace(problem, groups=(), group_bytes=(), tied="together")
    table = plans(problem)
    if not len(table):
        return
    values, over = costs(problem, table)
    fits = over <= 1 + 1e-9
    if not fits.any():
        return
    same = fits & (values <= values[fits].min() * (1 + 1e-10))
    by_comm = any(tensor.comm for tensor in problem.tensors)
    cut = "cut_comm" if by_comm else "cut_bytes"
    least = min(getattr(problem.evaluate(row), cut) for row in table[same])
    ours = problem.evaluate(solve(problem).assignment)
    assert getattr(ours, cut) == pytest.approx(least, abs=1e-9)


@examples(50)
@given(problems())
def test_the_same_problem_has_the_same_plan(problem):
    if optimum(problem) is not None:
        assert solve(problem).assignment == solve(problem).assignment


def test_a_chain_is_cut_evenly():
    from tarantella_pp.partition.solvers.problem.problem import Problem

    ones = np.ones(8)
    chain = [(i, i + 1) for i in range(7)]
    problem = Problem(4, "time", ones, ones, ones, edges=np.array(chain))
    assert solve(problem).assignment == (0, 0, 1, 1, 2, 2, 3, 3)


@pytest.mark.parametrize(("alike", "cut"), [(0.0, 20.0), (0.02, 10.0)])
def test_of_plans_that_count_as_equal_that_which_cuts_less_is_taken(alike, cut):
    from tarantella_pp.partition.solvers.problem.problem import Problem, TensorCost

    # (a) -> (b) -> (c), and a skip from a to c: cut behind a or behind b, where two values cross.
    tensors = [TensorCost(0, (0, 1, 2), bytes=10.0), TensorCost(1, (1, 2), bytes=10.0)]
    work, nothing = np.array([99.0, 1.0, 99.5]), np.zeros(3)
    problem = Problem(2, "time", work, nothing, nothing, tensors, exactly=True, alike=alike)
    solution = solve(problem)
    assert problem.evaluate(solution.assignment).cut_bytes == cut
    assert solution.certificate.optimal == (alike == 0.0)
