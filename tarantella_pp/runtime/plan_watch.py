"""What a plan comes to for the batches that are trained, and whether that fits."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

from tarantella_pp.partition.extraction.keras_reader import ExtractedModel
from tarantella_pp.partition.graph.units import format_bytes
from tarantella_pp.partition.plan.plan import Plan
from tarantella_pp.partition.plan.plan_parts import MeasuredPeak, OutputUse
from tarantella_pp.partition.plan.rank_memory import (
    RankMemory,
    measured_note,
    memory_of_ranks,
    planned_of_ranks,
)
from tarantella_pp.partition.plan_in_force import check_limit, plan_in_force
from tarantella_pp.partition.planned_schedule import with_findings
from tarantella_pp.runtime.compilation import expected_outputs
from tarantella_pp.runtime.replicas.process_groups import ProcessGroups
from tarantella_pp.runtime.step_schedules import StepSchedules
from tarantella_pp.runtime.tracing.host_memory import memory_of_each_rank
from tarantella_pp.runtime.tracing.memory_meter import MemoryMeter


class PlanWatch:
    """Holds a plan against what is trained, and against the memory that this really takes.

    Attributes:
        in_force: The plan with the figures of the largest batch so far; `None` before the first.
        measured: The most memory that each rank of a pipeline has taken; empty before a step.
    """

    def __init__(
        self,
        plan: Plan,
        extracted: ExtractedModel,
        schedules: StepSchedules,
        groups: ProcessGroups,
        meter: MemoryMeter,
    ) -> None:
        self.in_force: Plan | None = None
        self.measured: tuple[MeasuredPeak, ...] = ()
        self._groups = groups
        self._meter = meter
        self._measured_batch = 0
        self._steps_to_measure = 0
        self._warned = False
        self._plan = plan
        self._extracted = extracted
        self._schedules = schedules
        self._largest_batch = 0

    def check(self, loss: Any, has_metrics: bool) -> None:
        """Refuses what does not fit the limit with the batch size of the plan."""
        if self._plan.limits is not None:
            check_limit(self._expected(loss, has_metrics), self._plan.batch_size)

    def require(self, rows: int, outputs: OutputUse) -> None:
        """Refuses a batch for which a stage needs more memory than it may have."""
        if rows > self._largest_batch:
            plan = self._of(rows, outputs)
            check_limit(plan, self._plan.batch_size)
            if plan.limits is None and rows > self._plan.batch_size:
                self._compare(plan, memory_of_each_rank(self._groups.world))
            self.in_force, self._largest_batch = plan, rows

    def step_done(self) -> None:
        """Measures after the first steps of a batch larger than those before; on all ranks alike.

        The second one has the state of the optimizer, which the first one makes, from the start.
        """
        if self._measured_batch < self._largest_batch:
            self._measured_batch, self._steps_to_measure = self._largest_batch, 2
        if self._steps_to_measure:
            self._steps_to_measure -= 1
            self.measure()

    def measure(self) -> list[RankMemory]:
        """Learns what all ranks have taken, and warns of what is over the limit; on all ranks."""
        own = self._meter.peak()
        mine = None if own is None else (own.bytes, own.exact, own.on_gpu)
        told = self._groups.world.allgather_json(mine)
        peaks = [MeasuredPeak(*each) for each in told if each is not None]
        if self.in_force is None or len(peaks) < len(told):
            return []
        self.measured = tuple(
            max((peaks[rank] for rank in ranks), key=lambda peak: peak.bytes)
            for ranks in zip(*self._groups.world_ranks, strict=True)
        )
        plan = with_findings(self.in_force, self._schedules.spec, {}, self.measured)
        found = memory_of_ranks(plan)
        self._warn_above_limit(plan, found)
        return found

    def _warn_above_limit(self, plan: Plan, found: Sequence[RankMemory]) -> None:
        """Warns, once and on one rank, of the rank that is farthest above its limit."""
        world = self._groups.world
        above = {
            rank.measured.bytes - rank.limit: i
            for i, rank in enumerate(found)
            if rank.limit is not None and rank.measured.exact and rank.measured.bytes > rank.limit
        }
        if not above or self._warned or world.rank < world.size - 1:
            return
        self._warned = True
        position = above[max(above)]
        rank = found[position]
        warnings.warn(
            f"Rank {position} of the pipeline has taken {format_bytes(rank.measured.bytes)} of "
            f"memory, and its memory_limit is {format_bytes(rank.limit or 0)}; planned were "
            f"{format_bytes(rank.planned)} for a batch of {plan.batch_size} samples. "
            f"{measured_note([rank.measured])} {_less(plan)}",
            stacklevel=2,
        )

    def _compare(self, plan: Plan, memory: int) -> None:
        """Warns, on one rank, of a batch that needs more than a rank's share of its host."""
        world = self._groups.world
        needed = planned_of_ranks(plan, self._groups.pipeline.size)
        if max(needed) > memory and world.rank == world.size - 1:
            warnings.warn(
                f"Rank {needed.index(max(needed))} of the pipeline needs "
                f"{format_bytes(max(needed))} for a batch of {plan.batch_size} samples, and its "
                f"share of the memory of this machine is {format_bytes(memory)}. The plan was "
                f"made for batch_size={self._plan.batch_size}. {_less(plan)}",
                stacklevel=2,
            )

    def expect(self, loss: Any, has_metrics: bool) -> None:
        """Has a plan in force before the first batch; see `check`."""
        if self.in_force is None:
            self.in_force = self._expected(loss, has_metrics)

    def forget(self) -> None:
        """Begins anew: loss and metrics are others."""
        self.in_force, self._largest_batch, self._measured_batch = None, 0, 0

    def _expected(self, loss: Any, has_metrics: bool) -> Plan:
        """What the plan comes to as far as it is known before the first batch."""
        outputs = expected_outputs(loss, has_metrics, self._extracted)
        return self._of(self._plan.batch_size, outputs)

    def _of(self, batch_size: int, outputs: OutputUse) -> Plan:
        """What the plan comes to for a batch and for what is computed of the outputs."""
        held = None
        if outputs.loss_at_once is not None and self._schedules.free:
            held = self._schedules.gpipe.in_flight(self._plan.num_micro_batches)
        return plan_in_force(self._plan, self._extracted.graph, batch_size, outputs, held)


def _less(plan: Plan) -> str:
    """Which options of a plan would take less memory."""
    ways = ["smaller batches", "more stages"]
    if plan.num_micro_batches < plan.batch_size:
        ways.append("more micro-batches")
    if len(plan.recompute) < plan.num_stages or plan.except_last:
        ways.append("recompute='all'")
    if plan.num_replicas > 1 and not plan.shard_optimizer:
        ways.append("shard_optimizer=True")
    return f"Less is needed with {', '.join(ways[:-1])} or {ways[-1]}."
