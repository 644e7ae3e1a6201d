"""The lowered and validated schedules of a pipeline, made once for each number of micro-batches."""

from __future__ import annotations

from collections.abc import Sequence

from tarantella_pp.runtime.layout import Link
from tarantella_pp.schedule import Compute, Schedule, ScheduleSpec, lower, make_schedule, validate


class Programs:
    """Makes the schedules that the ranks of a pipeline run.

    Args:
        placement: Rank of each stage.
        links: All links between stages.
    """

    def __init__(self, placement: Sequence[int], links: Sequence[Link]) -> None:
        self._placement = tuple(placement)
        self._links = [(link.source, link.target) for link in links]
        self._gradient_links = [(link.source, link.target) for link in links if link.gradients]
        self._made: dict[tuple[ScheduleSpec | str, int], Schedule] = {}

    def training(self, spec: ScheduleSpec, num_micro_batches: int) -> Schedule:
        """Returns the schedule of a training step with its messages, which has passed all laws.

        Args:
            spec: Which schedule.
            num_micro_batches: Number of micro-batches of the step.

        Returns:
            The schedule, the same on every rank.
        """
        key = (spec, num_micro_batches)
        if key not in self._made:
            self._made[key] = self._complete(spec.make(num_micro_batches))
        return self._made[key]

    def inference(self, num_micro_batches: int) -> Schedule:
        """Returns the schedule of a step that runs forward only.

        Args:
            num_micro_batches: Number of micro-batches of the step.

        Returns:
            The schedule, the same on every rank.
        """
        key = ("forward", num_micro_batches)
        if key not in self._made:
            stages = len(self._placement)
            plain = make_schedule("forward", stages, num_micro_batches, placement=self._placement)
            self._made[key] = self._complete(plain)
        return self._made[key]

    def _complete(self, plain: Schedule) -> Schedule:
        lowered = lower(plain, self._links, self._gradient_links)
        validate(lowered)
        return lowered


def runs_all_forwards_first(schedule: Schedule, stage: int) -> bool:
    """Whether a stage has all its forwards behind it before its first backward.

    Args:
        schedule: The schedule.
        stage: The stage.
    """
    kinds = [
        action.kind
        for action in schedule.actions[schedule.placement[stage]]
        if isinstance(action, Compute) and action.stage == stage
    ]
    forwards = kinds.count("F")
    return kinds[:forwards] == ["F"] * forwards
