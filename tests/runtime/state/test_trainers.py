"""Which rank updates a weight: one of each pipeline, or with a sharded optimizer one of all."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from tarantella_pp.runtime.comm.communicator import Communicator
from tarantella_pp.runtime.replicas.process_groups import ProcessGroups
from tarantella_pp.runtime.state.trainers import Trainers

pytestmark = pytest.mark.keras

WEIGHTS = [SimpleNamespace(shape=(size,)) for size in (8, 4, 4, 2, 1)]


class Owners:
    """The first three weights are on the first rank of a pipeline, the others on the second."""

    def owner(self, weight):
        return next(i for i, w in enumerate(WEIGHTS) if w is weight) // 3


def trainers(rank, sharded):
    world, pipeline, peers = Communicator(), Communicator(), Communicator()
    world.rank, world.size = rank, 4
    pipeline.rank, pipeline.size = rank % 2, 2
    peers.rank, peers.size = rank // 2, 2
    groups = ProcessGroups(world, pipeline, peers, ((0, 1), (2, 3)))
    return Trainers(Owners(), WEIGHTS, groups, sharded)


def test_each_pipeline_updates_all_weights():
    for rank in range(4):
        own = [trainers(rank, False).is_own(weight) for weight in WEIGHTS]
        assert own == ([True] * 3 + [False] * 2 if rank % 2 == 0 else [False] * 3 + [True] * 2)


def test_replicas_share_out_the_weights_of_a_stage():
    owners = [[trainers(rank, True).owner(weight) for weight in WEIGHTS] for rank in range(4)]
    assert owners == [[0, 2, 2, 1, 3]] * 4
    found = [sum(trainers(rank, True).is_own(w) for rank in range(4)) for w in WEIGHTS]
    assert found == [1] * len(WEIGHTS)
    assert [trainers(0, True).replica(weight) for weight in WEIGHTS] == [0, 1, 1, 0, 1]


@pytest.mark.parametrize("sharded", [False, True])
def test_the_group_is_that_in_which_each_weight_has_one_owner(sharded):
    assert trainers(3, sharded).ranks.size == (4 if sharded else 2)
