"""Refuses batches that need more memory than stages may have."""

from __future__ import annotations

import warnings
from typing import Any

from tarantella_pp.errors import PlanError
from tarantella_pp.partition.graph.keras_reader import ExtractedModel
from tarantella_pp.partition.graph.units import format_bytes
from tarantella_pp.partition.plan.plan import Plan
from tarantella_pp.partition.plan.plan_parts import OutputUse
from tarantella_pp.partition.with_batch import ways_to_less_memory, with_batch
from tarantella_pp.runtime.compilation import expected_outputs
from tarantella_pp.runtime.step_schedules import StepSchedules
from tarantella_pp.runtime.tracing.host_memory import memory_of_each_rank
from tarantella_pp.runtime.weights.process_groups import ProcessGroups


class MemoryCheck:
    """Holds a plan against the batches that are trained.

    Attributes:
        largest: The plan with the figures of the largest batch so far; `None` before the first.
    """

    def __init__(
        self,
        plan: Plan,
        extracted: ExtractedModel,
        schedules: StepSchedules,
        groups: ProcessGroups,
    ) -> None:
        self.largest: Plan | None = None
        self._rows = 0
        self._plan = plan
        self._extracted = extracted
        self._schedules = schedules
        self._groups = groups

    def expected(self, loss: Any, has_metrics: bool) -> Plan:
        """The plan before the first batch, which may show that metrics need more."""
        outputs = expected_outputs(loss, has_metrics, self._extracted)
        return self._of(self._plan.batch_size, outputs)

    def refuse_compilation(self, loss: Any, has_metrics: bool) -> None:
        """Refuses loss and metrics that do not fit with the batch size of the plan."""
        if self._plan.limits is not None:
            self._refuse(self.expected(loss, has_metrics))

    def refuse_batch(self, rows: int, outputs: OutputUse) -> None:
        """Refuses a batch for which a stage needs more memory than its limit.

        Without a limit a batch that needs more than a rank's share of its host is warned of.
        """
        if rows <= self._rows:  # memory grows with the batch
            return
        plan = self._of(rows, outputs)
        self._refuse(plan)
        if plan.limits is None and rows > self._plan.batch_size:
            self._compare(plan, memory_of_each_rank(self._groups.world))
        self.largest, self._rows = plan, rows

    def forget(self) -> None:
        """Begins anew: loss and metrics are others."""
        self.largest, self._rows = None, 0

    def _of(self, batch_size: int, outputs: OutputUse) -> Plan:
        """The plan for a batch whose outputs are used so."""
        held = None
        if outputs.loss_at_once is not None and self._schedules.free:
            held = self._schedules.gpipe.in_flight(self._plan.num_micro_batches)
        return with_batch(self._plan, self._extracted.graph, batch_size, outputs, held)

    def _refuse(self, plan: Plan) -> None:
        """Raises where a stage is over its limit."""
        planned_for = self._plan.batch_size
        for i, (stage, limit) in enumerate(zip(plan.stages, plan.limits or (), strict=False)):
            if stage.memory_bytes <= limit:
                continue
            kept = plan.outputs.at_once if plan.outputs is not None else None
            why = f" ({kept})" if kept else ""
            other = f"batch_size={plan.batch_size}, which plans for it, train smaller batches"
            if plan.batch_size == planned_for:
                other = "a smaller batch_size and train such batches"
            raise PlanError(
                f"Stage {i} would need {stage.memory_bytes} bytes "
                f"({format_bytes(stage.memory_bytes)}) for a batch of {plan.batch_size} samples"
                f"{why}. Received: memory_limit={limit} bytes ({format_bytes(limit)}), in a plan "
                f"for batch_size={planned_for}. Make the PipelineModel with "
                f"{other}, or allow more memory."
            )

    def _compare(self, plan: Plan, memory: int) -> None:
        """Warns, on one rank, of a batch that needs more than a rank's share of its host."""
        world = self._groups.world
        needed = plan.rank_bytes(self._groups.pipeline.size)
        if max(needed) > memory and world.rank == world.size - 1:
            warnings.warn(
                f"Rank {needed.index(max(needed))} of the pipeline needs "
                f"{format_bytes(max(needed))} for a batch of {plan.batch_size} samples, and its "
                f"share of the memory of this machine is {format_bytes(memory)}. The plan was "
                f"made for batch_size={self._plan.batch_size}. {ways_to_less_memory(plan)}",
                stacklevel=2,
            )
