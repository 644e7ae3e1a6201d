"""The step of one pipeline and of many side by side, from two ranks to thousands."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from tarantella_pp.errors import ScheduleError
from tarantella_pp.schedule.actions import Compute, Link, Reduce, Transfer
from tarantella_pp.schedule.formulas import bubble_fraction, in_flight_bounds
from tarantella_pp.schedule.lowering import lower
from tarantella_pp.schedule.reduction_order import reductions
from tarantella_pp.schedule.schedule import Schedule
from tarantella_pp.schedule.spec import SEARCHED, ScheduleSpec
from tarantella_pp.simulation.costs import Costs
from tarantella_pp.simulation.schedule_search import search_schedule
from tarantella_pp.simulation.simulator import simulate
from tarantella_pp.simulation.step_recurrence import StepRecurrence
from tarantella_pp.simulation.step_timeline import (
    Event,
    StepTimeline,
    end_of_step,
    idle_fraction,
    reduction_events,
)

MOST_PLAYED = 20_000
"""Stages x micro-batches up to which a step is played event by event, in about a second."""
MOST_SEARCHED = 1_000
"""The same for `zb-auto`, which plays many schedules."""


@dataclass(frozen=True)
class PipelineStep:
    """One step of one pipeline, and of others side by side once `replicated_step` has had it.

    Attributes:
        schedule: Name of the schedule.
        placement: Rank of each stage.
        pipeline_seconds: Seconds until the last rank has computed everything.
        busy_seconds: Seconds that each rank computes.
        gradients_ready: Second at which each stage has its last weight gradient, and has sent
            what others wait for.
        peak_bytes: Peak memory of each rank.
        serial_seconds: Seconds of the same step in one process.
        timeline: The step as it was played; `None` where it is from closed forms.
        reductions: When each rank sums which gradients over replicas; empty for one pipeline.
        played: The schedule with its messages and the costs that were played; `None` likewise.
    """

    schedule: str
    placement: tuple[int, ...]
    pipeline_seconds: float
    busy_seconds: tuple[float, ...]
    gradients_ready: tuple[float, ...]
    peak_bytes: tuple[float, ...]
    serial_seconds: float
    timeline: StepTimeline | None
    reductions: tuple[tuple[Event, ...], ...] = ()
    played: tuple[Schedule, Costs] | None = None

    @property
    def step_seconds(self) -> float:
        """Seconds until everything is computed and reduced."""
        return end_of_step(self.pipeline_seconds, self.reductions)

    @property
    def exposed_seconds(self) -> float:
        """Seconds that the step is longer because of reductions."""
        return self.step_seconds - self.pipeline_seconds

    @property
    def num_ranks(self) -> int:
        """Number of ranks."""
        return len(self.busy_seconds)

    @property
    def bubble_fraction(self) -> float:
        """The part of all ranks' time in which they do not compute, but for reductions."""
        return idle_fraction(self.busy_seconds, self.pipeline_seconds)

    @cached_property
    def period_seconds(self) -> float | None:
        """Seconds from step to step where each rank goes on when it is done; see `StepRecurrence`.

        `None` where the step is from closed forms.
        """
        if self.played is None:
            return None
        sums = [
            [(a.stage, self._left_of(a, e)) for e in own if isinstance(a := e.action, Reduce)]
            for own in self.reductions
        ]
        return StepRecurrence.of(*self.played).reduced_period(sums)

    def _left_of(self, action: Reduce, event: Event) -> float:
        """Seconds of a reduction that are left once its stage is done."""
        ready = self.gradients_ready[action.stage]
        return event.end - max(event.start, min(event.end, ready))

    @property
    def bubble_in_a_row(self) -> float | None:
        """The part of all ranks' time in which they do not compute where steps follow each other.

        Waits for reductions count; `None` where the step is from closed forms.
        """
        period = self.period_seconds
        return None if period is None else idle_fraction(self.busy_seconds, period)


