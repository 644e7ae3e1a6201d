"""One step of a pipeline as plain rows: which rank computes what, from when to when."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import msgspec

from tarantella_pp.errors import PlanError, ScheduleError
from tarantella_pp.partition.plan.hardware_spec import HardwareSpec
from tarantella_pp.partition.plan.plan import Plan
from tarantella_pp.partition.plan.plan_simulation import planned_step
from tarantella_pp.partition.visualization.canvas.palette import KINDS
from tarantella_pp.schedule import Compute
from tarantella_pp.simulation.pipelines import PipelineStep
from tarantella_pp.simulation.step_timeline import idle_fraction


class Bar(NamedTuple):
    """One computation, or one reduction.

    Attributes:
        rank: The rank that it is of.
        start: When it begins, since the step began.
        end: When it ends.
        label: What it is, e.g. `"F3"`, or `"2F3"` where the rank has several stages.
        kind: `"F"`, `"B"`, `"W"` or `"BW"`; `"R"` for a reduction.
    """

    rank: int
    start: float
    end: float
    label: str
    kind: str


@dataclass(frozen=True)
class StepBars:
    """The computations of one step, to be drawn.

    Attributes:
        name: Name of the schedule.
        rank_names: What to call each rank, e.g. `"rank 0 (stage 0)"`.
        bars: The computations, in any order.
        in_seconds: Whether times are seconds; otherwise only their ratios mean something.
        note: Where the times come from, in a sentence.
        reductions: The sums of gradients over replicas, which go on beside computations.
    """

    name: str
    rank_names: tuple[str, ...]
    bars: tuple[Bar, ...]
    in_seconds: bool = True
    note: str = ""
    reductions: tuple[Bar, ...] = ()

    def __post_init__(self) -> None:
        if not self.rank_names:
            raise PlanError("Expected the names of the ranks. Received: rank_names=()")
        computing = tuple(kind for kind in KINDS if kind != "R")
        for bars, kinds in ((self.bars, computing), (self.reductions, ("R",))):
            for bar in bars:
                times = 0 <= bar.start <= bar.end < math.inf
                if not (times and 0 <= bar.rank < len(self.rank_names) and bar.kind in kinds):
                    raise PlanError(
                        f"Expected bars of kind {', '.join(kinds)} on ranks from 0 to "
                        f"{len(self.rank_names) - 1}, with finite times in order. Received: {bar}"
                    )

    @cached_property
    def computed(self) -> float:
        """How long it takes until everything is computed."""
        return max((bar.end for bar in self.bars), default=0.0)

    @cached_property
    def length(self) -> float:
        """How long the step takes."""
        return max(self.computed, max((bar.end for bar in self.reductions), default=0.0))

    @property
    def exposed(self) -> float:
        """How much longer the step is because of reductions."""
        return self.length - self.computed

    @cached_property
    def idle(self) -> tuple[float, ...]:
        """The share of the step in which each rank does not compute."""
        return tuple(idle_fraction([busy], self.computed) for busy in self._busy)

    @property
    def bubble(self) -> float:
        """The share of all ranks' time in which they do not compute."""
        return idle_fraction(self._busy, self.computed)

    @property
    def kinds(self) -> tuple[str, ...]:
        """The kinds of bars that occur."""
        found = {bar.kind for bar in (*self.bars, *self.reductions)}
        return tuple(kind for kind in KINDS if kind in found)

    def of_rank(self, rank: int) -> tuple[Bar, ...]:
        """Returns the computations of a rank, in order, then its reductions."""
        reduced = tuple(bar for bar in self.reductions if bar.rank == rank)
        return self._by_rank[rank] + reduced

    @cached_property
    def _busy(self) -> tuple[float, ...]:
        return tuple(sum(bar.end - bar.start for bar in own) for own in self._by_rank)

    @cached_property
    def _by_rank(self) -> tuple[tuple[Bar, ...], ...]:
        own: list[list[Bar]] = [[] for _ in self.rank_names]
        for bar in sorted(self.bars):
            own[bar.rank].append(bar)
        return tuple(map(tuple, own))


def simulated_step(
    plan: Plan, machine: HardwareSpec | None = None, *, num_ranks: int | None = None
) -> StepBars:
    """Simulates one step of a plan, to be drawn."""
    machine = machine or plan.machine
    step = planned_step(msgspec.structs.replace(plan, machine=machine), num_ranks)
    note = "Times follow the FLOPs of the stages; each gradient takes as long as the forward pass"
    if plan.recompute:
        note += ", which stages that recompute repeat"
    messages = "messages take no time" if machine is None else "messages take what links allow"
    return step_bars(step, in_seconds=machine is not None, note=f"{note}, and {messages}.")


def step_bars(step: PipelineStep, *, in_seconds: bool = True, note: str = "") -> StepBars:
    """Turns a step that was played into the rows that pictures show."""
    if step.timeline is None:
        raise ScheduleError(
            f"A step of {len(step.placement)} stages and so many micro-batches is too large to be "
            "drawn; fewer micro-batches look alike."
        )
    bars, reduced = [], []
    names = []
    for rank, events in enumerate(step.timeline.events):
        stages = [stage for stage, owner in enumerate(step.placement) if owner == rank]
        text = ", ".join(map(str, stages))
        names.append(f"rank {rank} (stage{'s' if len(stages) > 1 else ''} {text})")
        for event in events:
            action = event.action
            if isinstance(action, Compute):
                label = str(action) if len(stages) > 1 else f"{action.kind}{action.micro_batch}"
                bars.append(Bar(rank, event.start, event.end, label, action.kind))
    for own in step.reductions:
        reduced += [Bar(e.rank, e.start, e.end, str(e.action), "R") for e in own]
    return StepBars(step.schedule, tuple(names), tuple(bars), in_seconds, note, tuple(reduced))
