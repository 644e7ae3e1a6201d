"""The step of one pipeline and of many side by side, from two ranks to thousands."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from tarantella_pp.errors import ScheduleError
from tarantella_pp.schedule.actions import Link
from tarantella_pp.schedule.lowering import lower
from tarantella_pp.schedule.spec import (
    MEMORY_FORMULAS,
    SEARCHED,
    ScheduleSpec,
    bubble_fraction,
    in_flight_bounds,
)
from tarantella_pp.simulation.schedule_search import search_schedule
from tarantella_pp.simulation.simulator import Costs, StepTimeline, simulate

# Stages x micro-batches up to which a step is played event by event, in about a second.
MOST_PLAYED = 20_000
# The same for `zb-auto`, which plays many schedules.
MOST_SEARCHED = 1_000


@dataclass(frozen=True)
class Network:
    """What sums gradients over replicas."""

    # Bytes per second that a rank sends, and receives at the same time; `None` where messages take
    # no time. Of ranks that share a host: all that add up the same
    bandwidth: float | None
    latency: float = 0.0  # seconds of each message more
    inside: float | None = None  # the same between two ranks of a host
    peers_inside: int = 1  # replicas whose ranks with the same stages share a host

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


@dataclass(frozen=True)
class Nodes:
    """Hosts of a cluster, all alike: fast inside, with one network card for all ranks of a host.

    Ranks of a host that send to other hosts at all have an equal part of its card each, whether the
    others send at the time or not. So a step can be played without an order between ranks.
    """

    ranks_per_node: int  # ranks of each host; rank i is on host `i // ranks_per_node`
    # Bytes per second of a host's card in each direction; `None` where messages take no time
    card: float | None
    inside: float | None  # bytes per second between two ranks of a host, each way; `None` likewise

    def layout(
        self, num_ranks: int, num_replicas: int, rank_of: Callable[[int, int], int]
    ) -> NodeLayout:
        """Returns which ranks of replicas share a host."""
        # What lies side by side in the job: the ranks of a pipeline, or the replicas of a stage.
        by_stage = num_ranks > 1 and num_replicas > 1 and rank_of(0, 1) != 1
        inner = num_replicas if by_stage else num_ranks
        if num_replicas > 1 and inner % self.ranks_per_node and self.ranks_per_node % inner:
            raise ScheduleError(
                f"Expected a divisor or a multiple of the {inner} ranks that lie side by side, so "
                "that all replicas lie on their hosts alike. "
                f"Received: ranks_per_node={self.ranks_per_node}"
            )
        hosts = tuple(rank_of(0, rank) // self.ranks_per_node for rank in range(num_ranks))
        alike = min(num_replicas, self.ranks_per_node)  # more cannot be on one host
        first = [rank_of(replica, 0) // self.ranks_per_node for replica in range(alike)]
        return NodeLayout(self, hosts, first.count(hosts[0]))


@dataclass(frozen=True)
class NodeLayout:
    """Where the ranks of replicas are."""

    nodes: Nodes
    hosts: tuple[int, ...]
    peers_inside: int  # the replicas whose ranks with the same stages are on one host

    def link_speeds(self, ranks: Mapping[Link, tuple[int, int]]) -> dict[Link, float]:
        """Returns the bytes per second of links between stages that are on these ranks."""
        leaving = {s: self.hosts[s] for s, t in ranks.values() if self.hosts[s] != self.hosts[t]}
        senders = Counter(leaving.values())
        card, inside = self.nodes.card or math.inf, self.nodes.inside or math.inf
        return {
            link: card / (self.peers_inside * senders[self.hosts[source]])
            if self.hosts[source] != self.hosts[target]
            else inside
            for link, (source, target) in ranks.items()
        }

    def network(self, latency: float) -> Network:
        """Returns what sums gradients: all ranks of a host share its card."""
        card = self.nodes.card and self.nodes.card / max(Counter(self.hosts).values())
        return Network(card, latency, self.nodes.inside, self.peers_inside)


def pipeline_step(
    spec: ScheduleSpec,
    costs: Costs,
    num_micro_batches: int,
    *,
    links: Iterable[Link] | None = None,
    gradient_links: Iterable[Link] | None = None,
    in_flight_limit: Sequence[int] | None = None,
) -> StepTimeline:
    """Plays one step of a pipeline; a very large one is calculated from closed forms."""
    searched = spec.name == SEARCHED and spec.custom is None
    # A search plays dozens of schedules.
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
    timeline = simulate(lower(schedule, links, gradient_links, blocking=False), costs)
    return replace(timeline, name=spec.name)


def replicated_step(
    step: StepTimeline,
    bucket_bytes: Sequence[Sequence[float]],
    network: Network,
    num_replicas: int,
) -> StepTimeline:
    """Returns the step of several pipelines side by side.

    The replicas of a stage sum its gradients in a ring of their own, bucket by bucket, as soon as
    its last weight gradient is there; the other stages compute meanwhile. Nothing waits for a
    reduction before the end of the step, so all else happens when it does in one pipeline alone.
    """
    if num_replicas == 1:
        return replace(step, reductions=())
    return step.with_reductions(
        [[network.allreduce_seconds(size, num_replicas) for size in own] for own in bucket_bytes]
    )


def _calculated(spec: ScheduleSpec, costs: Costs, num_micro_batches: int) -> StepTimeline:
    """Calculates a step as if every rank took as long as the slowest.

    Messages are counted once there and once back, as if they were hidden but for that.
    """
    stages, ranks, m = spec.num_stages, spec.num_ranks, num_micro_batches
    if spec.name not in MEMORY_FORMULAS or stages != ranks:
        raise ScheduleError(
            f"A step of {spec.name} on {ranks} ranks, with {stages} stages and {m} micro-batches, "
            "is too large to be played, and there are no closed forms for it. Take gpipe, 1f1b or "
            "zb-h1 with a rank for each stage."
        )
    bubble = float(bubble_fraction(spec.name, ranks, m))
    in_flight = in_flight_bounds(spec.name, stages, m)
    busy, peak = [0.0] * ranks, [0.0] * ranks
    for stage, rank in enumerate(spec.placement):
        cost = costs.stages[stage]
        busy[rank] += m * (cost.seconds("F") + cost.seconds("BW"))
        peak[rank] += cost.static_bytes + in_flight[stage] * cost.activation_bytes
    messages = [costs.link(*pair) for s in range(stages - 1) for pair in ((s, s + 1), (s + 1, s))]
    # Messages of the first micro-batch down and of the last gradient up have nothing to hide
    # behind.
    fill = sum(link.seconds + link.latency for link in messages)
    seconds = max(busy) / (1.0 - bubble) + fill
    return StepTimeline(
        name=spec.name,
        placement=spec.placement,
        pipeline_seconds=seconds,
        busy_seconds=tuple(busy),
        gradients_ready=(seconds,) * stages,
        peak_bytes=tuple(peak),
        serial_seconds=costs.serial_seconds(m),
    )
