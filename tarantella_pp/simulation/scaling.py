"""The step of one pipeline and of many side by side, from two ranks to thousands."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from tarantella_pp.errors import ScheduleError
from tarantella_pp.schedule.actions import Compute, Link
from tarantella_pp.schedule.formulas import bubble_fraction, in_flight_bounds
from tarantella_pp.schedule.lowering import lower
from tarantella_pp.schedule.spec import SEARCHED, ScheduleSpec
from tarantella_pp.simulation.costs import Costs
from tarantella_pp.simulation.schedule_search import search_schedule
from tarantella_pp.simulation.simulator import simulate
from tarantella_pp.simulation.step_timeline import StepTimeline, idle_fraction

MOST_PLAYED = 20_000
"""Stages x micro-batches up to which a step is played event by event, in about a second."""
MOST_SEARCHED = 1_000
"""The same for `zb-auto`, which plays many schedules."""


@dataclass(frozen=True)
class PipelineStep:
    """One step of one pipeline, gradients not yet summed over replicas.

    Attributes:
        schedule: Name of the schedule.
        placement: Rank of each stage.
        step_seconds: Seconds until the last rank is done.
        busy_seconds: Seconds that each rank computes.
        gradients_ready: Second at which each stage has its last weight gradient.
        peak_bytes: Peak memory of each rank.
        serial_seconds: Seconds of the same step in one process.
        timeline: The step as it was played; `None` where it is from closed forms.
    """

    schedule: str
    placement: tuple[int, ...]
    step_seconds: float
    busy_seconds: tuple[float, ...]
    gradients_ready: tuple[float, ...]
    peak_bytes: tuple[float, ...]
    serial_seconds: float
    timeline: StepTimeline | None

    @property
    def num_ranks(self) -> int:
        """Number of ranks."""
        return len(self.busy_seconds)

    @property
    def bubble_fraction(self) -> float:
        """The part of all ranks' time in which they do not compute."""
        return idle_fraction(self.busy_seconds, self.step_seconds)


@dataclass(frozen=True)
class Network:
    """What sums gradients over replicas.

    Attributes:
        bandwidth: Bytes per second that a rank sends, and receives at the same time.
        latency: Seconds of each message more.
    """

    bandwidth: float
    latency: float = 0.0

    def allreduce_seconds(self, size: float, num_replicas: int) -> float:
        """Returns the seconds of a ring all-reduce.

        Each of R replicas sends 2 (R - 1) messages of a share of 1 / R. Patarasuk and Yuan,
        "Bandwidth optimal all-reduce algorithms for clusters of workstations", JPDC 69 (2009).

        Args:
            size: Bytes that each replica has.
            num_replicas: Number of replicas, R.
        """
        if num_replicas == 1 or not size:
            return 0.0
        messages = 2 * (num_replicas - 1)
        return messages * (size / num_replicas / self.bandwidth + self.latency)


def pipeline_step(
    spec: ScheduleSpec,
    costs: Costs,
    num_micro_batches: int,
    *,
    links: Iterable[Link] | None = None,
    gradient_links: Iterable[Link] | None = None,
    in_flight_limit: Sequence[int] | None = None,
) -> PipelineStep:
    """Plays one step of a pipeline; a very large one is calculated from closed forms.

    Args:
        spec: The schedule; `zb-auto` is searched for with these costs.
        costs: Seconds and bytes of stages and messages.
        num_micro_batches: Number of micro-batches.
        links: Pairs of stages that exchange activations. Default: each stage and the next.
        gradient_links: The links over which gradients flow back. Default: all.
        in_flight_limit: For `zb-auto`: the most micro-batches that each stage may hold.

    Returns:
        The step.

    Raises:
        ScheduleError: An option cannot work, or the pipeline is too large to be played and its
            schedule has no closed forms.
    """
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
    timeline = simulate(lower(schedule, links, gradient_links), costs)
    return PipelineStep(
        schedule=spec.name,
        placement=schedule.placement,
        step_seconds=timeline.step_seconds,
        busy_seconds=timeline.busy_seconds,
        gradients_ready=_gradients_ready(timeline, spec.num_stages),
        peak_bytes=timeline.peak_bytes,
        serial_seconds=timeline.serial_seconds,
        timeline=timeline,
    )


def replicated_seconds(
    step: PipelineStep, gradient_bytes: Sequence[float], network: Network, num_replicas: int
) -> float:
    """Returns the seconds of a step of several pipelines side by side.

    The replicas of a stage sum its gradients in a ring of their own, as soon as its last weight
    gradient is there; the other stages compute meanwhile. A rank of several stages does one sum
    after the other.

    Args:
        step: The step of one pipeline.
        gradient_bytes: Bytes of gradients of each stage.
        network: The network between replicas.
        num_replicas: Number of replicas.
    """
    free = [0.0] * step.num_ranks
    order = sorted(range(len(step.placement)), key=lambda stage: step.gradients_ready[stage])
    for stage in order:
        rank = step.placement[stage]
        begin = max(free[rank], step.gradients_ready[stage])
        free[rank] = begin + network.allreduce_seconds(gradient_bytes[stage], num_replicas)
    return max(step.step_seconds, *free)


def _gradients_ready(timeline: StepTimeline, num_stages: int) -> tuple[float, ...]:
    """Returns when each stage is done with its backward passes."""
    ready = [0.0] * num_stages
    for own in timeline.events:
        for event in own:
            if isinstance(event.action, Compute):
                ready[event.action.stage] = event.end
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
        step_seconds=seconds,
        busy_seconds=tuple(busy),
        gradients_ready=(seconds,) * stages,
        peak_bytes=tuple(peak),
        serial_seconds=costs.serial_seconds(m),
        timeline=None,
    )
