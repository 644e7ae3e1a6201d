"""The step of one pipeline and of many side by side, from two ranks to thousands."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from tarantella_pp.errors import ScheduleError
from tarantella_pp.schedule.actions import Compute, Link
from tarantella_pp.schedule.formulas import bubble_fraction, in_flight_bounds
from tarantella_pp.schedule.lowering import lower
from tarantella_pp.schedule.registry import make_placement, make_schedule
from tarantella_pp.schedule.schedule import Schedule
from tarantella_pp.schedule.spec import SEARCHED
from tarantella_pp.simulation.costs import Costs
from tarantella_pp.simulation.schedule_search import search_schedule
from tarantella_pp.simulation.simulator import simulate
from tarantella_pp.simulation.timeline import Timeline

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
    timeline: Timeline | None

    @property
    def num_ranks(self) -> int:
        """Number of ranks."""
        return len(self.busy_seconds)

    @property
    def bubble_fraction(self) -> float:
        """The part of all ranks' time in which they do not compute."""
        return 1.0 - sum(self.busy_seconds) / (self.num_ranks * (self.step_seconds or 1.0))


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
    name: str,
    costs: Costs,
    num_micro_batches: int,
    num_ranks: int | None = None,
    *,
    custom: Schedule | None = None,
    links: Iterable[Link] | None = None,
    gradient_links: Iterable[Link] | None = None,
) -> PipelineStep:
    """Plays one step of a pipeline; a very large one is calculated from closed forms.

    Args:
        name: The schedule, as of `make_schedule`, or `zb-auto`.
        costs: Seconds and bytes of stages and messages.
        num_micro_batches: Number of micro-batches.
        num_ranks: Number of ranks, a divisor of the number of stages. Default: as of
            `make_schedule`.
        custom: The schedule itself, where it is none of the named ones.
        links: Pairs of stages that exchange activations. Default: each stage and the next.
        gradient_links: The links over which gradients flow back. Default: all.

    Returns:
        The step.

    Raises:
        ScheduleError: An option cannot work, or the pipeline is too large to be played and its
            schedule has no closed forms.
    """
    most = MOST_SEARCHED if name == SEARCHED else MOST_PLAYED
    num_stages = len(costs.stages)
    if num_stages * num_micro_batches > most and custom is None:
        return _calculated(name, costs, num_micro_batches, num_ranks)
    if custom is not None:
        schedule = custom
    elif name == SEARCHED:
        schedule = search_schedule(num_stages, num_micro_batches, num_ranks, costs=costs)
    else:
        schedule = make_schedule(name, num_stages, num_micro_batches, num_ranks)
    timeline = simulate(lower(schedule, links, gradient_links), costs)
    return PipelineStep(
        schedule=name,
        placement=schedule.placement,
        step_seconds=timeline.step_seconds,
        busy_seconds=timeline.busy_seconds,
        gradients_ready=_gradients_ready(timeline, num_stages),
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


def _gradients_ready(timeline: Timeline, num_stages: int) -> tuple[float, ...]:
    """Returns when each stage is done with its backward passes."""
    ready = [0.0] * num_stages
    for own in timeline.events:
        for event in own:
            if isinstance(event.action, Compute):
                ready[event.action.stage] = event.end
    return tuple(ready)


def _calculated(
    name: str, costs: Costs, num_micro_batches: int, num_ranks: int | None
) -> PipelineStep:
    """Calculates a step as if every rank took as long as the slowest.

    Messages are counted once there and once back, as if they were hidden but for that.
    """
    stages, m = len(costs.stages), num_micro_batches
    placement = make_placement(stages, num_ranks, None, v_shaped=name == "zb-v")
    ranks = 1 + max(placement)
    try:
        bubble = float(bubble_fraction(name, ranks, m, stages // ranks))
        in_flight = in_flight_bounds(name, stages, m)
    except ScheduleError as error:
        raise ScheduleError(
            f"A step of {name} on {ranks} ranks, with {stages} stages and {m} micro-batches, is "
            "too large to be played, and there are no closed forms for it. Take gpipe, 1f1b or "
            "zb-h1 with a rank for each stage."
        ) from error
    busy, peak = [0.0] * ranks, [0.0] * ranks
    for stage, rank in enumerate(placement):
        cost = costs.stages[stage]
        busy[rank] += m * (cost.seconds("F") + cost.seconds("BW"))
        peak[rank] += cost.static_bytes + in_flight[stage] * cost.activation_bytes
    messages = [costs.link(*pair) for s in range(stages - 1) for pair in ((s, s + 1), (s + 1, s))]
    fill = sum(link.seconds + link.latency for link in messages)
    seconds = max(busy) / (1.0 - bubble) + fill
    serial = costs.serial_seconds(m)
    ready = (seconds,) * stages
    return PipelineStep(name, placement, seconds, tuple(busy), ready, tuple(peak), serial, None)
