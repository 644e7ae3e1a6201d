"""The partition problem of a layer graph, and its best solution in real memory."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import TypeAlias

import numpy as np

from tarantella_pp.errors import PlanError
from tarantella_pp.partition.certificate import TOLERANCE, Certificate, Solution
from tarantella_pp.partition.cost import Costs
from tarantella_pp.partition.graph import LayerGraph
from tarantella_pp.partition.options import PlanOptions
from tarantella_pp.partition.problem import Objective, Problem, TensorCost
from tarantella_pp.partition.recomputation import recomputing
from tarantella_pp.partition.solvers.solve import solve

OBJECTIVES: dict[str, Objective] = {"memory": "memory", "flops": "flops"}
"""What solvers make small for each way to balance."""
Formulation: TypeAlias = Callable[[float | None], Problem]
"""Makes a problem from a memory limit."""


def problem_of(
    costs: Costs, options: PlanOptions, limit: float | None = None, *, cautious: bool = False
) -> Problem:
    """Puts the costs of a layer graph into the numbers that solvers work on.

    A shared variable counts for its first node. Memory that several nodes need again counts for
    the first of them, and once more for each later stage that has another. Where those nodes
    lie on parallel branches this misses a stage that comes before that of the first node, so
    that the problem's memory is a lower bound of the real one, and equal to it elsewhere.

    A stage that recomputes counts as if it held only as many micro-batches as run backward at a
    time, which is a lower bound as well; `recomputing` gives another one.

    Args:
        costs: The graph and its costs.
        options: The options of the plan.
        limit: Largest memory of a stage in bytes, buffers of messages left out.
        cautious: Whether to count such memory for its producer instead, or for each node where
            it is an input of the model: an upper bound of the real memory.
    """
    graph, rows = costs.graph, costs.rows
    static = np.zeros(len(graph.nodes))
    activations = np.array([rows * node.residual_bytes for node in graph.nodes])
    seen: set[int] = set()
    for node in graph.nodes:
        static[node.id] = sum(costs.state_bytes(w) for w in node.weights if w not in seen)
        seen.update(node.weights)
    tensors = []
    for tensor, nodes in costs.keepers().items():
        size = rows * graph.tensors[tensor].bytes_per_sample
        producer = graph.tensors[tensor].producer
        if cautious and len(nodes) > 1:
            if producer is None:
                activations[nodes] += size
                continue
            nodes = [producer, *(node for node in nodes if node != producer)]
        activations[nodes[0]] += size
        if len(nodes) > 1:
            tensors.append(TensorCost(nodes[0], tuple(nodes), receive_bytes=size))
    for found in graph.tensors:
        if found.producer is not None and found.consumers:
            size = rows * found.bytes_per_sample * (1 + found.has_gradient)
            nodes = [found.producer, *found.consumers]
            tensors.append(
                TensorCost(found.producer, tuple(nodes), bytes=size + costs.mask_bytes(found))
            )
    return Problem(
        num_stages=options.num_stages,
        objective=OBJECTIVES[options.balance],
        work=np.array([node.flops for node in graph.nodes]),
        static_memory=static,
        activation_memory=activations,
        tensors=tuple(tensors),
        edges=np.array(sorted(graph.digraph.edges), dtype=np.int64).reshape(-1, 2),
        in_flight=[options.repeats.get(s, held) for s, held in enumerate(options.in_flight)],
        groups=tuple(tuple(sorted(group)) for group in graph.groups),
        memory_limit=limit,
        exactly=True,
    )


def best_solution(costs: Costs, options: PlanOptions) -> Solution:
    """Solves the problem of a layer graph.

    Args:
        costs: The graph and its costs.
        options: The options of the plan.

    Returns:
        The assignment, with a certificate of the real memory (buffers left out) or work.

    Raises:
        PlanError: No plan keeps the limit, or has an operation for each stage.
    """
    best: Solution | None = None
    bound, seconds = 0.0, 0.0
    for build, bounds in _formulations(costs, options):
        solution, lowest, spent = _within_limit(costs, options, build, proves=bounds)
        bound, seconds = max(bound, lowest if bounds else 0.0), seconds + spent
        if solution is not None:
            solutions = [solution] if best is None else [best, solution]
            best = min(solutions, key=lambda one: _value(costs, options, one))
            if _value(costs, options, best) <= bound * (1 + TOLERANCE):
                break
    if best is None:
        raise PlanError(
            "No plan was found that keeps the memory limit together with the buffers of its "
            f"messages. Received: memory_limit={options.memory_limit}. More stages or smaller "
            "micro-batches need less."
        )
    value, method = _value(costs, options, best), best.certificate.method
    if value > bound * (1 + TOLERANCE):
        method += ", parts of the memory bounded"
    return Solution(best.assignment, Certificate.of(value, bound, method, seconds))


def _formulations(costs: Costs, options: PlanOptions) -> Iterator[tuple[Formulation, bool]]:
    """Yields problems of which one may be exact, and whether each counts no more than is real."""
    base = functools.partial(problem_of, costs, options)
    if options.repeats:
        yield lambda limit: recomputing(base(limit), costs, options), True
    yield base, True
    if options.balance == "memory" or options.memory_limit is not None:
        yield functools.partial(base, cautious=True), False
    if options.balance != "memory" and options.memory_limit is not None:
        yield lambda limit: replace(base(limit), objective="memory"), False


def _value(costs: Costs, options: PlanOptions, solution: Solution) -> float:
    stages = costs.stages(solution.assignment, options.in_flight, options.repeats)
    if options.balance == "flops":
        return max(stage.flops for stage in stages)
    return float(max(stage.memory_bytes - stage.buffer_bytes for stage in stages))


def _within_limit(
    costs: Costs, options: PlanOptions, build: Formulation, *, proves: bool
) -> tuple[Solution | None, float, float]:
    """Solves, and again with less memory allowed where a plan really needs more than the limit.

    Args:
        costs: The graph and its costs.
        options: The options of the plan.
        build: Makes the problem.
        proves: Whether no plan keeps the limit if none does in this problem.

    Returns:
        The solution, if there is one, a lower bound of all that keep the limit, and seconds.
    """
    allowed = options.memory_limit
    limit: float | None = allowed
    bound, seconds = math.inf, 0.0
    while limit is None or limit >= 1:
        try:
            solution = solve(build(limit))
        except PlanError as error:
            if limit == allowed and proves:
                raise PlanError(f"{error}{_shared(costs.graph)}") from None
            break
        bound = min(bound, solution.certificate.lower_bound)
        seconds += solution.certificate.seconds
        stages = costs.stages(solution.assignment, options.in_flight, options.repeats)
        largest = max(stage.memory_bytes for stage in stages)
        if allowed is None or limit is None or largest <= allowed:
            return solution, bound, seconds
        limit -= largest - allowed
    return None, bound, seconds


def _shared(graph: LayerGraph) -> str:
    if not graph.groups:
        return ""
    first = max(graph.groups, key=len)
    names = ", ".join(graph.nodes[i].name for i in sorted(first)[:4])
    return f" Operations that share variables must stay on one stage, e.g. {names}."
