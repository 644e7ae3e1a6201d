"""What a plan comes to for the batches that are trained, and whether that fits."""

from __future__ import annotations

from typing import Any

from tarantella_pp.partition.extraction.keras_reader import ExtractedModel
from tarantella_pp.partition.plan.plan import Plan
from tarantella_pp.partition.plan.plan_parts import OutputUse
from tarantella_pp.partition.plan_in_force import check_limit, plan_in_force
from tarantella_pp.runtime.compilation import expected_outputs
from tarantella_pp.runtime.step_schedules import StepSchedules


class PlanWatch:
    """Holds a plan against what is trained.

    Args:
        plan: The plan.
        extracted: The model's graph and calls.
        schedules: What steps run.

    Attributes:
        in_force: The plan with the figures of the largest batch so far; `None` before the first.
    """

    def __init__(self, plan: Plan, extracted: ExtractedModel, schedules: StepSchedules) -> None:
        self.in_force: Plan | None = None
        self._plan = plan
        self._extracted = extracted
        self._schedules = schedules
        self._largest_batch = 0

    def check(self, loss: Any, has_metrics: bool) -> None:
        """Refuses what does not fit the limit with the batch size of the plan.

        Args:
            loss: The `CompileLoss` that the model is to be compiled with; `None` for none.
            has_metrics: Whether it is to have metrics.

        Raises:
            PlanError: If a stage would need more memory than it may have.
        """
        if self._plan.limits is not None:
            check_limit(self._expected(loss, has_metrics), self._plan.batch_size)

    def require(self, rows: int, outputs: OutputUse) -> None:
        """Refuses a batch for which a stage needs more memory than it may have.

        Args:
            rows: Samples of the batch.
            outputs: What is computed of the model's outputs.
        """
        if rows > self._largest_batch:
            plan = self._of(rows, outputs)
            check_limit(plan, self._plan.batch_size)
            self.in_force, self._largest_batch = plan, rows

    def expect(self, loss: Any, has_metrics: bool) -> None:
        """Has a plan in force before the first batch; see `check`."""
        if self.in_force is None:
            self.in_force = self._expected(loss, has_metrics)

    def forget(self) -> None:
        """Begins anew: loss and metrics are others."""
        self.in_force, self._largest_batch = None, 0

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
