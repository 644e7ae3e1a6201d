"""How long a step takes, and how much memory, without running it."""

from __future__ import annotations

from tarantella_pp.errors import ScheduleError
from tarantella_pp.schedule.actions import (
    Compute,
    Message,
    Reduce,
    Transfer,
    followed_at_once,
)
from tarantella_pp.schedule.replay import Replay
from tarantella_pp.schedule.schedule import Schedule
from tarantella_pp.simulation.costs import Costs
from tarantella_pp.simulation.step_timeline import Event, StepTimeline, reduction_events


def simulate(schedule: Schedule, costs: Costs) -> StepTimeline:
    """Plays one step of a lowered schedule with a clock on each rank.

    Sends go on by themselves, as in the runtime, and so do reductions: those of a rank one after
    the other, on a network of their own.

    Args:
        schedule: The schedule with its messages.
        costs: Seconds and bytes of stages and messages.

    Returns:
        The timeline.

    Raises:
        ScheduleError: If the schedule has no messages yet, `costs` are of another number of
            stages, or the ranks deadlock.
    """
    if not schedule.is_lowered:
        raise ScheduleError("Expected a schedule with messages; pass it to lower() first")
    if len(costs.stages) != schedule.num_stages:
        raise ScheduleError(
            f"Expected costs of {schedule.num_stages} stages. Received: {len(costs.stages)}"
        )
    replay = _TimedReplay(schedule, costs)
    stuck = replay.run()
    if stuck:
        raise ScheduleError(f"Deadlock: ranks {stuck} wait forever; validate() says for what")
    serial = costs.serial_seconds(schedule.num_micro_batches, has_backward=schedule.has_backward)
    events = tuple(map(tuple, replay.events))
    reductions = tuple(
        reduction_events(rank, started, costs.reductions)
        for rank, started in enumerate(replay.started)
    )
    return StepTimeline(schedule.name, events, serial, _peak_bytes(schedule, costs), reductions)


class _TimedReplay(Replay):
    """A replay in which computations and messages take their time.

    A rank depends on others through messages only, so each has a clock of its own and no order
    between ranks has to be kept.
    """

    def __init__(self, schedule: Schedule, costs: Costs) -> None:
        self.events: list[list[Event]] = [[] for _ in schedule.actions]
        self.started: list[list[tuple[Reduce, float]]] = [[] for _ in schedule.actions]
        self._costs = costs
        self._placement = schedule.placement
        self._clock = [0.0] * schedule.num_ranks
        self._arrival: dict[Message, float] = {}
        self._channel_free: dict[tuple[int, int], float] = {}
        self._seconds = [
            {kind: stage.seconds(kind) for kind in ("F", "B", "W", "BW")} for stage in costs.stages
        ]
        self._at_once = {
            (action.stage, action.micro_batch)
            for own in (schedule.actions if any(s.repeated for s in costs.stages) else ())
            for action in followed_at_once(own)
        }
        super().__init__(schedule.actions, blocking=False)

    def compute(self, rank: int, action: Compute) -> None:
        """Lets a computation take its seconds."""
        start = self._clock[rank] + self._costs.before.get(action, 0.0)
        seconds = self._seconds[action.stage][action.kind]
        if self._at_once and action.kind in ("B", "BW"):
            at_once = (action.stage, action.micro_batch) in self._at_once
            seconds -= self._costs.stages[action.stage].repeated if at_once else 0.0
        self._clock[rank] = end = start + seconds
        self.events[rank].append(Event(rank, start, end, action))

    def send(self, rank: int, action: Transfer) -> None:
        """Puts a message on its way, behind the earlier ones of its channel."""
        start = self._clock[rank]
        end = start + self._costs.send_seconds
        channel = (rank, self._placement[action.target])
        link = self._costs.link(action.source, action.target)
        begin = max(end, self._channel_free.get(channel, 0.0))
        self._channel_free[channel] = begin + link.seconds
        self._arrival[action.message] = begin + link.seconds + link.latency
        self._clock[rank] = end
        self.events[rank].append(Event(rank, start, end, action))

    def receive(self, rank: int, action: Transfer) -> None:
        """Waits until a message has arrived."""
        start = self._clock[rank] + self._costs.before.get(action, 0.0)
        end = max(start, self._arrival[action.message]) + self._costs.receive_seconds
        self._clock[rank] = end
        self.events[rank].append(Event(rank, start, end, action))

    def reduce(self, rank: int, action: Reduce) -> None:
        """Notes when a reduction starts."""
        self.started[rank].append((action, self._clock[rank]))


def _peak_bytes(schedule: Schedule, costs: Costs) -> tuple[float, ...]:
    """Returns the most bytes that each rank holds at a time."""
    peaks = []
    for rank in range(schedule.num_ranks):
        held = peak = sum(costs.stages[stage].static_bytes for stage in schedule.stages_of(rank))
        for _, action, change in schedule.residual_changes(rank):
            held += change * costs.stages[action.stage].activation_bytes
            peak = max(peak, held)
        peaks.append(peak)
    return tuple(peaks)
