"""The plan: which stage runs which operation, and what that costs; goes to JSON and back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar, Literal, NamedTuple

import msgspec

from tarantella_pp.errors import PlanError
from tarantella_pp.partition.graph.json_record import MAX_FILE_BYTES, JsonRecord
from tarantella_pp.partition.graph.layer_graph import LayerGraph
from tarantella_pp.partition.plan.hardware_spec import HardwareSpec
from tarantella_pp.partition.plan.plan_parts import (
    Alternative,
    Certificate,
    CutEdge,
    OutputUse,
    StagePlan,
    Tie,
)
from tarantella_pp.partition.plan.plan_validation import difference, problems
from tarantella_pp.partition.plan.roofline import NodeWork
from tarantella_pp.schedule import Schedule, ScheduleSpec

__all__ = ["MAX_FILE_BYTES", "CutEdge", "Plan", "StagePlan", "Tie"]


MemoryLimit = int | tuple[int, ...]
"""Bytes that each stage may have, or one number for each."""

Placement = Literal["pipelines-together", "replicas-together"]
"""Whether a pipeline's ranks are neighbours, or a stage's."""
NarrowDtype = Literal["bfloat16"]
"""In what numbers travel, from stage to stage or between replicas, if not as they are."""
FUSION_THRESHOLD = 32 * 2**20
"""Bytes of a bucket of gradients, where no other is asked for."""


class Coordinates(NamedTuple):
    """Where a rank stands.

    Attributes:
        replica: The pipeline it is in.
        position: Its rank in that pipeline.
    """

    replica: int
    position: int


class PlanConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The options that a plan was made with; those that were left open are chosen; see `Plan`."""

    num_stages: int
    num_micro_batches: int
    num_replicas: int
    batch_size: int
    schedule: str
    balance: str
    memory_limit: MemoryLimit | None
    recompute: tuple[int, ...] = ()
    except_last: tuple[int, ...] = ()
    ranks: tuple[int, ...] = ()
    placement: Placement = "pipelines-together"
    fusion_threshold: int = FUSION_THRESHOLD
    shard_optimizer: bool = False
    gradient_dtype: NarrowDtype | None = None
    wire_dtype: NarrowDtype | None = None

    @property
    def shards(self) -> int:
        """Replicas that share out the optimizer state; 1 where each has all of it."""
        return self.num_replicas if self.shard_optimizer else 1

    @property
    def micro_batch_size(self) -> int:
        """Samples of one micro-batch on one replica, rounded up."""
        return micro_batch_size(self.batch_size, self.num_replicas, self.num_micro_batches)

    @property
    def num_ranks(self) -> int:
        """Ranks of one pipeline."""
        return 1 + max(self.ranks) if self.ranks else self.num_stages

    @property
    def world_size(self) -> int:
        """Ranks of all pipelines."""
        return self.num_replicas * self.num_ranks

    def world_rank(self, replica: int, position: int) -> int:
        """Returns the rank in the job of a position in a replica."""
        return rank_in_job(replica, position, self.num_replicas, self.num_ranks, self.placement)

    def coordinates(self, world_rank: int) -> Coordinates:
        """Returns replica and position of a rank in the job: undoes `world_rank`."""
        if self.placement == "pipelines-together":
            return Coordinates(*divmod(world_rank, self.num_ranks))
        position, replica = divmod(world_rank, self.num_replicas)
        return Coordinates(replica, position)

    @property
    def limits(self) -> tuple[int, ...] | None:
        """The memory limit of each stage; `None` for any."""
        limit = self.memory_limit
        return (limit,) * self.num_stages if isinstance(limit, int) else limit


def common_limit(limits: Sequence[int]) -> int | None:
    """Returns the memory limit of all stages, `None` where they have different ones."""
    return limits[0] if len(set(limits)) == 1 else None


def rank_in_job(
    replica: int, position: int, num_replicas: int, num_ranks: int, placement: str
) -> int:
    """Returns the rank in the job of a position in a replica.

    Two replicas of three ranks::

        pipelines-together     replica 0: 0 1 2     replicas-together     replica 0: 0 2 4
                               replica 1: 3 4 5                           replica 1: 1 3 5
    """
    if placement == "pipelines-together":
        return replica * num_ranks + position
    return position * num_replicas + replica


