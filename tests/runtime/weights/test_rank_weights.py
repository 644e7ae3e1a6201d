"""Which rank updates a weight: one of each pipeline, or with a sharded optimizer one of all."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from tarantella_pp.runtime.comm.communicator import Communicator
from tarantella_pp.runtime.comm.process_groups import ProcessGroups
from tarantella_pp.runtime.weights.rank_weights import VariableTable

pytestmark = pytest.mark.keras

WEIGHTS = [SimpleNamespace(shape=(size,), trainable=True) for size in (8, 4, 4, 2, 1)]
UNUSED = SimpleNamespace(shape=(3,), trainable=False)
USERS = [(0,), (0, 1), (0,), (1,), (1,)]
"""The first three weights are of the first stage, the others of the second."""


def table(rank, sharded):
    graph = SimpleNamespace(users=lambda assignment: USERS)
    extracted = SimpleNamespace(variables=WEIGHTS, graph=graph)
    plan = SimpleNamespace(shard_optimizer=sharded, assignment=())
    return VariableTable.of(extracted, plan, [0, 1], groups_of(rank), [WEIGHTS[0], UNUSED])


def groups_of(rank):
    """Two pipelines of two ranks."""
    world, pipeline, peers = Communicator(), Communicator(), Communicator()
    world.rank, world.size = rank, 4
    pipeline.rank, pipeline.size = rank % 2, 2
    peers.rank, peers.size = rank // 2, 2
    return ProcessGroups(world, pipeline, peers, ((0, 1), (2, 3)))


def test_replicas_share_out_the_weights_of_a_stage():
    trainers = [[row.trainer for row in table(rank, True).rows] for rank in range(4)]
    assert trainers == [[0, 2, 2, 1, 3, 0]] * 4
    for sharded, times in ((True, 1), (False, 2)):  # on one rank, or on one of each pipeline
        found = [sum(table(rank, sharded).trains(w) for rank in range(4)) for w in WEIGHTS]
        assert found == [times] * len(WEIGHTS)
    rows = table(0, True).rows
    assert [row.replica for row in rows] == [0, 1, 1, 0, 1, 0]
    assert [row.variable for row in rows] == [*WEIGHTS, UNUSED]
    assert [row.ranks for row in rows] == [(0,), (0, 1), (0,), (1,), (1,), ()]
    assert [row.owner for row in rows] == [0, 0, 0, 1, 1, 0]
    assert [table(3, sharded).ranks.size for sharded in (False, True)] == [2, 4]
