"""Which ranks of replicas share a host, counted by hand and by going through all ranks."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tarantella_pp.errors import ScheduleError
from tarantella_pp.simulation.nodes import Nodes


def together(num_ranks):
    return lambda replica, rank: replica * num_ranks + rank


def apart(num_replicas):
    return lambda replica, rank: rank * num_replicas + replica


def test_a_host_with_several_pipelines() -> None:
    layout = Nodes(4, 1.0, 1.0).layout(2, 6, together(2))
    assert layout.cards == (0, 0)
    assert layout.peers_inside == 2
    assert not layout.crosses(0, 1)
    assert not layout.senders([(0, 1), (1, 0)])


def test_a_pipeline_over_several_hosts() -> None:
    layout = Nodes(2, 1.0, 1.0).layout(6, 5, together(6))
    assert layout.cards == (0, 0, 1, 1, 2, 2)
    assert layout.peers_inside == 1
    chain = [(a, b) for s in range(5) for a, b in ((s, s + 1), (s + 1, s))]
    # The host in the middle sends activations on and gradients back.
    assert layout.senders(chain) == {0: 1, 1: 2, 2: 1}


def test_replicas_side_by_side_send_at_once() -> None:
    layout = Nodes(4, 1.0, 1.0).layout(2, 4, apart(4))
    assert layout.cards == (0, 1)
    assert layout.peers_inside == 4
    assert layout.senders([(0, 1)]) == {0: 4}
    assert Nodes(8, 1.0, 1.0).layout(2, 4, apart(4)).cards == (0, 0)


@given(st.integers(1, 6), st.integers(1, 6), st.integers(1, 8), st.booleans())
def test_all_replicas_lie_alike_or_are_refused(ranks, replicas, per_node, side_by_side) -> None:
    rank_of = apart(replicas) if side_by_side else together(ranks)
    nodes, inner = Nodes(per_node, 1.0, 1.0), replicas if side_by_side and ranks > 1 else ranks
    if replicas > 1 and inner % per_node and per_node % inner:
        with pytest.raises(ScheduleError, match=f"ranks_per_node={per_node}"):
            nodes.layout(ranks, replicas, rank_of)
        return
    layout = nodes.layout(ranks, replicas, rank_of)
    for replica in range(replicas):
        hosts = [rank_of(replica, rank) // per_node for rank in range(ranks)]
        for one in range(ranks):
            for other in range(ranks):
                assert (hosts[one] != hosts[other]) == layout.crosses(one, other)
    for rank in range(ranks):
        homes = Counter(rank_of(replica, rank) // per_node for replica in range(replicas))
        assert max(homes.values()) == layout.peers_inside


def test_what_is_refused() -> None:
    with pytest.raises(ScheduleError, match="ranks_per_node=4"):
        Nodes(4, 1.0, 1.0).layout(3, 2, together(3))
    assert Nodes(4, 1.0, 1.0).layout(6, 1, together(6)).cards == (0, 0, 0, 0, 1, 1)
