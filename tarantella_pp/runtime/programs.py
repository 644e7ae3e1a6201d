"""The lowered and validated schedules of a pipeline, made once for each number of micro-batches."""

from __future__ import annotations

from collections.abc import Sequence

from tarantella_pp.runtime.layout import Link
from tarantella_pp.runtime.schedule import Compute, Schedule, lower, make_schedule, validate


class Programs:
    """Makes the schedules that the ranks of a pipeline run.

    Args:
        num_stages: Number of stages.
        num_ranks: Number of ranks; stage s is on rank s modulo their number.
        links: All links between stages.
    """

    def __init__(self, num_stages: int, num_ranks: int, links: Sequence[Link]) -> None:
        self._num_stages = num_stages
        self._num_ranks = num_ranks
        self._links = [(link.source, link.target) for link in links]
        self._gradient_links = [(link.source, link.target) for link in links if link.gradients]
        self._made: dict[tuple[str, int], Schedule] = {}

    def schedule(self, name: str, num_micro_batches: int) -> Schedule:
        """Returns a schedule with its messages, which has passed all laws.

        Args:
            name: Name of the schedule.
            num_micro_batches: Number of micro-batches of the step.

        Returns:
            The schedule, the same on every rank.
        """
        key = (name, num_micro_batches)
        if key not in self._made:
            plain = make_schedule(name, self._num_stages, num_micro_batches, self._num_ranks)
            lowered = lower(plain, self._links, self._gradient_links)
            validate(lowered)
            self._made[key] = lowered
        return self._made[key]


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
