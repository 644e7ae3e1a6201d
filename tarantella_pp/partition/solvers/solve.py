"""The partitioner: one call from a problem to a plan and its certificate."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from tarantella_pp.errors import PlanError
from tarantella_pp.partition.solvers.problem.certificate import (
    TOLERANCE,
    Certificate,
    Solution,
)
from tarantella_pp.partition.solvers.problem.problem import IntArray, Problem
from tarantella_pp.partition.solvers.reductions import expand, reduce_problem, shrink
from tarantella_pp.partition.solvers.strategy import Found, search
from tarantella_pp.partition.solvers.tie_breaking import break_ties

#: Nodes from which on more of the time budget is kept back.
LARGE = 10_000


def solve(
    problem: Problem,
    *,
    time_budget: float = 30.0,
    gap: float = 0.0,
    near: Sequence[int] | None = None,
) -> Solution:
    """Partitions a graph into the stages of a pipeline.

    Where the down-sets of the graph can be listed the plan is exactly optimal over all
    topological orders, and the same on every call and machine. Elsewhere it is the best found
    within the time budget, with a proven bound; such plans may differ from run to run, so make
    them once and hand them around.

    Among plans of equal value those that cut less (comm, or bytes where nothing has comm) are
    preferred, as far as they can be listed.
    """
    started = time.perf_counter()
    # The last round of a search may overrun a little, the more the larger the graph.
    share = 0.9 if problem.num_nodes < LARGE else 0.6
    deadline = time.thread_time() + share * time_budget
    if problem.num_nodes == 0:
        raise PlanError("There is nothing to partition: the graph has no nodes.")
    if problem.exactly and problem.num_nodes < problem.num_stages:
        raise PlanError(
            f"{problem.num_stages} stages need as many nodes, and the graph has "
            f"{problem.num_nodes}. Ask for fewer stages."
        )
    if any(problem.apart):
        outcome, assignment = _tied_free(problem, deadline, gap, near)
    else:
        outcome, assignment = _plan(problem, deadline, gap, near, together=True)
    if assignment is None:
        raise PlanError(_refusal(problem, outcome, deadline))
    value = problem.evaluate(assignment).value
    seconds = time.perf_counter() - started
    certificate = Certificate.of(value, outcome.lower_bound, outcome.method, seconds)
    return Solution(tuple(assignment.tolist()), certificate)


def _plan(
    problem: Problem, deadline: float, gap: float, near: Sequence[int] | None, *, together: bool
) -> tuple[Found, IntArray | None]:
    """Solves a problem with the groups that may part fused, too, or priced."""
    instance = reduce_problem(problem, together=together)
    if problem.exactly and instance.num_nodes < problem.num_stages:
        return Found(None, np.inf, "too few nodes apart", True), None
    begin = None if near is None else shrink(instance, near)
    outcome = search(instance, deadline, gap, begin)
    if outcome.stages is None:
        return outcome, None
    assignment = expand(problem, instance, outcome.stages)
    whole = instance  # nothing of it was joined or dropped
    if not problem.exactly:
        whole = reduce_problem(problem, together=together, join=False)
    return outcome, break_ties(problem, whole, assignment, deadline)


def _tied_free(
    problem: Problem, deadline: float, gap: float, near: Sequence[int] | None
) -> tuple[Found, IntArray | None]:
    """Prefers the plan that keeps groups together, where that costs nothing."""
    free, apart = _plan(problem, deadline, gap, near, together=False)
    tied, close = _plan(problem, deadline, gap, near, together=True)
    bound = replace(tied, lower_bound=min(free.lower_bound, tied.lower_bound))
    if apart is None or close is None:
        return (bound, close) if apart is None else (free, apart)
    ours, theirs = problem.evaluate(close).value, problem.evaluate(apart).value
    return (bound, close) if ours <= theirs * (1 + TOLERANCE) else (free, apart)


def _refusal(problem: Problem, outcome: Found, deadline: float) -> str:
    """Says which limit would work."""
    S = problem.num_stages
    relaxed = replace(problem, objective="memory", memory_limit=None)
    instance = reduce_problem(relaxed, together=False)
    if problem.limits is None or (instance.num_nodes < S and problem.exactly):
        return (
            f"No plan has a node on each of {S} stages: only {instance.num_nodes} groups of "
            "nodes can be told apart. Ask for fewer stages."
        )
    level = (problem.limits == problem.limits[0]).all()
    if not level:
        objective = replace(instance.objective, scale=1 / problem.limits)
        instance = instance.with_objective(objective)
    best = search(instance, max(deadline, time.thread_time() + 1.0))
    if best.stages is None:
        return f"No plan of {S} stages was found within the time budget."
    value = instance.value(best.stages)
    proven = best.lower_bound * (1 + TOLERANCE) >= value
    known = "smallest that works" if proven else "smallest found to work"
    proof = "No plan" if outcome.exhausted else "No plan was found that"
    if level:
        limit = problem.limits[0]
        advice = f"The {known} is {value:.0f} bytes, {100 * (value / limit - 1):.3g} % more."
    else:
        advice = f"The {known} is {value:.6g} times these limits."
    return (
        f"{proof} of {S} stages keeps the memory limit. Received: "
        f"memory_limit={problem.memory_limit}. {advice} More stages, more micro-batches of a "
        "smaller size or recomputation need less."
    )
