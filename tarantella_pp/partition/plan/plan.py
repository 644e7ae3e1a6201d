"""The plan: which stage runs which operation, and what that costs; goes to JSON and back."""

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


class Plan(
    plan_parts.PlanConfig,
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
        balance: What the stages are balanced by; `"given"` where they were given as numbers of
            layers. It is an option of `make_plan`, as are `num_stages`, `num_micro_batches`,
            `num_replicas`, `batch_size`, `schedule` and others that stand here as they were chosen.
        optimizer: The optimizer whose slots are counted.
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
        kept_whole: Layers that would have been opened for a better balance and cannot be, and why.
        estimated: Kinds of layers whose costs are guesses; all others are counted or, where
            stages have seconds, measured.
        schedule_text: Text of the schedule where its name does not say all: a user's own, or one
            that was searched for.
        in_bubbles: Stage and micro-batch of each forward pass that runs again before its gradient
            is there, while its rank would wait.
        ranks: Rank of each stage that the plan was made for; empty where each has its own.
        fallbacks: The stages whose backward pass the runtime could not cut in two, and why; known
            once they have trained.
        outputs: What loss and metrics of a compiled model need of its outputs, which the memory of
            the last stage counts; `None` where that was not known.
        machine: The ranks and links that a step is simulated with; `None` in files from before
            plans had it, whose bubble is one of messages that take no time.
        step_seconds: Simulated seconds of a step, sums over replicas included; `None` where that
            was not simulated.
        next_best, advice, measured, except_last: In files of before; nothing is made of them.
        work: Arithmetic and memory traffic of each node, from which its seconds on any machine
            follow; empty in files from before plans had it.
    """

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
        return {(c.source, target) for c in self.cuts if c.has_gradient for target in c.targets}

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

    def __str__(self) -> str:
        """Returns the table of the plan, as wide as the terminal, without colours."""
        # Displays are imported when they are asked for: ranks load plans, and never print them.
        from tarantella_pp.partition.plan.report import as_text

        return as_text(self)

    def __rich__(self) -> Any:
        """Returns the table of the plan for `rich.print`."""
        from tarantella_pp.partition.plan.report import table

        return table(self)

    def _repr_html_(self) -> str:
        from tarantella_pp.partition.plan.page import as_frame, render_html

        return as_frame(render_html(self))


def _problems(plan: Plan) -> list[str]:
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
