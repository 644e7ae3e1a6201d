"""Which rank updates a weight: one of each pipeline, or with a sharded optimizer one of all."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
from msgspec.structs import replace

from tarantella_pp.runtime.comm.communicator import Communicator
from tarantella_pp.runtime.comm.process_groups import ProcessGroups
from tarantella_pp.runtime.weights.rank_weights import VariableTable
from tests.helpers.plans import chain_graph, costs_of

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


def test_each_pipeline_updates_all_weights():
    for rank in range(4):
        own = [table(rank, False).trains(weight) for weight in WEIGHTS]
        assert own == ([True] * 3 + [False] * 2 if rank % 2 == 0 else [False] * 3 + [True] * 2)


def test_replicas_share_out_the_weights_of_a_stage():
    trainers = [[row.trainer for row in table(rank, True).rows] for rank in range(4)]
    assert trainers == [[0, 2, 2, 1, 3, 0]] * 4
    found = [sum(table(rank, True).trains(w) for rank in range(4)) for w in WEIGHTS]
    assert found == [1] * len(WEIGHTS)
    rows = table(0, True).rows
    assert [row.replica for row in rows] == [0, 1, 1, 0, 1, 0]
    assert [row.variable for row in rows] == [*WEIGHTS, UNUSED]
    assert [row.ranks for row in rows] == [(0,), (0, 1), (0,), (1,), (1,), ()]
    assert [row.owner for row in rows] == [0, 0, 0, 1, 1, 0]
    assert [table(3, sharded).ranks.size for sharded in (False, True)] == [2, 4]


def test_plans_count_the_optimizer_state_of_the_fullest_replica():
    graph = graph_of([5, 3, 2, 1, 1, 4, 4, 1, 1])
    assignment, placement = (0, 0, 0, 1, 1, 2, 2, 3, 3), [0, 1, 0, 1]
    costs = costs_of(graph, 2, replicas=2, shard_optimizer=True)
    planned = [stage.optimizer_bytes for stage in costs.stages(assignment, [1] * 4)]
    extracted = SimpleNamespace(variables=graph.weights, graph=graph)
    plan = SimpleNamespace(shard_optimizer=True, assignment=assignment)
    rows = VariableTable.of(extracted, plan, placement, groups_of(0)).rows
    state = np.zeros((2, 2))  # of each rank and replica
    for row, slots in zip(rows, costs.slots, strict=True):
        state[row.owner, row.replica] += slots
    assert state.max(axis=1).tolist() == [planned[0] + planned[2], planned[1] + planned[3]]


def graph_of(sizes):
    """A chain of layers with weights of some sizes."""
    graph = chain_graph(len(sizes))
    weights = [
        replace(weight, shape=(size,), bytes=4 * size)
        for weight, size in zip(graph.weights, sizes, strict=True)
    ]
    return replace(graph, weights=tuple(weights))
