"""What computations, messages and memory of a pipeline cost: the numbers of a simulation."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from tarantella_pp.errors import ScheduleError
from tarantella_pp.schedule.actions import Action, Kind, Link, Reduce


@dataclass(frozen=True)
class StageCosts:
    """Seconds and bytes of one stage for one micro-batch."""

    forward: float
    input_gradient: float = 0.0
    weight_gradient: float = 0.0
    full_backward: float | None = None
    activation_bytes: float = 0.0
    static_bytes: float = 0.0
    repeated: float = 0.0
    except_last: bool = False
    waiting_share: float = 1.0

    def __post_init__(self) -> None:
        for option, value in vars(self).items():
            if value is not None and not (value >= 0 and math.isfinite(value)):
                raise ScheduleError(f"Expected a number of at least 0. Received: {option}={value}")
        if self.waiting_share > 1:
            raise ScheduleError(
                f"Expected a share of at most 1. Received: waiting_share={self.waiting_share}"
            )

    def seconds(self, kind: Kind) -> float:
        """Returns the seconds of a computation of this kind."""
        if kind == "F":
            return self.forward
        if kind == "B":
            return self.input_gradient
        if kind == "W":
            return self.weight_gradient
        both = self.input_gradient + self.weight_gradient
        return both if self.full_backward is None else self.full_backward


@dataclass(frozen=True)
class LinkCosts:
    """Seconds of one message."""

    seconds: float = 0.0
    latency: float = 0.0

    @classmethod
    def of_bytes(cls, size: float, bandwidth: float, latency: float = 0.0) -> LinkCosts:
        """Makes the costs of a message from its size."""
        return cls(size / bandwidth, latency)


@dataclass(frozen=True)
class Costs:
    """What a simulation needs to know."""

    stages: tuple[StageCosts, ...]
    links: Mapping[Link, LinkCosts] = field(default_factory=dict)
    default_link: LinkCosts = LinkCosts()
    send_seconds: float = 0.0
    receive_seconds: float = 0.0
    before: Mapping[Action, float] = field(default_factory=dict)
    reductions: Mapping[Reduce, float] = field(default_factory=dict)

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
        """Returns the seconds of a step in one process, with fused backwards.

        Each micro-batch goes forward and back before the next, so the last stage repeats nothing.
        """
        kinds: tuple[Kind, ...] = ("F", "BW") if has_backward else ("F",)
        seconds = sum(stage.seconds(kind) for stage in self.stages for kind in kinds)
        if not has_backward:
            return num_micro_batches * seconds
        saved = sum(stage.repeated for stage in self.stages[:-1] if stage.except_last)
        return num_micro_batches * (seconds - self.stages[-1].repeated) - saved
