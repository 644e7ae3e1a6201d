"""Hosts with several ranks: fast inside, with one network card for all of them to the others."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from tarantella_pp.errors import ScheduleError


@dataclass(frozen=True)
class Nodes:
    """Hosts of a cluster, all alike.

    Ranks of a host that send to other hosts at all have an equal part of its card each, whether the
    others send at the time or not. So a step can be played without an order between ranks.

    Attributes:
        ranks_per_node: Ranks of each host; rank i is on host `i // ranks_per_node`.
        card: Bytes per second of a host's network card in each direction, which its ranks share;
            `None` where messages take no time.
        inside: Bytes per second between two ranks of a host, each way; `None` likewise.
    """

    ranks_per_node: int
    card: float | None
    inside: float | None

    def layout(
        self, num_ranks: int, num_replicas: int, rank_of: Callable[[int, int], int]
    ) -> NodeLayout:
        """Returns which ranks of replicas share a host."""
        inner = num_ranks
        if num_ranks > 1 and num_replicas > 1 and rank_of(0, 1) != 1:
            inner = num_replicas  # the ranks of a stage are side by side
        if num_replicas > 1 and inner % self.ranks_per_node and self.ranks_per_node % inner:
            raise ScheduleError(
                f"Expected a divisor or a multiple of the {inner} ranks that lie side by side, so "
                "that all replicas lie on their hosts alike. "
                f"Received: ranks_per_node={self.ranks_per_node}"
            )
        cards = tuple(rank_of(0, rank) // self.ranks_per_node for rank in range(num_ranks))
        alike = min(num_replicas, self.ranks_per_node)  # more cannot be on one host
        homes = Counter(rank_of(replica, 0) // self.ranks_per_node for replica in range(alike))
        return NodeLayout(cards, homes[cards[0]])


@dataclass(frozen=True)
class NodeLayout:
    """Where the ranks of replicas are.

    Attributes:
        cards: The host of each rank of a replica.
        peers_inside: The replicas whose ranks with the same stages are on one host.
    """

    cards: tuple[int, ...]
    peers_inside: int

    def crosses(self, source: int, target: int) -> bool:
        """Returns whether a message between two ranks of a replica leaves its host."""
        return self.cards[source] != self.cards[target]

    def senders(self, pairs: Iterable[tuple[int, int]]) -> Counter[int]:
        """Returns how many ranks of each host of a replica send messages to other hosts."""
        own = {source for source, target in pairs if self.crosses(source, target)}
        found = Counter(self.cards[source] for source in own)
        return Counter({card: self.peers_inside * n for card, n in found.items()})
