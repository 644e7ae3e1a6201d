"""How long a step takes, and how much memory, without running it: from what its parts cost."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import NamedTuple, get_args

from tarantella_pp.errors import ScheduleError
from tarantella_pp.schedule.lowering import reductions
from tarantella_pp.schedule.players import Replay
from tarantella_pp.schedule.schedule import Action, Compute, Kind, Link, Message, Schedule, Transfer

_FILL = {"F": ">", "R": "+", "B": "<", "W": "=", "BW": "<"}


class Event(NamedTuple):
    """One action of one rank in time."""

    rank: int
    start: float  # seconds since the step began; a receive starts when its rank begins to wait
    end: float  # seconds since the step began
    action: Action


@dataclass(frozen=True)
class StepTimeline:
    """One step of one pipeline, and of others side by side once it has `reductions`."""

    name: str  # of the schedule
    placement: tuple[int, ...]
    events: tuple[tuple[Event, ...], ...]  # what each rank has done, in order
    serial_seconds: float  # seconds of the same step in one process
    peak_bytes: tuple[float, ...] = ()  # of each rank; none where that was not counted
    # When each rank sums which gradients over replicas; empty for one pipeline
    reductions: tuple[tuple[Event, ...], ...] = ()

    @cached_property
    def pipeline_seconds(self) -> float:
        """Seconds until the last rank has computed everything."""
        return max((own[-1].end for own in self.events if own), default=0.0)

    @cached_property
    def busy_seconds(self) -> tuple[float, ...]:
        """Seconds that each rank computes."""
        return tuple(
            sum(event.end - event.start for event in own if isinstance(event.action, Compute))
            for own in self.events
        )

    @cached_property
    def gradients_ready(self) -> tuple[float, ...]:
        """Second at which each stage has all weight gradients, and has sent what others need."""
        ready = [0.0] * len(self.placement)
        for _, _, end, action in (event for own in self.events for event in own):
            if isinstance(action, Compute):
                ready[action.stage] = end
            elif isinstance(action, Transfer) and action.operation == "S":
                ready[action.source] = end
        return tuple(ready)

    def with_reductions(self, seconds: Sequence[Sequence[float]]) -> StepTimeline:
        """Returns the step with sums over replicas that take seconds for each stage's buckets.

        A rank does one after the other, while it computes. Two stages on a rank::

            rank     .... 2BW3  0BW2  0BW3
            network            2A0===2A1===0A0====
                                           `------ exposed
        """
        counts = [len(own) for own in seconds]
        reduced = []
        for rank in range(self.num_ranks):
            events, free = [], 0.0
            for action in reductions(self.placement, counts, rank):
                begin = max(self.gradients_ready[action.stage], free)
                free = begin + seconds[action.stage][action.bucket]
                events.append(Event(rank, begin, free, action))
            reduced.append(tuple(events))
        return replace(self, reductions=tuple(reduced))

    @cached_property
    def step_seconds(self) -> float:
        """Seconds from the start of the step until all is computed and reduced."""
        return max([self.pipeline_seconds, *(own[-1].end for own in self.reductions if own)])

    @property
    def exposed_seconds(self) -> float:
        """Seconds that the step is longer because of reductions."""
        return self.step_seconds - self.pipeline_seconds

    @property
    def num_ranks(self) -> int:
        """Number of ranks of one pipeline."""
        return len(self.events)

    @property
    def bubble_fraction(self) -> float:
        """The part of all ranks' time in which they do not compute, but for reductions."""
        return self.idle_fraction(*range(self.num_ranks))

    def idle_fraction(self, *ranks: int) -> float:
        """Returns the part of the time of some ranks in which they do not compute."""
        if not self.pipeline_seconds:
            return 0.0
        busy = sum(self.busy_seconds[rank] for rank in ranks)
        return max(0.0, 1.0 - busy / (len(ranks) * self.pipeline_seconds))

    @property
    def speed_up(self) -> float:
        """How many times faster the step is than in one process: a bound for the runtime."""
        return self.serial_seconds / (self.step_seconds or 1.0)

    def to_text(self, width: int = 100) -> str:
        """Draws the computations, one line for each rank, with its reductions below."""
        names = [f"rank {rank} " for rank in range(len(self.events))]
        margin = max(map(len, names), default=0)
        scale = width / (self.step_seconds or 1.0)
        lines = []
        for rank, (name, own) in enumerate(zip(names, self.events, strict=True)):
            lines.append(f"{name:>{margin}}|{_draw(own, scale, width)}|")
            if any(self.reductions):
                lines.append(f"{'':{margin}}|{_draw(self.reductions[rank], scale, width, ' ')}|")
        exposed, legend = "", "(> forward, < input gradient, = weight gradient, . idle)"
        actions = [event.action for own in self.events for event in own]
        if any(isinstance(action, Compute) and action.kind == "R" for action in actions):
            legend = legend.replace(",", ", + forward again,", 1)
        if any(self.reductions):
            exposed = f"exposed reduction {self.exposed_seconds:.4g} s, "
            legend = f"{legend[:-1]}, ~ reduction)"
        summary = (
            f"{self.name}: step {self.step_seconds:.4g} s, bubble {self.bubble_fraction:.1%}, "
            f"{exposed}speed-up {self.speed_up:.2f} of {len(self.events)}   {legend}"
        )
        return "\n".join([*lines, summary]) + "\n"


def _draw(events: Sequence[Event], scale: float, width: int, idle: str = ".") -> str:
    """Draws one rank; too narrow blocks have no label."""
    line = [idle] * width
    stages = {event.action.stage for event in events if not isinstance(event.action, Transfer)}
    for event in events:
        action = event.action
        if isinstance(action, Transfer):
            continue
        first, last = round(event.start * scale), round(event.end * scale)
        label = str(action) if len(stages) > 1 else str(action).lstrip("0123456789")
        block = (_FILL[action.kind] if isinstance(action, Compute) else "~") * (last - first)
        if isinstance(action, Compute) and action.kind == "BW":
            block = "<" * ((last - first + 1) // 2) + "=" * ((last - first) // 2)
        if len(label) < len(block) or len(label) == len(block) == 2:
            block = label + block[len(label) :]
        line[first:last] = block
    return "".join(line[:width])


@dataclass(frozen=True)
class StageCosts:
    """Seconds and bytes of one stage for one micro-batch."""

    forward: float
    input_gradient: float = 0.0
    weight_gradient: float = 0.0
    full_backward: float | None = None
    repeated: float = 0.0  # seconds of R, which its backward pass takes less then
    activation_bytes: float = 0.0
    static_bytes: float = 0.0

    def __post_init__(self) -> None:
        for option, value in vars(self).items():
            if value is not None and not (value >= 0 and math.isfinite(value)):
                raise ScheduleError(f"Expected a number of at least 0. Received: {option}={value}")

    def seconds(self, kind: Kind) -> float:
        """Returns the seconds of a computation of this kind."""
        if kind == "BW":
            both = self.input_gradient + self.weight_gradient
            return both if self.full_backward is None else self.full_backward
        return {
            "F": self.forward, "R": self.repeated, "B": self.input_gradient,
            "W": self.weight_gradient,
        }[kind]  # fmt: skip


@dataclass(frozen=True)
class LinkCosts:
    """Seconds of one message."""

    seconds: float = 0.0
    latency: float = 0.0


@dataclass(frozen=True)
class Costs:
    """What a simulation needs to know."""

    stages: tuple[StageCosts, ...]
    links: Mapping[Link, LinkCosts] = field(default_factory=dict)
    default_link: LinkCosts = LinkCosts()
    send_seconds: float = 0.0
    receive_seconds: float = 0.0
    before: Mapping[Action, float] = field(default_factory=dict)

    @classmethod
    def uniform(
        cls,
        num_stages: int,
        forward: float = 1.0,
        input_gradient: float = 1.0,
        weight_gradient: float = 1.0,
        link: LinkCosts = LinkCosts(),
    ) -> Costs:
        """Makes the costs of a pipeline of equal stages."""
        stage = StageCosts(forward, input_gradient, weight_gradient, activation_bytes=1.0)
        return cls((stage,) * num_stages, default_link=link)

    def link(self, source: int, target: int) -> LinkCosts:
        """Returns the costs of a message from one stage to another."""
        opposite = self.links.get((target, source), self.default_link)
        return self.links.get((source, target), opposite)

    def serial_seconds(self, num_micro_batches: int, *, has_backward: bool = True) -> float:
        """Returns the seconds of a step in one process, with fused backwards."""
        kinds: tuple[Kind, ...] = ("F", "BW") if has_backward else ("F",)
        seconds = sum(stage.seconds(kind) for stage in self.stages for kind in kinds)
        return num_micro_batches * seconds


def simulate(schedule: Schedule, costs: Costs) -> StepTimeline:
    """Plays one step of a lowered schedule with a clock on each rank; sends go on by themselves."""
    # Nothing waits for sums over replicas: `StepTimeline.with_reductions` puts them behind it.
    replay = _TimedReplay(schedule, costs)
    if stuck := replay.run():
        raise ScheduleError(f"Deadlock: ranks {stuck} wait forever; validate() says for what")
    serial = costs.serial_seconds(schedule.num_micro_batches, has_backward=schedule.has_backward)
    events = tuple(map(tuple, replay.events))
    peaks = []
    for rank in range(schedule.num_ranks):
        held = peak = sum(costs.stages[stage].static_bytes for stage in schedule.stages_of(rank))
        for action, change in schedule.residual_changes(rank):
            held += change * costs.stages[action.stage].activation_bytes
            peak = max(peak, held)
        peaks.append(peak)
    return StepTimeline(schedule.name, schedule.placement, events, serial, tuple(peaks))


class _TimedReplay(Replay):
    """A replay in which computations and messages take their time, each rank with its own clock."""

    def __init__(self, schedule: Schedule, costs: Costs) -> None:
        if not schedule.is_lowered:
            raise ScheduleError("Expected a schedule with messages; pass it to lower() first")
        if len(costs.stages) != schedule.num_stages:
            raise ScheduleError(
                f"Expected costs of {schedule.num_stages} stages. Received: {len(costs.stages)}"
            )
        self._schedule, self._costs = schedule, costs
        self.events: list[list[Event]] = [[] for _ in schedule.actions]
        self._clock = [0.0] * schedule.num_ranks
        self._channels: dict[tuple[int, int], float] = {}  # when a link's last message has left
        self._arrival: dict[Message, float] = {}
        self._seconds = [
            {kind: stage.seconds(kind) for kind in get_args(Kind)} for stage in costs.stages
        ]
        super().__init__(schedule.actions, blocking=False)

    def _note(self, rank: int, start: float, end: float, action: Action) -> None:
        self._clock[rank] = end
        self.events[rank].append(Event(rank, start, end, action))

    def compute(self, rank: int, action: Compute) -> None:
        """Lets a computation take its seconds."""
        start = self._clock[rank] + self._costs.before.get(action, 0.0)
        seconds = self._seconds[action.stage][action.kind]
        if action.kind[0] == "B" and (action.stage, action.micro_batch) in self._schedule.repeated:
            seconds = max(0.0, seconds - self._seconds[action.stage]["R"])
        self._note(rank, start, start + seconds, action)

    def send(self, rank: int, action: Transfer) -> None:
        """Puts a message on its way, behind the earlier ones of its channel."""
        start = self._clock[rank]
        end = start + self._costs.send_seconds
        link = self._costs.link(action.source, action.target)
        channel = (rank, self._schedule.placement[action.target])
        # A link carries one message at a time in each direction: the next waits for the one before.
        gone = max(end, self._channels.get(channel, 0.0)) + link.seconds
        self._channels[channel] = gone
        self._arrival[action.message] = gone + link.latency
        self._note(rank, start, end, action)

    def receive(self, rank: int, action: Transfer) -> None:
        """Waits until a message has arrived."""
        start = self._clock[rank] + self._costs.before.get(action, 0.0)
        # Taking a message costs the rank time even if it has been there for long.
        end = max(start, self._arrival[action.message]) + self._costs.receive_seconds
        self._note(rank, start, end, action)
