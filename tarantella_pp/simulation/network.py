"""Where the ranks of replicas are, and how fast messages and sums of gradients are there."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from tarantella_pp.errors import ScheduleError
from tarantella_pp.schedule.actions import Link


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

    def network(
        self,
        num_ranks: int,
        num_replicas: int,
        rank_of: Callable[[int, int], int],
        latency: float = 0.0,
    ) -> Network:
        """Returns where replicas are, by the rank in the job of each position in a replica."""
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
        card, inside = self.card or math.inf, self.inside or math.inf
        return Network(hosts, card, inside, latency, num_replicas, first.count(hosts[0]))


@dataclass(frozen=True)
class Network:
    """The ranks of replicas on their hosts."""

    hosts: tuple[int, ...]  # host of each rank of the first replica
    card: float  # bytes per second of a host's card in each direction
    inside: float  # bytes per second between two ranks of a host, each way
    latency: float = 0.0  # seconds of each message more
    num_replicas: int = 1
    peers_inside: int = 1  # replicas whose ranks with the same stages share a host

    def link_speeds(self, ranks: Mapping[Link, tuple[int, int]]) -> dict[Link, float]:
        """Returns the bytes per second of links between stages that are on these ranks."""
        leaving = {s: self.hosts[s] for s, t in ranks.values() if self.hosts[s] != self.hosts[t]}
        senders = Counter(leaving.values())
        return {
            link: self.card / (self.peers_inside * senders[self.hosts[source]])
            if self.hosts[source] != self.hosts[target]
            else self.inside
            for link, (source, target) in ranks.items()
        }

    def allreduce_seconds(self, size: float) -> float:
        """Returns the seconds of a ring all-reduce; a hierarchical one where replicas share hosts.

        Each of R replicas sends 2 (R - 1) messages of a share of 1 / R. Patarasuk and Yuan,
        "Bandwidth optimal all-reduce algorithms for clusters of workstations", JPDC 69 (2009).
        If k of them share a host, they first add up inside, so that each has the sum of a share of
        1 / k; these k shares go round the hosts in k rings at once, and inside again at the end.
        All ranks of a host share its card.
        """
        if self.num_replicas == 1 or not size:
            return 0.0
        hosts = -(-self.num_replicas // self.peers_inside)
        card = self.card / max(Counter(self.hosts).values())
        return sum(
            2 * (count - 1) * (size / count / speed + self.latency)
            for count, speed in ((self.peers_inside, self.inside), (hosts, card))
        )