@dataclass(frozen=True)
class Network:
    """What sums gradients over replicas.

    Attributes:
        bandwidth: Bytes per second that a rank sends, and receives at the same time; `None` where
            messages take no time. Of ranks that share a host: all that add up the same.
        latency: Seconds of each message more.
        inside: The same between two ranks of a host.
        peers_inside: Replicas whose ranks with the same stages share a host.
    """

    bandwidth: float | None
    latency: float = 0.0
    inside: float | None = None
    peers_inside: int = 1

    def allreduce_seconds(self, size: float, num_replicas: int) -> float:
        """Returns the seconds of a ring all-reduce; a hierarchical one where replicas share hosts.

        Each of R replicas sends 2 (R - 1) messages of a share of 1 / R. Patarasuk and Yuan,
        "Bandwidth optimal all-reduce algorithms for clusters of workstations", JPDC 69 (2009).
        If k of them share a host, they first add up inside, so that each has the sum of a share of
        1 / k; these k shares go round the hosts in k rings at once, and inside again at the end.
        """
        if num_replicas == 1 or not size:
            return 0.0
        within = min(self.peers_inside, num_replicas)
        hosts = -(-num_replicas // within)
        parts = ((within, self.inside), (hosts, self.bandwidth))
        return sum(
            2 * (count - 1) * (size / count / (speed or math.inf) + self.latency)
            for count, speed in parts
        )


def pipeline_step(
    spec: ScheduleSpec,
    costs: Costs,
    num_micro_batches: int,
    *,
    links: Iterable[Link] | None = None,
    gradient_links: Iterable[Link] | None = None,
    in_flight_limit: Sequence[int] | None = None,
    blocking: bool = True,
) -> PipelineStep:
    """Plays one step of a pipeline; a very large one is calculated from closed forms."""
    searched = spec.name == SEARCHED and spec.custom is None
    most = MOST_SEARCHED if searched else MOST_PLAYED
    if spec.num_stages * num_micro_batches > most and spec.custom is None:
        return _calculated(spec, costs, num_micro_batches)
    if searched:
        schedule = search_schedule(
            spec.num_stages, num_micro_batches, placement=spec.placement,
            costs=costs, in_flight_limit=in_flight_limit,
        )  # fmt: skip
    else:
        schedule = spec.make(num_micro_batches)
    lowered = lower(schedule, links, gradient_links, blocking=blocking)
    timeline = simulate(lowered, costs)
    return PipelineStep(
        schedule=spec.name,
        placement=schedule.placement,
        pipeline_seconds=timeline.pipeline_seconds,
        busy_seconds=timeline.busy_seconds,
        gradients_ready=_gradients_ready(timeline, spec.num_stages),
        peak_bytes=timeline.peak_bytes,
        serial_seconds=timeline.serial_seconds,
        timeline=timeline,
        played=(lowered, costs),
    )


def replicated_step(
    step: PipelineStep,
    bucket_bytes: Sequence[Sequence[float]],
    network: Network,
    num_replicas: int,
    left: Sequence[Sequence[float]] | None = None,
) -> PipelineStep:
    """Returns the step of several pipelines side by side.

    The replicas of a stage sum its gradients in a ring of their own, bucket by bucket, as soon as
    its last weight gradient is there, or earlier as `left` says; the other stages compute
    meanwhile. Nothing waits for a reduction before the end of the step, so all else happens when it
    does in one pipeline alone.
    """
    if num_replicas == 1:
        return replace(step, reductions=())
    counts = [len(own) for own in bucket_bytes]
    found = []
    last = [0.0] * len(counts)
    if left is not None and step.timeline is not None:
        last = _last_backward_seconds(step.timeline, len(counts))
    for rank in range(step.num_ranks):
        order = reductions(step.placement, counts, rank)
        started = [
            (
                action,
                step.gradients_ready[action.stage]
                - (last[action.stage] * left[action.stage][action.bucket] if left else 0.0),
            )
            for action in order
        ]
        seconds = {
            action: network.allreduce_seconds(
                bucket_bytes[action.stage][action.bucket], num_replicas
            )
            for action in order
        }
        found.append(reduction_events(rank, started, seconds))
    events = tuple(found)
    timeline = None if step.timeline is None else replace(step.timeline, reductions=events)
    return replace(step, reductions=events, timeline=timeline)


def _last_backward_seconds(timeline: StepTimeline, num_stages: int) -> list[float]:
    """Returns how long the last computation of each stage's weight gradients takes."""
    found = [0.0] * num_stages
    for own in timeline.events:
        for event in own:
            if isinstance(event.action, Compute) and event.action.kind in ("W", "BW"):
                found[event.action.stage] = event.end - event.start
    return found


def _gradients_ready(timeline: StepTimeline, num_stages: int) -> tuple[float, ...]:
    """Returns when each stage is done with its backward passes and what they send."""
    ready = [0.0] * num_stages
    for own in timeline.events:
        for event in own:
            if isinstance(event.action, Compute):
                ready[event.action.stage] = event.end
            elif isinstance(event.action, Transfer) and event.action.operation == "S":
                ready[event.action.source] = event.end
    return tuple(ready)


def _calculated(spec: ScheduleSpec, costs: Costs, num_micro_batches: int) -> PipelineStep:
    """Calculates a step as if every rank took as long as the slowest.

    Messages are counted once there and once back, as if they were hidden but for that.
    """
    stages, ranks, m = spec.num_stages, spec.num_ranks, num_micro_batches
    try:
        bubble = float(bubble_fraction(spec.name, ranks, m, stages // ranks))
        in_flight = in_flight_bounds(spec.name, stages, m)
    except ScheduleError as error:
        raise ScheduleError(
            f"A step of {spec.name} on {ranks} ranks, with {stages} stages and {m} micro-batches, "
            "is too large to be played, and there are no closed forms for it. Take gpipe, 1f1b or "
            "zb-h1 with a rank for each stage."
        ) from error
    busy, peak = [0.0] * ranks, [0.0] * ranks
    for stage, rank in enumerate(spec.placement):
        cost = costs.stages[stage]
        busy[rank] += m * (cost.seconds("F") + cost.seconds("BW"))
        peak[rank] += cost.static_bytes + in_flight[stage] * cost.activation_bytes
    messages = [costs.link(*pair) for s in range(stages - 1) for pair in ((s, s + 1), (s + 1, s))]
    fill = sum(link.seconds + link.latency for link in messages)
    seconds = max(busy) / (1.0 - bubble) + fill
    return PipelineStep(
        schedule=spec.name,
        placement=spec.placement,
        pipeline_seconds=seconds,
        busy_seconds=tuple(busy),
        gradients_ready=(seconds,) * stages,
        peak_bytes=tuple(peak),
        serial_seconds=costs.serial_seconds(m),
        timeline=None,
    )
