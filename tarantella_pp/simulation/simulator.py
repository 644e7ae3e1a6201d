"""How long a step takes, and how much memory, without running it."""

from __future__ import annotations

from typing import Any

from tarantella_pp.schedule.actions import Action, Reduce
from tarantella_pp.schedule.schedule import Schedule
from tarantella_pp.simulation.costs import Costs
from tarantella_pp.simulation.step_timeline import Event, StepTimeline, reduction_events
from tarantella_pp.simulation.timed_replay import TimedReplay


def simulate(schedule: Schedule, costs: Costs) -> StepTimeline:
    """Plays one step of a lowered schedule with a clock on each rank.

    Sends go on by themselves, as in the runtime, and so do reductions: those of a rank one after
    the other, on a network of their own.
    """
    replay = _Recording(schedule, costs, [0.0] * schedule.num_ranks, max)
    replay.play()
    serial = costs.serial_seconds(schedule.num_micro_batches, has_backward=schedule.has_backward)
    events = tuple(map(tuple, replay.events))
    reductions = tuple(
        reduction_events(rank, started, costs.reductions)
        for rank, started in enumerate(replay.started)
    )
    return StepTimeline(schedule.name, events, serial, _peak_bytes(schedule, costs), reductions)


class _Recording(TimedReplay[float]):
    """A replay that notes what happens when."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.events: list[list[Event]] = [[] for _ in self.programs]
        self.started: list[list[tuple[Reduce, float]]] = [[] for _ in self.programs]

    def note(self, rank: int, start: float, end: float, action: Action) -> None:
        """Keeps an event."""
        self.events[rank].append(Event(rank, start, end, action))

    def reduce(self, rank: int, action: Reduce) -> None:
        """Notes when a reduction starts."""
        self.started[rank].append((action, self.clock[rank]))


def _peak_bytes(schedule: Schedule, costs: Costs) -> tuple[float, ...]:
    """Returns the most bytes that each rank holds at a time."""
    peaks = []
    waiting = [stage.waiting_share for stage in costs.stages]
    for rank in range(schedule.num_ranks):
        held = peak = sum(costs.stages[stage].static_bytes for stage in schedule.stages_of(rank))
        for _, action, change in schedule.residual_changes(rank, waiting):
            held += change * costs.stages[action.stage].activation_bytes
            peak = max(peak, held)
        peaks.append(peak)
    return tuple(peaks)
