"""When each rank does what: the outcome of a simulation, or of a measured step."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from tarantella_pp.schedule.actions import Action, Compute, Reduce, Transfer

_FILL = {"F": ">", "B": "<", "W": "=", "BW": "<"}


def idle_fraction(busy_seconds: Sequence[float], step_seconds: float) -> float:
    """Returns the bubble: the part of all ranks' time in which they do not compute."""
    if not step_seconds:
        return 0.0
    return max(0.0, 1.0 - sum(busy_seconds) / (len(busy_seconds) * step_seconds))


def end_of_step(pipeline_seconds: float, reductions: Iterable[Sequence[Event]]) -> float:
    """Returns the second at which all is computed and reduced."""
    return max([pipeline_seconds, *(own[-1].end for own in reductions if own)])


class Event(NamedTuple):
    """One action of one rank in time.

    Attributes:
        rank: The rank.
        start: Seconds since the step began; a receive starts when its rank begins to wait.
        end: Seconds since the step began.
        action: The action.
    """

    rank: int
    start: float
    end: float
    action: Action


def reduction_events(
    rank: int, started: Iterable[tuple[Reduce, float]], seconds: Mapping[Reduce, float]
) -> tuple[Event, ...]:
    """Lets the reductions of a rank take their seconds, one after the other.

    Two stages on a rank::

        rank     .... 2BW3  0BW2  0BW3
        network            2R0===2R1===0R0====
                                       `------ exposed
    """
    events, free = [], 0.0
    for action, start in started:
        begin = max(start, free)
        free = begin + seconds.get(action, 0.0)
        events.append(Event(rank, begin, free, action))
    return tuple(events)


@dataclass(frozen=True)
class StepTimeline:
    """When each rank does what in one step."""

    name: str
    events: tuple[tuple[Event, ...], ...]
    serial_seconds: float
    peak_bytes: tuple[float, ...]
    reductions: tuple[tuple[Event, ...], ...] = ()

    @cached_property
    def pipeline_seconds(self) -> float:
        """Seconds from the start of the step to the end of the last rank, but for reductions."""
        return max((own[-1].end for own in self.events if own), default=0.0)

    @cached_property
    def step_seconds(self) -> float:
        """Seconds from the start of the step until all is computed and reduced."""
        return end_of_step(self.pipeline_seconds, self.reductions)

    @property
    def exposed_seconds(self) -> float:
        """Seconds that the step is longer because of reductions."""
        return self.step_seconds - self.pipeline_seconds

    @cached_property
    def busy_seconds(self) -> tuple[float, ...]:
        """Seconds that each rank computes."""
        return tuple(
            sum(event.end - event.start for event in own if isinstance(event.action, Compute))
            for own in self.events
        )

    @property
    def bubble_fraction(self) -> float:
        """The part of all ranks' time in which they do not compute, but for reductions."""
        return idle_fraction(self.busy_seconds, self.pipeline_seconds)

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
