"""The plan: which stage runs which operation, and what that costs; goes to JSON and back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

from tarantella_pp.errors import PlanError
from tarantella_pp.partition.graph.json_record import MAX_FILE_BYTES, JsonRecord
from tarantella_pp.partition.graph.layer_graph import LayerGraph
from tarantella_pp.partition.plan.plan_parts import (
    CutEdge,
    OutputUse,
    StagePlan,
    Tie,
)
from tarantella_pp.partition.plan.plan_validation import difference, problems
from tarantella_pp.partition.solvers.problem.certificate import Certificate
from tarantella_pp.schedule import Schedule, ScheduleSpec

MemoryLimit = int | tuple[int, ...]
"""Bytes that each stage may have, or one number for each."""

__all__ = ["MAX_FILE_BYTES", "CutEdge", "Plan", "StagePlan", "Tie", "micro_batch_size"]


class Plan(
    JsonRecord,
    frozen=True,
    tag_field="format",
    tag="tarantella_pp.plan",
    rename={"schedule_text": "program"},  # as in files of the first version
):
    """Which stage runs which operation of a model, and what that costs.

    `print(plan)` shows a table. `make_plan` makes one; `save` and `load` keep it as JSON.

    Attributes:
        version: Version of the format.
        model: Name of the model.
        num_stages: Number of pipeline stages.
        num_micro_batches: Number of micro-batches of a step.
        num_replicas: Number of pipelines side by side; a batch is split among them.
        batch_size: Samples of a step, over all replicas, that memory was planned for.
        schedule: Name of the schedule that memory was planned for.
        balance: What the stages are balanced by, `"memory"`, `"time"` or `"flops"`.
        optimizer: The optimizer whose slots are counted.
        memory_limit: Largest memory of a stage that was allowed, in bytes, one number or one for
            each stage; `None` for any.
        fingerprint: Fingerprint of the model's layer graph.
        node_names: Name of each node of that graph.
        assignment: Stage of each node.
        stages: The stages.
        cuts: The tensors that are sent between them.
        ties: The variables that several of them use.
        certificate: How good the plan is known to be.
        bubble: Share of a step that ranks wait, simulated with the stages as they are and messages
            that take no time; `None` where that was not simulated.
        assumed_size: Size that unknown dimensions other than the batch were counted with.
        estimated: Kinds of layers whose costs are guesses; all others follow rules or, where
            stages have seconds, measurements.
        recompute: Stages that keep the inputs of a micro-batch only and repeat its forward pass,
            ascending.
        schedule_text: Text of the schedule where its name does not say all: a user's own, or one
            that was searched for.
        ranks: Rank of each stage that the plan was made for; empty where each has its own.
        fallbacks: The stages whose backward pass the runtime could not cut in two, and why; known
            once they have trained.
        outputs: What loss and metrics of a compiled model need of its outputs, which the memory of
            the last stage counts; `None` where that was not known.
    """

    noun: ClassVar[str] = "plan"

    model: str
    num_stages: int
    num_micro_batches: int
    num_replicas: int
    batch_size: int
    schedule: str
    balance: str
    optimizer: str
    memory_limit: MemoryLimit | None
    fingerprint: str
    node_names: tuple[str, ...]
    assignment: tuple[int, ...]
    stages: tuple[StagePlan, ...]
    cuts: tuple[CutEdge, ...]
    certificate: Certificate
    ties: tuple[Tie, ...] = ()
    bubble: float | None = None
    assumed_size: int | None = None
    estimated: tuple[str, ...] = ()
    recompute: tuple[int, ...] = ()
    schedule_text: str | None = None
    ranks: tuple[int, ...] = ()
    fallbacks: tuple[str, ...] = ()
    outputs: OutputUse | None = None
    version: int = 1

    def __post_init__(self) -> None:
        """Checks that everything fits together.

        Raises:
            PlanError: A number is out of range, not finite, or does not match the others.
        """
        for problem in problems(self):
            raise PlanError(f"This is no valid plan: {problem}")

    @property
    def micro_batch_size(self) -> int:
        """Samples of one micro-batch on one replica, rounded up."""
        return micro_batch_size(self.batch_size, self.num_replicas, self.num_micro_batches)

    @property
    def num_ranks(self) -> int:
        """Ranks of one pipeline that the plan was made for."""
        return 1 + max(self.ranks) if self.ranks else self.num_stages

    @property
    def limits(self) -> tuple[int, ...] | None:
        """The memory limit of each stage; `None` for any."""
        return limit_of_each(self.memory_limit, self.num_stages)

    @property
    def links(self) -> set[tuple[int, int]]:
        """Pairs of stages, source first, that exchange messages."""
        return {(cut.source, target) for cut in self.cuts for target in cut.targets}

    @property
    def gradient_links(self) -> set[tuple[int, int]]:
        """Those of `links` over which gradients come back."""
        with_gradient = (cut for cut in self.cuts if cut.has_gradient)
        return {(cut.source, target) for cut in with_gradient for target in cut.targets}

    def schedule_spec(self, num_ranks: int | None = None) -> ScheduleSpec:
        """Returns the schedule that the plan's pipeline runs, for any number of micro-batches.

        Args:
            num_ranks: Number of ranks of the pipeline. Default: those that the plan was made for.

        Raises:
            ScheduleError: The schedule is unknown, or does not work with so many ranks.
        """
        if num_ranks is None and self.ranks:
            num_ranks = self.num_ranks
        if self.schedule_text is None:
            return ScheduleSpec.of(self.schedule, self.num_stages, num_ranks)
        custom = Schedule.from_text(self.schedule_text)
        return ScheduleSpec.of_custom(custom, self.num_stages, num_ranks)

    def check(self, graph: LayerGraph) -> None:
        """Checks that the plan is one of this model.

        Args:
            graph: The model's layer graph.

        Raises:
            PlanError: It is a plan of another model; the message names what differs.
        """
        if self.fingerprint != graph.fingerprint():
            raise PlanError(f"This is a plan of another model: {difference(self, graph)}")
        for group in graph.groups:
            stages = {self.assignment[node]: self.node_names[node] for node in sorted(group)}
            if len(stages) > 1:
                raise PlanError(
                    f"Nodes {list(stages.values())} share statistics or seeds, which change "
                    "whenever one of them runs, so they must be on one stage. The plan puts them "
                    f"on stages {list(stages)}."
                )
        for before, after in graph.digraph.edges:
            if self.assignment[before] > self.assignment[after]:
                raise PlanError(
                    f"Node '{self.node_names[after]}' on stage {self.assignment[after]} needs node "
                    f"'{self.node_names[before]}', which the plan puts on the later stage "
                    f"{self.assignment[before]}."
                )

    def __str__(self) -> str:
        """Returns the table of the plan, as wide as the terminal, without colours."""
        from tarantella_pp.partition.plan.report import as_text

        return as_text(self)

    def __rich__(self) -> Any:
        """Returns the table of the plan for `rich.print`."""
        from tarantella_pp.partition.plan.report import table

        return table(self)


def limit_of_each(limit: MemoryLimit | None, num_stages: int) -> tuple[int, ...] | None:
    """Returns the memory limit of each stage.

    Args:
        limit: One for all, one for each, or `None` for any.
        num_stages: Number of stages.
    """
    return (limit,) * num_stages if isinstance(limit, int) else limit


def common_limit(limits: Sequence[int]) -> int | None:
    """Returns the memory limit of all stages, `None` where they have different ones.

    Args:
        limits: The limit of each stage.
    """
    return limits[0] if len(set(limits)) == 1 else None


def micro_batch_size(batch_size: int, num_replicas: int, num_micro_batches: int) -> int:
    """Returns the samples of one micro-batch on one replica, rounded up.

    Args:
        batch_size: Samples of a step, over all replicas.
        num_replicas: Number of replicas.
        num_micro_batches: Micro-batches of a step.
    """
    return -(-batch_size // (num_replicas * num_micro_batches))