def micro_batch_size(batch_size: int, num_replicas: int, num_micro_batches: int) -> int:
    """Returns the samples of one micro-batch on one replica, rounded up."""
    return -(-batch_size // (num_replicas * num_micro_batches))


class Plan(
    PlanConfig,
    JsonRecord,
    frozen=True,
    kw_only=True,
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
        balance: What the stages are balanced by, `"memory"`, `"time"` or `"flops"`; `"given"` where
            they were given as numbers of layers.
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
        bubble: Share of a pipeline's step that ranks wait, simulated on `machine`; `None` where
            that was not simulated.
        assumed_size: Size that unknown dimensions other than the batch were counted with.
        estimated: Kinds of layers whose costs are guesses; all others follow rules or, where
            stages have seconds, measurements.
        recompute: Stages that keep the inputs of a micro-batch only and repeat its forward pass,
            ascending.
        except_last: Those of them that keep all of the last micro-batch of a step, and do not
            repeat it, ascending.
        schedule_text: Text of the schedule where its name does not say all: a user's own, or one
            that was searched for.
        ranks: Rank of each stage that the plan was made for; empty where each has its own.
        placement: Where replicas are: `"pipelines-together"` puts the ranks of a pipeline side by
            side, `"replicas-together"` the ranks of a stage.
        fusion_threshold: Most bytes of gradients that are summed over replicas at a time.
        shard_optimizer: Whether replicas share out the optimizer state (ZeRO-1); then the
            largest share is counted.
        gradient_dtype: Dtype in which gradients of weights travel between replicas, if it is
            smaller than their own; `None` for their own.
        wire_dtype: Dtype in which wider floating point activations and their gradients travel from
            stage to stage; `None` for their own. `cuts` have the sizes of the tensors themselves.
        fallbacks: The stages whose backward pass the runtime could not cut in two, and why; known
            once they have trained.
        outputs: What loss and metrics of a compiled model need of its outputs, which the memory of
            the last stage counts; `None` where that was not known.
        machine: The ranks and links that a step is simulated with; `None` in files from before
            plans had it, whose bubble is one of messages that take no time.
        step_seconds: Simulated seconds of a step, sums over replicas included; `None` where that
            was not simulated.
        next_best: What would have been chosen without this plan's shape, schedule and balance.
        advice: A plan with another balance, that is faster or needs less memory.
        measured: What ranks had taken, in files of before; nothing is made of it.
        work: Arithmetic and memory traffic of each node, from which its seconds on any machine
            follow; empty in files from before plans had it.
    """

    noun: ClassVar[str] = "plan"

    model: str
    optimizer: str
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
    schedule_text: str | None = None
    fallbacks: tuple[str, ...] = ()
    outputs: OutputUse | None = None
    machine: HardwareSpec | None = None
    step_seconds: float | None = None
    next_best: Alternative | None = None
    advice: Alternative | None = None
    measured: tuple[Any, ...] = ()
    work: tuple[NodeWork, ...] = ()
    version: int = 1

    def __post_init__(self) -> None:
        """Checks that everything fits together."""
        for problem in problems(self):
            raise PlanError(f"This is no valid plan: {problem}")

    @property
    def links(self) -> set[tuple[int, int]]:
        """Pairs of stages, source first, that exchange messages."""
        return {(cut.source, target) for cut in self.cuts for target in cut.targets}

    @property
    def gradient_links(self) -> set[tuple[int, int]]:
        """Those of `links` over which gradients come back."""
        with_gradient = (cut for cut in self.cuts if cut.has_gradient)
        return {(cut.source, target) for cut in with_gradient for target in cut.targets}

    def sent(self, cut: CutEdge) -> int:
        """Returns the bytes of one micro-batch of a tensor as it travels, without its mask."""
        return cut.sent_bytes(self.wire_dtype)

    def sent_bytes(self, source: int | None = None) -> int:
        """Returns the bytes that are sent forward for one micro-batch.

        Args:
            source: The stage that sends them. Default: all of them.
        """
        return sum(
            (self.sent(cut) + cut.mask_bytes) * len(cut.targets)
            for cut in self.cuts
            if source in {None, cut.source}
        )

    def rank_bytes(self, num_ranks: int) -> list[int]:
        """Returns the planned bytes of each rank of a pipeline."""
        found = [0] * num_ranks
        placement = self.schedule_spec(num_ranks).placement
        for rank, stage in zip(placement, self.stages, strict=True):
            found[rank] += stage.memory_bytes
        return found

    def schedule_spec(self, num_ranks: int | None = None) -> ScheduleSpec:
        """Returns the schedule that the plan's pipeline runs, for any number of micro-batches.

        Args:
            num_ranks: Number of ranks of the pipeline. Default: those that the plan was made for.

        Raises:
            ScheduleError: The schedule is unknown, or does not work with these ranks.
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

    def _repr_html_(self) -> str:
        """Returns the page of the plan, as a notebook shows it."""
        from tarantella_pp.partition.plan.page import as_frame, drawn_step, render_html

        return as_frame(render_html(self, None, drawn_step(self)))
