"""The peers' rules: what they promise, and that they never beat the solver."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tarantella_pp.partition.baselines import (
    RULES,
    barany_grinberg,
    block_partition,
    equal_layers,
    minimal_maximum,
    parameter_balance,
)
from tarantella_pp.partition.solvers.problem.problem import Problem
from tarantella_pp.partition.solvers.solve import solve
from tests.helpers.problems import problems

weights = st.lists(st.floats(0, 100, width=32), min_size=1, max_size=10).map(np.array)


def chain(work, static, stages):
    n = len(work)
    edges = np.array([(i, i + 1) for i in range(n - 1)]).reshape(-1, 2)
    return Problem(stages, "time", work, static, np.zeros(n), edges=edges)


def test_rules_cut_a_chain_as_they_say():
    problem = chain([1, 1, 1, 1, 1, 7], [9, 1, 1, 1, 1, 1], 2)
    assert equal_layers(problem).tolist() == [0, 0, 0, 1, 1, 1]
    assert parameter_balance(problem).tolist() == [0, 1, 1, 1, 1, 1]
    assert block_partition(problem).tolist() == [0, 0, 0, 0, 0, 1]


def blocks(values, begins):
    ends = [*begins[1:], len(values)]
    return [values[begin:end].sum() for begin, end in zip(begins, ends, strict=True)]


@settings(deadline=None)
@given(weights, st.integers(1, 5))
def test_minimal_maximum_is_minimal(values, parts):
    parts = min(parts, len(values))
    begins = minimal_maximum(values, parts)
    assert len(begins) == parts
    assert begins == sorted(set(begins))
    inner = itertools.combinations(range(1, len(values)), parts - 1)
    best = min(max(blocks(values, [0, *cut])) for cut in inner)
    assert max(blocks(values, begins)) == pytest.approx(best, rel=1e-9, abs=1e-9)


@settings(deadline=None)
@given(weights, st.integers(1, 5))
def test_blocks_are_whole_and_close(values, parts):
    parts = min(parts, len(values))
    begins = barany_grinberg(values, parts)
    assert len(begins) == parts
    assert begins == sorted(set(begins))


@settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
@given(problems())
def test_no_rule_beats_the_solver(problem):
    problem = replace(problem, memory_limit=None, exactly=False, tied="together", in_flight=None)
    best = solve(problem).certificate.value
    for rule in RULES.values():
        assignment = rule(problem)
        assert problem.violation(assignment) is None
        assert problem.evaluate(assignment).value >= best * (1 - 1e-9)
