"""The plan of an external graph: what a `Plan` is for a Keras model, in the graph's own units."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from typing import ClassVar, Literal

import msgspec

from tarantella_pp.errors import PlanError
from tarantella_pp.partition.graph.json_record import JsonRecord
from tarantella_pp.partition.solvers.problem.certificate import Certificate


class ExternalStage(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One stage and what it costs, in the units of the graph.

    Attributes:
        nodes: Number of its nodes; the last stages may have none.
        memory: Sum of its nodes' memory.
        work: Sum of its nodes' time, or of their FLOPs if the plan balances those.
        comm: Sum of `comm` over the tensors that the stage shares with others.
    """

    nodes: int
    memory: float
    work: float
    comm: float


class ExternalPlan(JsonRecord, frozen=True, tag_field="format", tag="tarantella_pp.graph_plan"):
    """Which stage runs which node of an external graph, and what that costs.

    Attributes:
        graph: Name of the graph.
        num_stages: Number of stages; at most that many have nodes.
        balance: What the stages are balanced by.
        memory_limit: Memory that each stage may have; `None` for any.
        assignment: Stage of each node, in node order.
        certificate: How good the plan is known to be.
        stages: The stages.
        cut_bytes: Sum over cut tensors of bytes x (touching stages - 1).
        cut_comm: Sum over cut tensors of comm x (touching stages - 1).
        node_names: Name of each node.
        units: What the graph's costs are measured in, as far as its file says.
        version: Version of the format.
    """

    noun: ClassVar[str] = "plan"

    graph: str
    num_stages: int
    balance: Literal["memory", "time", "flops", "load"]
    memory_limit: tuple[float, ...] | None
    assignment: tuple[int, ...]
    certificate: Certificate
    stages: tuple[ExternalStage, ...]
    cut_bytes: float
    cut_comm: float
    node_names: tuple[str, ...]
    units: dict[str, str] = msgspec.field(default_factory=dict)
    version: int = 1

    def __post_init__(self) -> None:
        """Checks that everything fits together."""
        for problem in _problems(self):
            raise PlanError(f"This is no valid plan: {problem}")


def _problems(plan: ExternalPlan) -> Iterator[str]:
    """Finds what in a plan does not fit together."""
    if plan.version != 1:
        yield f"its version must be 1. Received: version={plan.version}"
    if plan.num_stages < 1 or len(plan.stages) != plan.num_stages:
        yield f"it must have num_stages={plan.num_stages} stages. Received: {len(plan.stages)}"
    if plan.memory_limit is not None and len(plan.memory_limit) != plan.num_stages:
        yield f"it must have a limit for each stage. Received: {len(plan.memory_limit)}"
    if len(plan.assignment) != len(plan.node_names):
        yield (
            f"assignment and node_names must be equally long. Received: {len(plan.assignment)} "
            f"and {len(plan.node_names)}"
        )
    for node, place in enumerate(plan.assignment):
        if not 0 <= place < plan.num_stages:
            yield f"node {node} must be on one of the stages. Received: stage {place}"
    proof = plan.certificate
    numbers = [plan.cut_bytes, plan.cut_comm, proof.value, proof.lower_bound, proof.seconds]
    numbers += itertools.chain(*map(msgspec.structs.astuple, plan.stages))
    numbers += plan.memory_limit or ()
    for value in numbers:
        if not 0 <= value < math.inf:
            yield f"its numbers must be finite and not negative. Received: {value}"
