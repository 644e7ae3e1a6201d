"""The partition problem of a layer graph, and its best solution in real memory."""

from __future__ import annotations

import numpy as np

from tarantella_pp.errors import PlanError
from tarantella_pp.partition.certificate import TOLERANCE, Certificate, Solution
from tarantella_pp.partition.cost import Costs
from tarantella_pp.partition.graph import LayerGraph
from tarantella_pp.partition.options import PlanOptions
from tarantella_pp.partition.problem import Problem, TensorCost
from tarantella_pp.partition.solvers.solve import solve


def problem_of(
    costs: Costs, options: PlanOptions, limit: float | None = None, *, cautious: bool = False
) -> Problem:
    """Puts the costs of a layer graph into the numbers that solvers work on.

    A shared variable counts for its first node. Memory that several nodes need again counts for
    the first of them, and once more for each later stage that has another. Where those nodes
    lie on parallel branches this misses a stage that comes before that of the first node, so
    that the problem's memory is a lower bound of the real one, and equal to it elsewhere.

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
        objective="flops" if options.balance == "flops" else "memory",
        work=np.array([node.flops for node in graph.nodes]),
        static_memory=static,
        activation_memory=activations,
        tensors=tuple(tensors),
        edges=np.array(sorted(graph.digraph.edges), dtype=np.int64).reshape(-1, 2),
        in_flight=options.in_flight,
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
        The assignment, with a certificate of the real memory (buffers left out) or FLOPs.

    Raises:
        PlanError: No plan keeps the limit, or has an operation for each stage.
    """
    first = _within_limit(costs, options, cautious=False)
    value = _value(costs, options, first)
    if value <= first.certificate.value * (1 + TOLERANCE):
        return first
    other = _within_limit(costs, options, cautious=True)
    best = min(first, other, key=lambda solution: _value(costs, options, solution))
    return Solution(
        best.assignment,
        Certificate.of(
            _value(costs, options, best),
            first.certificate.lower_bound,
            f"{best.certificate.method}, memory of parallel branches bounded",
            first.certificate.seconds + other.certificate.seconds,
        ),
    )


def _value(costs: Costs, options: PlanOptions, solution: Solution) -> float:
    if options.balance == "flops":
        return solution.certificate.value
    stages = costs.stages(solution.assignment, options.in_flight)
    return float(max(stage.memory_bytes - stage.buffer_bytes for stage in stages))


def _within_limit(costs: Costs, options: PlanOptions, *, cautious: bool) -> Solution:
    """Solves, and again with less memory allowed where buffers of messages exceed the limit."""
    allowed = options.memory_limit
    limit: float | None = allowed
    while limit is None or limit >= 1:
        try:
            solution = solve(problem_of(costs, options, limit, cautious=cautious))
        except PlanError as error:
            raise PlanError(f"{error}{_shared(costs.graph)}") from None
        stages = costs.stages(solution.assignment, options.in_flight)
        largest = max(stage.memory_bytes for stage in stages)
        if allowed is None or limit is None or largest <= allowed:
            return solution
        limit -= largest - allowed
    raise PlanError(
        "No plan was found that keeps the memory limit together with the buffers of its messages. "
        f"Received: memory_limit={allowed}. More stages or smaller micro-batches need less."
    )


def _shared(graph: LayerGraph) -> str:
    if not graph.groups:
        return ""
    first = max(graph.groups, key=len)
    names = ", ".join(graph.nodes[i].name for i in sorted(first)[:4])
    return f" Operations that share variables must stay on one stage, e.g. {names}."
