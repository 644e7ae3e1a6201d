"""What a plan is made of, and whether that fits together; `plan.Plan` shows it, too."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated, Any, ClassVar, Literal

import msgspec

from tarantella_pp.errors import PlanError
from tarantella_pp.partition.graph.json_record import JsonRecord
from tarantella_pp.partition.graph.layer_graph import LayerGraph
from tarantella_pp.partition.plan import plan_parts
from tarantella_pp.partition.plan.hardware_spec import HardwareSpec, NodeWork
from tarantella_pp.schedule import HeldAgain, Schedule, ScheduleSpec
from tarantella_pp.schedule.spec import check_trains


class PlanData(
    plan_parts.PlanConfig,
    JsonRecord,
    frozen=True,
    kw_only=True,
    tag_field="format",
    tag="tarantella_pp.plan",
    rename={"schedule_text": "program"},  # as in files of the first version
):
    """Fields of a plan (`plan.Plan` documents them), their checks and what follows from them."""

    noun: ClassVar[str] = "plan"

    model: str
    optimizer: str
    fingerprint: Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{64}$")]
    node_names: tuple[str, ...]
    assignment: tuple[int, ...]
    stages: tuple[plan_parts.StagePlan, ...]
    cuts: tuple[plan_parts.CutEdge, ...]
    certificate: plan_parts.Certificate
    ties: tuple[plan_parts.Tie, ...] = ()
    bubble: plan_parts.Amount | None = None
    assumed_size: int | None = None
    estimated: tuple[str, ...] = ()
    kept_whole: tuple[str, ...] = ()
    schedule_text: str | None = None
    in_bubbles: tuple[tuple[int, int], ...] = ()
    fallbacks: tuple[str, ...] = ()
    outputs: plan_parts.OutputUse | None = None
    machine: HardwareSpec | None = None
    step_seconds: plan_parts.Amount | None = None
    next_best: Any = None
    advice: Any = None
    measured: tuple[Any, ...] = ()
    except_last: tuple[Any, ...] = ()
    work: tuple[NodeWork, ...] = ()
    version: Literal[1] = 1

    def __post_init__(self) -> None:
        """Checks that everything fits together; types and ranges are checked as files are read."""
        for problem in _problems(self):
            raise PlanError(f"This is no valid plan: {problem}")
        if self.schedule_text is not None:
            own = self.schedule_spec().make(self.num_micro_batches)
            check_trains(own, self.links, self.gradient_links)

    @property
    def links(self) -> set[tuple[int, int]]:
        """Pairs of stages, source first, that exchange messages."""
        return {(cut.source, target) for cut in self.cuts for target in cut.targets}

    @property
    def gradient_links(self) -> set[tuple[int, int]]:
        """Those of `links` over which gradients come back."""
        with_gradient = (cut for cut in self.cuts if cut.has_gradient)
        return {(cut.source, target) for cut in with_gradient for target in cut.targets}

    def has_backward(self, stage: int) -> bool:
        """Whether a stage has gradients to compute: it has none where all up to it is frozen."""
        returns = any(cut.has_gradient and stage in cut.targets for cut in self.cuts)
        return returns or self.stages[stage].parameter_bytes > 0

    def sent_bytes(self, source: int | None = None) -> int:
        """Returns the bytes that one stage, or all, send forward for one micro-batch."""
        cuts = [cut for cut in self.cuts if source in {None, cut.source}]
        return sum((self.sent(cut) + cut.mask_bytes) * len(cut.targets) for cut in cuts)

    def rank_bytes(self, num_ranks: int) -> list[int]:
        """Returns the planned bytes of each rank of a pipeline."""
        found = [0] * num_ranks
        placement = self.schedule_spec(num_ranks).placement
        for rank, stage in zip(placement, self.stages, strict=True):
            found[rank] += stage.memory_bytes
        return found

    def schedule_spec(self, num_ranks: int | None = None, name: str | None = None) -> ScheduleSpec:
        """Returns a schedule, by default the one of the plan, on the ranks that it was made for."""
        # A schedule may put several stages on a rank only where the plan was made for that.
        if num_ranks is None and self.ranks:
            num_ranks = self.num_ranks
        if name not in (None, self.schedule):
            return ScheduleSpec.of(name, self.num_stages, num_ranks)
        if self.schedule_text is None:
            spec = ScheduleSpec.of(self.schedule, self.num_stages, num_ranks)
            return replace(spec, repeated=self.in_bubbles)
        custom = Schedule.from_text(self.schedule_text)
        return ScheduleSpec.of_custom(custom, self.num_stages, num_ranks)

    @property
    def held_again(self) -> tuple[HeldAgain, ...]:
        """For how many micro-batches each stage holds what its B made for its W."""
        return self.schedule_spec().held_again(self.num_micro_batches)

    @property
    def repeats(self) -> dict[int, HeldAgain]:
        """What each stage that repeats its forward pass holds of what that made."""
        counts = self.held_again if self.recomputes() else ()
        return {stage: held for stage, held in enumerate(counts) if self.recomputes(stage)}

    def check(self, graph: LayerGraph) -> None:
        """Raises a `PlanError` if this is a plan of another model."""
        if self.fingerprint != graph.fingerprint():
            raise PlanError(
                f"This is a plan of another model, '{self.model}' with {len(self.node_names)} "
                f"operations; this one has {len(graph.nodes)}, or other shapes, dtypes or edges."
            )
        if wrong := graph.misplaced(self.assignment):
            raise PlanError(f"This plan cannot run: {wrong}.")


def _problems(plan: PlanData) -> list[str]:
    names, assignment, count = plan.node_names, plan.assignment, plan.num_stages
    if len(plan.stages) != count:
        return [f"it must have num_stages={count} stages. Received: {len(plan.stages)}"]
    own = [[name for name, s in zip(names, assignment, strict=False) if s == i]
           for i in range(count)]  # fmt: skip
    size, ascends = len(names), plan_parts.ascends
    ends = [(nodes[0], nodes[-1], len(nodes)) for nodes in own if nodes]
    must_hold = {
        **plan.must_hold(),
        "assignment and node_names must be equally long": len(assignment) == len(names),
        "work must name all nodes, or none": len(plan.work) in (0, len(names)),
        "recompute_worth must name all nodes, or none": len(plan.recompute_worth) in (0, size),
        "node names must be unique": len(set(names)) == len(names),
        f"each node must be on a stage, and each stage have some. Received: {list(assignment)}": (
            set(assignment) == set(range(count))
        ),
        "stages must name their first and last node, and how many there are": (
            [(stage.first, stage.last, stage.nodes) for stage in plan.stages] == ends
        ),
        "cuts must run from a stage to later ones": (
            all(c.targets and ascends((c.source, *c.targets), count) for c in plan.cuts)
        ),
        "ties must name two stages or more, ascending": (
            all(len(tie.stages) > 1 and ascends(tie.stages, count) for tie in plan.ties)
        ),
    }
    return [what for what, holds in must_hold.items() if not holds]
