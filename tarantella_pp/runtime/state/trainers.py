"""Which rank of the job trains each weight, and has its optimizer state."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from tarantella_pp.partition.costs.optimizer_shards import weight_replicas
from tarantella_pp.runtime.comm.communicator import Communicator
from tarantella_pp.runtime.replicas.process_groups import ProcessGroups
from tarantella_pp.runtime.state.owners import Owners


class Trainers:
    """The ranks that update weights, in the group that shares out an optimizer.

    Usually every replica updates all weights of its pipeline, and the group is the pipeline. With
    a sharded optimizer (ZeRO-1) each weight is updated by one replica, and the group is the job.
    """

    def __init__(
        self, owners: Owners, weights: Sequence[Any], groups: ProcessGroups, sharded: bool
    ) -> None:
        self.ranks: Communicator = groups.world if sharded else groups.pipeline
        self._owners = owners
        self._sharded = sharded
        self._groups = groups
        self._replicas: dict[int, int] = {}
        if sharded:
            sizes = [math.prod(weight.shape) for weight in weights]
            positions = [owners.owner(weight) for weight in weights]
            replicas = weight_replicas(sizes, positions, groups.num_replicas)
            self._replicas = {id(w): r for w, r in zip(weights, replicas, strict=True)}

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

    @property
    def speaks(self) -> bool:
        """Whether this rank has what it trains alone, or is of the replica that speaks for all."""
        return self._sharded or self._groups.replica == 0
