"""A replay in which computations and messages take their time."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Generic, TypeVar

from tarantella_pp.errors import ScheduleError
from tarantella_pp.schedule.actions import Action, Compute, Message, Transfer
from tarantella_pp.schedule.replay import Replay
from tarantella_pp.schedule.schedule import Schedule
from tarantella_pp.simulation.costs import Costs

Time = TypeVar("Time", bound=Any)
"""Seconds, or anything else to which seconds can be added: then the later of two is known."""
Channel = tuple[int, int]
"""The rank that sends and the one that receives."""


class TimedReplay(Replay, Generic[Time]):
    """Plays one step of a lowered schedule with a clock on each rank.

    A rank depends on others through messages only, so each has a clock of its own and no order
    between ranks has to be kept.

    Attributes:
        clock: When each rank is done with what it has done so far.
        channels: When the last message of each channel has left it.
    """

    def __init__(
        self,
        schedule: Schedule,
        costs: Costs,
        clock: Sequence[Time],
        later: Callable[[Time, Time], Time],
        channels: Mapping[Channel, Time] | None = None,
    ) -> None:
        if not schedule.is_lowered:
            raise ScheduleError("Expected a schedule with messages; pass it to lower() first")
        if len(costs.stages) != schedule.num_stages:
            raise ScheduleError(
                f"Expected costs of {schedule.num_stages} stages. Received: {len(costs.stages)}"
            )
        self.clock = list(clock)
        self.channels = dict(channels or {})
        self._later = later
        self._costs = costs
        self._placement = schedule.placement
        self._arrival: dict[Message, Time] = {}
        self._seconds = [
            {kind: stage.seconds(kind) for kind in ("F", "B", "W", "BW")} for stage in costs.stages
        ]
        except_last = [i for i, stage in enumerate(costs.stages) if stage.except_last]
        repeats = any(stage.repeated for stage in costs.stages)
        self._kept_whole = schedule.kept_whole(except_last) if repeats else frozenset()
        super().__init__(schedule.actions, blocking=False)

    def play(self) -> None:
        """Plays the step."""
        stuck = self.run()
        if stuck:
            raise ScheduleError(f"Deadlock: ranks {stuck} wait forever; validate() says for what")

    def note(self, rank: int, start: Time, end: Time, action: Action) -> None:
        """Is called with the times of each computation, send and receive."""

    def compute(self, rank: int, action: Compute) -> None:
        """Lets a computation take its seconds."""
        start = self.clock[rank] + self._costs.before.get(action, 0.0)
        seconds = self._seconds[action.stage][action.kind]
        if (action.stage, action.micro_batch) in self._kept_whole and action.kind in ("B", "BW"):
            seconds -= self._costs.stages[action.stage].repeated
        self.clock[rank] = end = start + seconds
        self.note(rank, start, end, action)

    def send(self, rank: int, action: Transfer) -> None:
        """Puts a message on its way, behind the earlier ones of its channel."""
        start = self.clock[rank]
        begin = end = start + self._costs.send_seconds
        link = self._costs.link(action.source, action.target)
        channel = (rank, self._placement[action.target])
        if channel in self.channels:
            begin = self._later(end, self.channels[channel])
        gone = begin + link.seconds
        if link.seconds or channel in self.channels:
            self.channels[channel] = gone
        self._arrival[action.message] = gone + link.latency
        self.clock[rank] = end
        self.note(rank, start, end, action)

    def receive(self, rank: int, action: Transfer) -> None:
        """Waits until a message has arrived."""
        start = self.clock[rank] + self._costs.before.get(action, 0.0)
        end = self._later(start, self._arrival[action.message]) + self._costs.receive_seconds
        self.clock[rank] = end
        self.note(rank, start, end, action)
