"""How long steps in a row take: what the times of a step make of those of the next."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeAlias

import numpy as np

from tarantella_pp.schedule.actions import Action, Compute, Transfer
from tarantella_pp.schedule.schedule import Schedule
from tarantella_pp.simulation.costs import Costs
from tarantella_pp.simulation.timed_replay import Channel, TimedReplay

Array: TypeAlias = np.ndarray[Any, np.dtype[np.float64]]


@dataclass(frozen=True)
class StepRecurrence:
    """What the times at which ranks begin a step make of those at which they begin the next.

    A rank begins the next step as soon as it is done with this one, whatever the others do. When
    it is done is the latest of several times, each of which some rank's beginning was, and some
    seconds more::

        done[i] = max over j of (begun[j] + seconds[i, j])

    So the steps of a pipeline in a row are powers of a matrix in the algebra of max and +, and
    grow by its largest mean of a cycle: Baccelli, Cohen, Olsder, Quadrat, "Synchronization and
    Linearity", Wiley 1992, chapter 3.

    Attributes:
        ends: The seconds, minus infinity for none, in the order of ranks, then of the channels
            between them whose messages take time, which are busy for a while, too.
        ready: The same for the time at which each stage has its last weight gradient, and has
            sent what others wait for.
    """

    ends: Array
    ready: Array

    @classmethod
    def of(cls, schedule: Schedule, costs: Costs) -> StepRecurrence:
        """Plays a step from all beginnings at once."""
        channels = _busy_channels(schedule, costs)
        size = schedule.num_ranks + len(channels)
        begun = np.where(np.eye(size, dtype=bool), 0.0, -np.inf)
        free = dict(zip(channels, begun[schedule.num_ranks :], strict=True))
        replay = _Symbolic(schedule, costs, list(begun[: schedule.num_ranks]), np.maximum, free)
        replay.ready = [begun[rank] for rank in schedule.placement]
        replay.play()
        rows = [*replay.clock, *(replay.channels[channel] for channel in channels)]
        return cls(np.array(rows), np.array(replay.ready))

    @cached_property
    def period_seconds(self) -> float:
        """Seconds from step to step of a pipeline alone."""
        return _cycle_mean(self.ends)

    @property
    def step_seconds(self) -> float:
        """Seconds of a step alone, for which all ranks begin together."""
        return float(self.ends.max())

    def reduced_period(self, reductions: Iterable[Iterable[tuple[int, float]]]) -> float:
        """Returns the seconds from step to step where ranks wait for reductions at a step's end."""
        ends = self.ends.copy()
        for rank, own in enumerate(reductions):
            free = np.full(len(ends), -np.inf)
            for stage, seconds in own:
                free = np.maximum(free, self.ready[stage]) + seconds
            ends[rank] = np.maximum(ends[rank], free)
        return _cycle_mean(ends)


class _Symbolic(TimedReplay[Array]):
    """A replay from all beginnings at once: a time is a row of the recurrence."""

    ready: list[Array]

    def note(self, rank: int, start: Array, end: Array, action: Action) -> None:
        """Keeps the last time of each stage."""
        if isinstance(action, Compute):
            self.ready[action.stage] = end
        elif isinstance(action, Transfer) and action.operation == "S":
            self.ready[action.source] = end


def _busy_channels(schedule: Schedule, costs: Costs) -> list[Channel]:
    """Returns the channels on which messages take time."""
    sends = {
        (action.source, action.target)
        for own in schedule.actions
        for action in own
        if isinstance(action, Transfer)
    }
    where = schedule.placement
    busy = {(where[s], where[t]) for s, t in sends if costs.link(s, t).seconds}
    return sorted(busy)


def _cycle_mean(weights: Array) -> float:
    """Returns the largest mean of a cycle: Karp, Discrete Mathematics 23 (1978), p. 309."""
    size = len(weights)
    longest = np.zeros((size + 1, size))
    for length in range(size):
        longest[length + 1] = (weights + longest[length]).max(axis=1)
    left = np.arange(size, 0, -1)[:, None]
    return float(((longest[size] - longest[:size]) / left).min(axis=0).max())
