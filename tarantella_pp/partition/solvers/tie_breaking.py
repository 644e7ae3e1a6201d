"""Among plans of equal value, the one that cuts least."""

from __future__ import annotations

import time
from dataclasses import replace

import numpy as np

from tarantella_pp.partition.solvers.exact.chain_dp import ChainSearch, OutOfTimeError
from tarantella_pp.partition.solvers.exact.ideals import enumerate_ideals
from tarantella_pp.partition.solvers.exact.order_dp import OrderDP
from tarantella_pp.partition.solvers.exact.orders import depth_first_order, ranked_order
from tarantella_pp.partition.solvers.exact.stage_pricing import IdealFamily
from tarantella_pp.partition.solvers.problem.instance import (
    ANY,
    Instance,
    Resource,
    Terms,
)
from tarantella_pp.partition.solvers.problem.problem import IntArray, Problem
from tarantella_pp.partition.solvers.reductions import cut_tensors, expand

#: Ideals listed, and pairs of them priced, to break ties; both are counted, not timed.
MAX_IDEALS = 4_000
MAX_PAIRS = 800_000


def break_ties(
    problem: Problem, instance: Instance, assignment: IntArray, deadline: float
) -> IntArray:
    """Finds a plan that cuts less, of the same value; in the instance no node is left out."""
    costs = cut_tensors(problem)
    if not costs or time.thread_time() > deadline:
        return assignment
    instance = replace(instance, resources=(*instance.resources, _cuts(instance, costs)))
    capacity = problem.evaluate(assignment).value * (1 + problem.alike)
    stages = np.zeros(instance.num_nodes, np.int64)
    stages[instance.place] = assignment
    tried = [stages, _by_order(instance, stages, capacity)]
    try:
        lattice = enumerate_ideals(instance, MAX_IDEALS)
        if lattice is not None:
            chains = ChainSearch(IdealFamily(instance, lattice.words), max_pairs=MAX_PAIRS)
            chain = chains.run(capacity, deadline, goal="sum")
            if chain is not None:
                tried.append(chain[1])
    except OutOfTimeError:
        pass
    plans = [assignment, *(expand(problem, instance, one) for one in tried[1:])]
    return min(plans, key=lambda plan: _rank(problem, plan, capacity))


def _rank(problem: Problem, plan: IntArray, capacity: float) -> tuple[bool, float, float, float]:
    """Orders plans: within the capacity, then by cuts, then by memory."""
    cost = problem.evaluate(plan)
    bad = cost.value > capacity or problem.violation(plan) is not None
    return bad, cost.cut_comm, cost.cut_bytes, float(cost.stage_memory.max())


def _cuts(instance: Instance, costs: list[tuple[tuple[int, ...], float]]) -> Resource:
    """Makes a resource whose sum over the stages is what a plan cuts."""
    n, S = instance.num_nodes, instance.num_stages
    merged: dict[tuple[int, ...], float] = {}
    for nodes, cost in costs:
        pins = tuple(sorted({int(instance.place[node]) for node in nodes}))
        if len(pins) > 1:
            merged[pins] = merged.get(pins, 0.0) + cost
    count = len(merged)
    terms = Terms(
        pins=tuple(merged),
        producer=np.full(count, ANY),
        touch=np.zeros(count),
        receive=np.array(list(merged.values())),
        receive_held=np.zeros(count),
    )
    free = np.full(S, np.inf)
    return Resource(np.zeros(n), np.zeros(n), np.ones(S), np.ones(S), free, terms)


def _by_order(instance: Instance, stages: IntArray, capacity: float) -> IntArray:
    """Cuts orders that keep the plan's stages whole: the plan itself is among their plans."""
    orders = OrderDP(instance)
    late = np.argsort(depth_first_order(instance, backward=True))
    early = np.argsort(depth_first_order(instance))
    n = instance.num_nodes
    tried: set[bytes] = set()
    for rank in (early, late, np.arange(n)):
        order = ranked_order(instance, stages + rank / (n + 1))
        if order.tobytes() in tried:
            continue
        tried.add(order.tobytes())
        total, better = orders.solve(order, capacity=capacity)
        if np.isfinite(total):
            stages = better
    return stages
