"""What steps may run: schedules, planned or searched for, and batches that fit in memory."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Sequence
from typing import Any

from tarantella_pp.errors import ConfigurationError, PlanError
from tarantella_pp.internals.training import gpu_in_use
from tarantella_pp.partition.graph.units import format_bytes
from tarantella_pp.partition.plan.plan import Plan
from tarantella_pp.partition.plan.plan_parts import OutputUse
from tarantella_pp.partition.plan.plan_simulation import searched
from tarantella_pp.partition.plan.stage_costs import with_batch
from tarantella_pp.runtime.comm.machine import memory_of_each_rank
from tarantella_pp.runtime.probes.compilation_probe import loss_kinds
from tarantella_pp.runtime.stage.stage_boundary import StageEdge
from tarantella_pp.runtime.weights.rank_weights import PlacedModel
from tarantella_pp.schedule import SEARCHED, Schedule, ScheduleSpec, lower, validate


class StepSchedules:
    """Schedules with their messages and reductions; each has passed all laws."""

    def __init__(
        self, placed: PlacedModel, links: Sequence[StageEdge], buckets: Sequence[int], free: bool
    ) -> None:
        self.spec = placed.plan.schedule_spec(placed.groups.pipeline.size)
        self.free = free
        self._num_micro_batches = placed.own_micro_batches
        self._links = [(link.source, link.target) for link in links]
        self._gradient_links = [(link.source, link.target) for link in links if link.gradients]
        self._buckets = buckets
        self._schedule = functools.cache(self._lowered)
        if self.spec.name == SEARCHED and self.spec.custom is None:
            self.spec = searched(placed.plan, self.spec, placed.own_micro_batches)

    def inference(self, count: int) -> Schedule:
        """The schedule of forward passes only."""
        return self._schedule(self.placed_alike("forward"), count)

    def training(self, count: int, whole_batch_reason: str | None) -> Schedule:
        """The schedule of the next training step."""
        if whole_batch_reason is not None and count > 1:
            if self.free:
                return self._schedule(self.placed_alike("gpipe"), count)
            if not self.sees_batch_at_once:  # found with the targets of the first batch
                raise _asks_too_early(self.spec.name, whole_batch_reason)
        return self._schedule(self.spec, count)

    def placed_alike(self, name: str) -> ScheduleSpec:
        """Another schedule with stages on the same ranks."""
        return ScheduleSpec(name, self.spec.placement)

    @property
    def sees_batch_at_once(self) -> bool:
        """Whether all outputs of a batch are there before the schedule asks for the loss."""
        schedule = self._schedule(self.spec, self._num_micro_batches)
        return schedule.runs_all_forwards_first(self.spec.num_stages - 1)

    def _lowered(self, spec: ScheduleSpec, count: int) -> Schedule:
        """A schedule for some number of micro-batches."""
        plain = spec.make(count)
        buckets = self._buckets if plain.has_backward else []
        lowered = lower(plain, self._links, self._gradient_links, buckets)
        validate(lowered)
        return lowered


def _asks_too_early(schedule: str, reason: str) -> ConfigurationError:
    return ConfigurationError(
        f"Received: schedule={schedule!r}, which computes the loss of one micro-batch after the "
        f"other, but {reason}. Leave `schedule` out, use schedule='gpipe' or num_micro_batches=1, "
        "or a loss that treats each sample by itself."
    )


class MemoryCheck:
    """Holds a plan against the batches that are trained."""

    def __init__(self, placed: PlacedModel, schedules: StepSchedules) -> None:
        self.placed, self.plan = placed, placed.plan
        self.schedules = schedules
        self.largest: Plan | None = None  # with the figures of the largest batch so far

    def expected(self, loss: Any, has_metrics: bool) -> Plan:
        """The plan before the first batch, which may show that metrics need all of it."""
        at_once = loss_kinds(loss, self.placed.extracted).reason
        return self._of(self.plan.batch_size, OutputUse(at_once, None, has_metrics))

    def refuse_compilation(self, loss: Any, has_metrics: bool) -> None:
        """Refuses loss and metrics that do not fit the schedule, or the batch size of the plan."""
        reason, count = loss_kinds(loss, self.placed.extracted).reason, self.plan.num_micro_batches
        if reason is not None and count > 1 and not self.schedules.sees_batch_at_once:
            if not self.schedules.free:
                raise _asks_too_early(self.plan.schedule, reason)
            graph = self.placed.extracted.graph
            outputs = sum(graph.tensors[tensor].bytes_per_sample for tensor in graph.outputs)
            if self.placed.groups.world.prints:
                warnings.warn(
                    f"{reason[0].upper()}{reason[1:]}, so it is computed of the whole batch at "
                    "once, with schedule='gpipe': each stage keeps what its backward pass needs of "
                    f"all num_micro_batches={count} micro-batches, and the last one all outputs, "
                    f"{format_bytes(outputs)} for each sample; `model.plan` counts both.",
                    UserWarning,
                    stacklevel=4,
                )
        if self.plan.limits is not None:
            self._refuse(self.expected(loss, has_metrics))

    def refuse_batch(self, rows: int, outputs: OutputUse) -> None:
        """Refuses a batch that needs more memory than the limit; without one it warns."""
        if self.largest is not None and rows <= self.largest.batch_size:
            return  # memory grows with the batch
        plan = self._of(rows, outputs)
        self._refuse(plan)
        if plan.limits is None and rows > self.plan.batch_size:
            self._compare(plan, memory_of_each_rank(self.placed.groups.world, gpu_in_use()))
        self.largest = plan

    def _of(self, batch_size: int, outputs: OutputUse) -> Plan:
        """The plan for a batch whose outputs are used so."""
        held = None
        if outputs.loss_at_once is not None and self.schedules.free:
            held = self.schedules.placed_alike("gpipe").make(self.plan.num_micro_batches).held
        return with_batch(self.plan, self.placed.extracted.graph, batch_size, outputs, held)

    def _refuse(self, plan: Plan) -> None:
        """Raises where a stage is over its limit."""
        for i, (stage, limit) in enumerate(zip(plan.stages, plan.limits or (), strict=False)):
            if stage.memory_bytes <= limit:
                continue
            kept = plan.outputs.at_once if plan.outputs is not None else None
            why = f" ({kept})" if kept else ""
            other = f"batch_size={plan.batch_size}, which plans for it, train smaller batches"
            if plan.batch_size == self.plan.batch_size:
                other = "a smaller batch_size and train such batches"
            raise PlanError(
                f"Stage {i} would need {stage.memory_bytes} bytes "
                f"({format_bytes(stage.memory_bytes)}) for a batch of {plan.batch_size} samples"
                f"{why}. Received: memory_limit={limit} bytes ({format_bytes(limit)}), in a plan "
                f"for batch_size={self.plan.batch_size}. Make the PipelineModel with {other}, or "
                "allow more memory."
            )

    def _compare(self, plan: Plan, memory: int) -> None:
        """Warns, on one rank, of a batch that needs more than a rank's share of its host."""
        world = self.placed.groups.world
        needed = plan.rank_bytes(self.placed.groups.pipeline.size)
        if max(needed) > memory and world.prints:
            warnings.warn(
                f"Rank {needed.index(max(needed))} of the pipeline needs "
                f"{format_bytes(max(needed))} for a batch of {plan.batch_size} samples, and its "
                f"share of the memory of this machine is {format_bytes(memory)}. The plan was "
                f"made for batch_size={self.plan.batch_size}. {plan.ways_to_less_memory()}",
                stacklevel=2,
            )
