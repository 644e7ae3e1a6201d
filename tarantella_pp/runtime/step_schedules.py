"""The schedules that the steps of a pipeline run: planned, searched for, or forward only."""

from __future__ import annotations

from collections.abc import Sequence

from tarantella_pp.errors import ConfigurationError
from tarantella_pp.partition.plan.plan import Plan
from tarantella_pp.partition.plan.plan_simulation import search_limits
from tarantella_pp.runtime.autotune import Autotune
from tarantella_pp.runtime.modules.stage_boundary import StageEdge
from tarantella_pp.runtime.replicas.process_groups import ProcessGroups
from tarantella_pp.runtime.tracing.recorder import StepRecord
from tarantella_pp.schedule import SEARCHED, Schedule, ScheduleSpec, lower, validate


class StepSchedules:
    """Schedules with their messages and reductions, each of which has passed all laws.

    Attributes:
        spec: The schedule by now; one that is searched for changes.
        free: As above.
    """

    def __init__(
        self,
        plan: Plan,
        num_micro_batches: int,
        links: Sequence[StageEdge],
        buckets: Sequence[int],
        groups: ProcessGroups,
        free: bool,
    ) -> None:
        self.spec = plan.schedule_spec(groups.pipeline.size)
        self.free = free
        self._num_micro_batches = num_micro_batches
        self._links = [(link.source, link.target) for link in links]
        self._gradient_links = [(link.source, link.target) for link in links if link.gradients]
        self._buckets = buckets
        self._peers = groups.peers
        self._made: dict[tuple[ScheduleSpec | None, int], Schedule] = {}
        self._tuning: Autotune | None = None
        if self.spec.name == SEARCHED and self.spec.custom is None:
            limits = search_limits(plan)
            self._tuning = Autotune(self.spec, num_micro_batches, limits, groups.pipeline)

    def inference(self, count: int) -> Schedule:
        """The schedule of forward passes only."""
        return self._schedule(None, count)

    def training(self, count: int, whole_batch_reason: str | None) -> Schedule:
        """The schedule of the next training step."""
        if whole_batch_reason is not None and count > 1:
            if self.free:
                return self._schedule(self.gpipe, count)
            if not self.sees_batch_at_once:  # found with the targets of the first batch
                raise ConfigurationError(
                    f"Received: schedule={self.spec.name!r}, which computes the loss of one "
                    f"micro-batch after the other, but {whole_batch_reason}. Leave `schedule` "
                    "out, or use schedule='gpipe' or num_micro_batches=1."
                )
        return self._schedule(self.spec if self._tuning is None else self._tuning.spec, count)

    @property
    def gpipe(self) -> ScheduleSpec:
        """What runs where the loss needs the whole batch."""
        return ScheduleSpec("gpipe", self.spec.num_stages, self.spec.num_ranks)

    @property
    def sees_batch_at_once(self) -> bool:
        """Whether all outputs of a batch are there before the schedule asks for the loss."""
        schedule = self._schedule(self.spec, self._num_micro_batches)
        return schedule.runs_all_forwards_first(self.spec.num_stages - 1)

    def learn(self, step: StepRecord) -> None:
        """Goes on with the schedule that the steps so far lead to, once there are enough."""
        found = None if self._tuning is None else self._tuning.learn(step)
        if found is not None and found.custom is not None:
            text = self._peers.broadcast_json(found.custom.to_text())
            same = Schedule.from_text(text)
            self.spec = ScheduleSpec.of_custom(same, found.num_stages, found.num_ranks)
            self._tuning = None

    def _schedule(self, spec: ScheduleSpec | None, count: int) -> Schedule:
        """A schedule of so many micro-batches; `None` for forward passes only."""
        if (spec, count) not in self._made:
            plain = self.spec.make_inference(count) if spec is None else spec.make(count)
            buckets = [] if spec is None else self._buckets
            lowered = lower(plain, self._links, self._gradient_links, buckets)
            validate(lowered)
            self._made[spec, count] = lowered
        return self._made[spec, count]
