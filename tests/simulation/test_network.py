"""Hosts that share cards, and sums of gradients over replicas."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tarantella_pp.errors import ScheduleError
from tarantella_pp.simulation.network import Network, Nodes


@pytest.mark.parametrize(
    ("replicas", "inside", "seconds"),
    [
        (1, 1, 0.0),
        (4, 1, 6 * (1.0 + 0.5)),  # six messages of a quarter
        # Inside two messages of a half; then, of four replicas on two hosts, both halves go round.
        (2, 2, 2 * (0.2 + 0.5)),
        (4, 2, 2 * (0.2 + 0.5) + 2 * (2.0 + 0.5)),
        (16, 2, 2 * (0.2 + 0.5) + 14 * (0.5 + 0.5)),
    ],
)
def test_allreduce_in_rings(replicas, inside, seconds) -> None:
    network = Network((0,), 100.0, 1000.0, 0.5, replicas, inside)
    assert network.allreduce_seconds(400.0) == seconds
    assert network.allreduce_seconds(0.0) == 0


def together(num_ranks):
    return lambda replica, rank: replica * num_ranks + rank


def apart(num_replicas):
    return lambda replica, rank: rank * num_replicas + replica


def test_ranks_of_a_host_share_its_card() -> None:
    layout = Nodes(2, 12.0, 100.0).network(6, 5, together(6), 0.5)
    assert layout == Network((0, 0, 1, 1, 2, 2), 12.0, 100.0, 0.5, 5, 1)
    speeds = layout.link_speeds(
        {(a, b): (a, b) for a in range(6) for b in (a - 1, a + 1) if 0 <= b < 6}
    )
    assert speeds[0, 1] == speeds[3, 2] == 100
    # The host in the middle sends activations on and gradients back.
    assert (speeds[1, 2], speeds[2, 1], speeds[3, 4], speeds[4, 3]) == (12, 6, 6, 12)
    # Both ranks of a host sum their gradients over half of its card.
    assert layout.allreduce_seconds(60.0) == 8 * (2.0 + 0.5)


def test_replicas_side_by_side_send_at_once() -> None:
    layout = Nodes(4, 12.0, 100.0).network(2, 4, apart(4))
    assert (layout.hosts, layout.peers_inside) == ((0, 1), 4)
    assert layout.link_speeds({(0, 1): (0, 1)}) == {(0, 1): 3.0}
    assert Nodes(8, 12.0, 100.0).network(2, 4, apart(4)).hosts == (0, 0)
    assert Nodes(4, 12.0, 100.0).network(2, 6, together(2)).peers_inside == 2


@given(st.integers(1, 6), st.integers(1, 6), st.integers(1, 8), st.booleans())
def test_all_replicas_lie_alike_or_are_refused(ranks, replicas, per_node, side_by_side) -> None:
    rank_of = apart(replicas) if side_by_side else together(ranks)
    nodes, inner = Nodes(per_node, 1.0, 1.0), replicas if side_by_side and ranks > 1 else ranks
    if replicas > 1 and inner % per_node and per_node % inner:
        with pytest.raises(ScheduleError, match=f"ranks_per_node={per_node}"):
            nodes.network(ranks, replicas, rank_of)
        return
    layout = nodes.network(ranks, replicas, rank_of)
    for replica in range(replicas):
        hosts = [rank_of(replica, rank) // per_node for rank in range(ranks)]
        for one in range(ranks):
            for other in range(ranks):
                assert (hosts[one] == hosts[other]) == (layout.hosts[one] == layout.hosts[other])
    for rank in range(ranks):
        homes = Counter(rank_of(replica, rank) // per_node for replica in range(replicas))
        assert max(homes.values()) == layout.peers_inside
