"""The ranks of a job as replicas of a pipeline: who sends activations, who adds up gradients.

With two replicas of three ranks each, and the ranks of a pipeline side by side::

                    position 0   position 1   position 2
    replica 0         rank 0       rank 1       rank 2      a pipeline: activations, tied weights
    replica 1         rank 3       rank 4       rank 5
                      peers: the same weights, gradients are added up
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import tensorflow as tf

from tarantella_pp.errors import ConfigurationError
from tarantella_pp.runtime.comm.collective import on_all_ranks
from tarantella_pp.runtime.comm.communicator import Communicator
from tarantella_pp.runtime.comm.tensor_buffers import to_buffer, to_tensor, value_of


@dataclass(frozen=True)
class ProcessGroups:
    """The groups that a rank belongs to."""

    world: Communicator
    pipeline: Communicator  # the ranks of its pipeline
    peers: Communicator  # the ranks with the same stages, one of each replica
    # For each replica, the ranks of its pipeline in the job
    world_ranks: tuple[tuple[int, ...], ...]

    @classmethod
    def of(
        cls, world: Communicator, num_replicas: int, placement: str = "pipelines-together"
    ) -> ProcessGroups:
        """Makes the groups; all ranks of the job must call it."""
        together = placement == "pipelines-together"
        ranks = np.arange(world.size).reshape((num_replicas, -1), order="C" if together else "F")
        world_ranks = tuple(tuple(row) for row in ranks.tolist())
        if num_replicas == 1:
            return cls(world, world, Communicator(), world_ranks)
        replica, position = np.argwhere(ranks == world.rank)[0].tolist()
        return cls(world, world.split(replica), world.split(position), world_ranks)

    @property
    def num_replicas(self) -> int:
        """Number of pipelines."""
        return self.peers.size

    @property
    def replica(self) -> int:
        """The pipeline that this rank belongs to."""
        return self.peers.rank


class ReplicaExchange:
    """Adds up and puts together what replicas have computed of their shares of a batch.

    All of it comes out with the same bits on every replica. With one replica nothing changes.
    """

    def __init__(self, peers: Communicator) -> None:
        self.peers = peers

    def added_up(self, scalars: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """The sum over the replicas of each number."""
        if self.peers.size == 1 or not scalars:
            return list(scalars)
        values = np.array([float(scalar) for scalar in scalars], np.float64)
        self.peers.allreduce(values)
        return [tf.constant(v, s.dtype) for v, s in zip(values, scalars, strict=True)]

    def joined(self, tensors: Sequence[tf.Tensor], rows: Sequence[int]) -> list[tf.Tensor]:
        """Puts the samples of all replicas together."""
        if self.peers.size == 1:
            return list(tensors)
        own, gathered = rows[self.peers.rank], []
        for tensor in tensors:
            per_sample = tensor.shape[0] // max(own, 1)
            array = to_buffer(tensor)[: own * per_sample]  # without samples it has one to run
            counts = [count * per_sample for count in rows]
            gathered.append(
                self.peers.start_allgather([array], counts, label="samples of replicas")
            )
        return [to_tensor(request.wait()[0]) for request in gathered]

    def values_of_all(self, variables: Sequence[Any]) -> list[np.ndarray[Any, Any]]:
        """The value of each variable on every replica; all values travel at once."""
        label = "state of forward passes"
        requests = [self.peers.start_allgather([value_of(v)[None]], label=label) for v in variables]
        return [request.wait()[0] for request in requests]

    def begin_metrics(self, variables: Sequence[Any]) -> None:
        """Has the metrics of all replicas but the first count from zero; see `merge_metrics`."""
        if self.peers.rank > 0:
            for variable in variables:
                variable.assign(tf.zeros_like(variable.value))

    def merge_metrics(self, variables: Sequence[Any]) -> None:
        """Gives every replica the sum of the states of metrics that add up."""
        if self.peers.size == 1:
            return
        states = [np.atleast_1d(variable.numpy()) for variable in variables]
        # Each has its tag: a sum in several rounds must not take another one's messages.
        start = self.peers.start_allreduce
        sums = [start(state, tag=tag, label="metrics") for tag, state in enumerate(states)]
        for variable, request in zip(variables, sums, strict=True):
            variable.assign(request.wait().reshape(tuple(variable.shape)))


def refuse_unlike(groups: ProcessGroups, mine: Sequence[tuple[Callable[[], str], float]]) -> None:
    """Refuses constants, by where they are, that replicas do not have alike; all must call it."""

    def compare() -> None:
        first, *others = groups.peers.allgather_json([number for _, number in mine])
        for rank, theirs in zip(groups.peers.world_ranks[1:], others, strict=True):
            for (where, _), one, other in zip(mine, first, theirs, strict=False):
                if abs(one - other) > 1e-5 * abs(one):  # `sin` may round otherwise on other CPUs
                    raise ConfigurationError(
                        f"{where()} has other constants or operations on rank {rank} than on rank "
                        f"{groups.peers.world_ranks[0]}, so replicas would train different "
                        "functions. Call keras.utils.set_random_seed(seed) before you make the "
                        "model, or keep them in a weight with trainable=False."
                    )

    if groups.num_replicas > 1:
        on_all_ranks(groups.pipeline, "train what other replicas train", compare)
