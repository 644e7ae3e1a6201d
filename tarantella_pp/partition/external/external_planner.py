"""From an external graph to its plan, and whether a plan is one of a graph."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from tarantella_pp.errors import ConfigurationError, PlanError
from tarantella_pp.partition.external.external_graph import ExternalGraph, to_problem
from tarantella_pp.partition.external.external_plan import ExternalPlan, ExternalStage
from tarantella_pp.partition.solvers.problem.problem import Objective, Problem


def plan_graph(
    graph: ExternalGraph,
    num_stages: int,
    balance: Objective = "memory",
    memory_limit: float | Sequence[float] | None = None,
) -> ExternalPlan:
    """Plans the stages of an external graph; memory and time count as its file gives them."""
    if balance == "flops" and not any(node.flops for node in graph.nodes):
        raise ConfigurationError(
            f"Graph {graph.name!r} names no flops for its nodes. Received: balance='flops'"
        )
    from tarantella_pp.partition.solvers.solve import solve  # here: checking a plan needs none

    problem = to_problem(graph, num_stages, balance, memory_limit=memory_limit)
    solution = solve(problem)
    limits = problem.limits
    assignment = solution.assignment
    if limits is None or len(set(limits.tolist())) == 1:
        # Stages that differ in nothing may be left empty anywhere: let it be the last ones.
        places = {stage: place for place, stage in enumerate(sorted(set(assignment)))}
        assignment = tuple(places[stage] for stage in assignment)
    evaluation = problem.evaluate(assignment)
    return ExternalPlan(
        graph=graph.name,
        num_stages=num_stages,
        balance=balance,
        memory_limit=None if limits is None else tuple(limits.tolist()),
        assignment=assignment,
        certificate=solution.certificate,
        stages=tuple(_stages(problem, assignment)),
        cut_bytes=evaluation.cut_bytes,
        cut_comm=evaluation.cut_comm,
        node_names=tuple(node.name for node in graph.nodes),
        units=dict(graph.units),
    )


def check_plan(plan: ExternalPlan, graph: ExternalGraph) -> None:
    """Checks that a plan is one of this graph, and that its figures are right."""
    if len(plan.assignment) != len(graph.nodes):
        raise PlanError(
            f"This is a plan of another graph: it has {len(plan.assignment)} nodes, and this "
            f"graph {len(graph.nodes)}."
        )
    for index, (name, node) in enumerate(zip(plan.node_names, graph.nodes, strict=True)):
        if name != node.name:
            raise PlanError(
                f"This is a plan of another graph: its node {index} is {name!r}, and this "
                f"graph's is {node.name!r}."
            )
    problem = to_problem(graph, plan.num_stages, plan.balance, memory_limit=plan.memory_limit)
    violation = problem.violation(plan.assignment)
    if violation is not None:
        raise PlanError(f"This is no plan of this graph: {violation}.")
    for figure, here, there in _figures(plan, problem):
        if not math.isclose(here, there, rel_tol=1e-6, abs_tol=1e-12):
            raise PlanError(
                f"This is a plan of another graph: the {figure} is {there:.6g} in the plan, and "
                f"{here:.6g} with this graph."
            )


def _figures(plan: ExternalPlan, problem: Problem) -> Iterator[tuple[str, float, float]]:
    """Yields each figure of a plan: its name, as the graph has it, and as the plan has it."""
    for index, (ours, stage) in enumerate(
        zip(_stages(problem, plan.assignment), plan.stages, strict=True)
    ):
        for name in ours.__struct_fields__:
            yield f"{name} of stage {index}", getattr(ours, name), getattr(stage, name)
    evaluation = problem.evaluate(plan.assignment)
    yield "largest stage", evaluation.value, plan.certificate.value
    yield "bytes cut", evaluation.cut_bytes, plan.cut_bytes
    yield "communication cut", evaluation.cut_comm, plan.cut_comm


def _stages(problem: Problem, assignment: Sequence[int]) -> Iterator[ExternalStage]:
    evaluation = problem.evaluate(assignment)
    counts = [0] * problem.num_stages
    for stage in assignment:
        counts[stage] += 1
    for stage, nodes in enumerate(counts):
        yield ExternalStage(
            nodes,
            float(evaluation.stage_memory[stage]),
            float(evaluation.stage_work[stage]),
            float(evaluation.stage_comm[stage]),
        )
