"""The ranks of a job as replicas of a pipeline: who sends activations, who adds up gradients.

With two replicas of three ranks each, and the ranks of a pipeline side by side::

                    position 0   position 1   position 2
    replica 0         rank 0       rank 1       rank 2      a pipeline: activations, tied weights
    replica 1         rank 3       rank 4       rank 5
                      peers: the same weights, gradients are added up
"""

from __future__ import annotations

from dataclasses import dataclass

from tarantella_pp.partition.plan.plan_config import rank_in_job
from tarantella_pp.runtime.comm.communicator import Communicator


@dataclass(frozen=True)
class ProcessGroups:
    """The groups that a rank belongs to.

    Attributes:
        world: All ranks of the job.
        pipeline: The ranks of its pipeline.
        peers: The ranks with the same stages, one of each replica.
        world_ranks: For each replica, the ranks of its pipeline in the job.
    """

    world: Communicator
    pipeline: Communicator
    peers: Communicator
    world_ranks: tuple[tuple[int, ...], ...]

    @classmethod
    def of(
        cls, world: Communicator, num_replicas: int, placement: str = "pipelines-together"
    ) -> ProcessGroups:
        """Makes the groups; all ranks of the job must call it."""
        size = world.size // num_replicas
        world_ranks = tuple(
            tuple(rank_in_job(r, p, num_replicas, size, placement) for p in range(size))
            for r in range(num_replicas)
        )
        if num_replicas == 1:
            return cls(world, world, Communicator(), world_ranks)
        places = {rank: (r, p) for r, row in enumerate(world_ranks) for p, rank in enumerate(row)}
        replica, position = places[world.rank]
        return cls(world, world.split(replica), world.split(position), world_ranks)

    @property
    def num_replicas(self) -> int:
        """Number of pipelines."""
        return self.peers.size

    @property
    def replica(self) -> int:
        """The pipeline that this rank belongs to."""
        return self.peers.rank
