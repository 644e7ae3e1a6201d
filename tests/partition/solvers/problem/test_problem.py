"""The problem and the certificate: prices, rules and refusals."""

from __future__ import annotations

import numpy as np
import pytest

from tarantella_pp.errors import GraphError, PlanError
from tarantella_pp.partition.solvers.problem.certificate import Certificate
from tarantella_pp.partition.solvers.problem.problem import Problem, TensorCost
from tarantella_pp.partition.solvers.solve import solve

ONES = np.ones(3)
TENSORS = (TensorCost(0, (0, 1, 2), 2.0, 8.0, 16.0), TensorCost(1, (1, 2), 1.0, 4.0))


def make(**options):
    given = {"num_stages": 2, "objective": "load", "tensors": TENSORS} | options
    return Problem(
        work=given.pop("work", [1, 2, 3]),
        static_memory=[10, 20, 30],
        activation_memory=[1, 1, 1],
        **given,
    )


def test_a_plan_is_priced_by_stage():
    cost = make(in_flight=[2, 1]).evaluate([0, 1, 1])
    assert cost.stage_work.tolist() == [1, 5]
    assert cost.stage_comm.tolist() == [2, 2]
    assert cost.value == 7
    assert cost.stage_memory.tolist() == [10 + 2 * 1, 50 + 2 + 16]
    assert (cost.cut_comm, cost.cut_bytes) == (2.0, 8.0)


def test_violations_are_named():
    assert "needs node 0" in make().violation([1, 0, 1])
    assert "share weights" in make(groups=((0, 2),)).violation([0, 1, 1])
    assert "empty" in make(exactly=True).violation([0, 0, 0])
    assert "limit" in make(memory_limit=15).violation([0, 0, 1])
    assert make().violation([0, 0, 1]) is None


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"num_stages": 0}, PlanError, "num_stages=0"),
        ({"objective": "speed"}, PlanError, "'speed'"),
        ({"tied": "maybe"}, PlanError, "'maybe'"),
        ({"work": [1, 2, -3]}, GraphError, "node 2"),
        ({"work": [1, np.nan, 3]}, GraphError, "node 1"),
        ({"work": [1, 2, 3, 4]}, GraphError, "one number for each node"),
        ({"in_flight": [1]}, PlanError, "one count for each of the 2 stages"),
        ({"memory_limit": [1.0]}, PlanError, "one positive number"),
        ({"memory_limit": -1.0}, PlanError, "one positive number"),
        ({"memory_limit": float("nan")}, PlanError, "one positive number"),
        ({"tensors": (TensorCost(0, (0, 7)),)}, GraphError, "outside 0..2"),
        ({"tensors": (TensorCost(0, (1, 2)),)}, GraphError, "lacks its producer"),
        ({"tensors": (TensorCost(0, (0, 1), -1.0),)}, GraphError, "negative"),
        ({"groups": ((0, 5),)}, GraphError, "outside 0..2"),
        ({"groups": ((0, 1),), "group_bytes": (1.0, 2.0)}, PlanError, "group_bytes"),
        ({"edges": [(0, 3)]}, GraphError, "edge"),
        ({"edges": [(1, 1)]}, GraphError, "edge"),
    ],
)
def test_what_cannot_be_is_refused(options, error, message):
    with pytest.raises(error, match=message):
        make(**options)


def test_an_assignment_must_fit():
    with pytest.raises(PlanError, match="3 nodes"):
        make().evaluate([0, 1])
    with pytest.raises(PlanError, match=r"0\.\.1"):
        make().evaluate([0, 1, 2])


def test_a_cycle_is_named():
    with pytest.raises(GraphError, match="cycle"):
        solve(make(edges=[(0, 1), (1, 2), (2, 1)]))


def test_too_few_nodes_for_the_stages():
    with pytest.raises(PlanError, match="4 stages need as many nodes"):
        solve(make(num_stages=4, exactly=True))
    with pytest.raises(PlanError, match="only 2 groups"):
        solve(make(num_stages=3, exactly=True, groups=((0, 1),)))


def test_an_unequal_limit_is_refused_with_its_factor():
    with pytest.raises(PlanError, match=r"is 3\.15 times these limits") as caught:
        solve(make(memory_limit=[10.0, 20.0]))
    assert "memory_limit=[10.0, 20.0]" in str(caught.value)


def test_tied_nodes_part_only_where_it_pays():
    chain = [(0, 1), (1, 2), (2, 3)]
    tied = {"groups": ((0, 3),), "group_bytes": (1.0,), "edges": np.array(chain)}
    options = {"num_stages": 2, "objective": "memory"} | tied
    four = np.ones(4)

    def plan(**more):
        return solve(
            Problem(work=four, static_memory=4 * four, activation_memory=0 * four, **options | more)
        )

    assert plan().certificate.value == 16.0
    assert plan(tied="free").certificate.value == 9.0
    assert plan(tied="free", group_bytes=(50.0,)).certificate.value == 16.0


def test_certificates_never_claim_too_much():
    assert Certificate.of(10.0, 10.0, "x", 0.0).optimal
    assert Certificate.of(10.0, 11.0, "x", 0.0).lower_bound == 10.0
    loose = Certificate.of(10.0, 8.0, "x", 0.0)
    assert not loose.optimal
    assert loose.gap == pytest.approx(0.25)
    assert "gap <= 25 %" in str(loose)
    assert Certificate.of(1.0, 0.0, "x", 0.0).gap is None
    assert Certificate.of(0.0, 0.0, "x", 0.0).optimal
    assert "optimal" in str(Certificate.of(10.0, 10.0, "x", 0.0))
