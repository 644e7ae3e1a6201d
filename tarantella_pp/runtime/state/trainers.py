"""Which rank of the job trains each weight, and has its optimizer state."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import numpy as np

from tarantella_pp.runtime.comm.communicator import Communicator
from tarantella_pp.runtime.replicas.process_groups import ProcessGroups
from tarantella_pp.runtime.replicas.sharding import shard_owners
from tarantella_pp.runtime.state.owners import Owners


class Trainers:
    """The ranks that update weights, in the group that shares out an optimizer.

    Usually every replica updates all weights of its pipeline, and the group is the pipeline. With
    a sharded optimizer (ZeRO-1) each weight is updated by one replica, and the group is the job.

    Args:
        owners: The ranks of the weights in a pipeline.
        weights: The variables of the model, in its order; frozen ones too, so that what is frozen
            later changes nothing.
        groups: The ranks of the job.
        sharded: Whether replicas share out the optimizer.
    """

    def __init__(
        self, owners: Owners, weights: Sequence[Any], groups: ProcessGroups, sharded: bool
    ) -> None:
        self.ranks: Communicator = groups.world if sharded else groups.pipeline
        self._owners = owners
        self._sharded = sharded
        self._groups = groups
        self._replicas: dict[int, int] = {}
        of_position = defaultdict(list)
        for weight in weights if sharded else ():
            of_position[owners.owner(weight)].append(weight)
        for own in of_position.values():
            sizes = [int(np.prod(weight.shape)) for weight in own]
            for weight, replica in zip(own, shard_owners(sizes, groups.num_replicas), strict=True):
                self._replicas[id(weight)] = replica

    def replica(self, weight: Any) -> int:
        """The replica that updates a weight, if they share out the optimizer."""
        return self._replicas.get(id(weight), 0)

    def owner(self, weight: Any) -> int:
        """The rank in `ranks` that updates a weight."""
        position = self._owners.owner(weight)
        if not self._sharded:
            return position
        return self._groups.world_ranks[self.replica(weight)][position]

    def is_own(self, weight: Any) -> bool:
        """Whether this rank updates a weight."""
        return self.owner(weight) == self.ranks.rank
