"""The partitioner: one call from a problem to a plan and its certificate."""

from __future__ import annotations

import time

import numpy as np

from tarantella_pp.errors import PlanError
from tarantella_pp.partition.certificate import Certificate, Solution
from tarantella_pp.partition.problem import IntArray, Problem
from tarantella_pp.partition.solvers.balance import solve_balance
from tarantella_pp.partition.solvers.bounds import simple_bound
from tarantella_pp.partition.solvers.chain import ChainSearch
from tarantella_pp.partition.solvers.family import Family
from tarantella_pp.partition.solvers.ideals import enumerate_ideals
from tarantella_pp.partition.solvers.instance import Instance
from tarantella_pp.partition.solvers.order_dp import OrderDP
from tarantella_pp.partition.solvers.orders import starting_orders
from tarantella_pp.partition.solvers.reductions import expand, reduce_problem

MAX_IDEALS = 400_000


def solve(problem: Problem, *, time_budget: float = 30.0) -> Solution:
    """Partitions a graph into the stages of a pipeline.

    Args:
        problem: The graph, the objective and the limits.
        time_budget: Seconds after which searches are cut off.

    Returns:
        The plan and its certificate.

    Raises:
        PlanError: No plan keeps the limits.
        GraphError: The precedence has a cycle.
    """
    started = time.perf_counter()
    deadline = started + time_budget
    instance = reduce_problem(problem)
    stages, lower, method = _solve(instance, deadline)
    if stages is None:
        raise PlanError("no plan")
    assignment = expand(problem, instance, stages)
    value = problem.evaluate(assignment).value
    seconds = time.perf_counter() - started
    certificate = Certificate.of(value, lower, method, seconds)
    return Solution(tuple(assignment.tolist()), certificate)


def _solve(instance: Instance, deadline: float) -> tuple[IntArray | None, float, str]:
    lower = simple_bound(instance)
    dp = OrderDP(instance)
    value, best = np.inf, None
    for order in starting_orders(instance):
        new, stages = dp.solve(order)
        if new < value:
            value, best = new, stages
    if value <= lower * (1 + 1e-10):
        return best, lower, "order DP"
    lattice = enumerate_ideals(instance, MAX_IDEALS, steps=instance.additive)
    if lattice is None:
        return best, lower, "order DP"
    if instance.additive and not instance.strict:
        total = float(instance.objective.node_costs().max(axis=0).sum())
        result = solve_balance(instance, lattice, lower, min(value, total), deadline)
        return (
            (result.stages if result.stages is not None else best),
            result.lower_bound,
            f"assembly-line DP, {lattice.count} ideals",
        )
    found = ChainSearch(Family(instance, lattice.words)).run(value * (1 - 1e-12), deadline)
    if found is None:
        return best, value, f"chain DP, {lattice.count} ideals"
    return found[1], found[0], f"chain DP, {lattice.count} ideals"
