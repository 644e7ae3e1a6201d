"""The ranks of a job as replicas of a pipeline: who sends activations, who adds up gradients.

With two replicas of three ranks each, and the ranks of a pipeline side by side::

                    position 0   position 1   position 2
    replica 0         rank 0       rank 1       rank 2      a pipeline: activations, tied weights
    replica 1         rank 3       rank 4       rank 5
                      peers: the same weights, gradients are added up
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import tensorflow as tf

from tarantella_pp.partition.plan.plan_parts import rank_in_job
from tarantella_pp.runtime.comm.collectives import CollectiveRequest
from tarantella_pp.runtime.comm.communicator import Communicator
from tarantella_pp.runtime.comm.tensor_buffers import to_buffer, to_tensor


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


@dataclass(frozen=True, slots=True)
class BatchShare:
    """One replica's micro-batches of a batch.

    The batch is cut as if one pipeline computed all of it, and each replica takes neighbouring
    micro-batches. So the numbers do not depend on how many replicas there are.

    A replica that gets none because the batch is too small runs the first sample nevertheless, for
    all replicas must compile and exchange the same; what comes of it does not count.
    """

    sizes: tuple[int, ...]  # size of each micro-batch of the whole batch
    first: int  # number of the replica's first micro-batch
    count: int

    @property
    def is_spare(self) -> bool:
        """Whether no micro-batch is left for the replica."""
        return not self.count

    @property
    def own_sizes(self) -> tuple[int, ...]:
        """Size of each micro-batch that the replica runs."""
        return self.sizes[self.first : self.first + self.count] or (1,)

    @property
    def own_rows(self) -> slice:
        """The samples that it runs."""
        begin = 0 if self.is_spare else sum(self.sizes[: self.first])
        return slice(begin, begin + sum(self.own_sizes))

    @property
    def counted_rows(self) -> int:
        """Number of the samples that it runs and that count."""
        return 0 if self.is_spare else sum(self.own_sizes)


def batch_shares(rows: int, num_micro_batches: int, num_replicas: int = 1) -> list[BatchShare]:
    """Shares a batch among replicas."""
    sizes = micro_batch_sizes(rows, num_micro_batches * num_replicas)
    few, larger = divmod(len(sizes), num_replicas)
    counts = [few + (replica < larger) for replica in range(num_replicas)]
    return [BatchShare(sizes, sum(counts[:r]), count) for r, count in enumerate(counts)]


def micro_batch_sizes(rows: int, num_micro_batches: int) -> tuple[int, ...]:
    """Cuts a batch into micro-batches whose sizes differ by one at most."""
    count = max(1, min(num_micro_batches, rows))
    small, larger = divmod(rows, count)
    return tuple(small + (i < larger) for i in range(count))


class ReplicaExchange:
    """Adds up and puts together what replicas have computed of their shares of a batch.

    All of it comes out with the same bits on every replica. With one replica nothing changes.
    """

    def __init__(self, peers: Communicator) -> None:
        self._peers = peers

    @property
    def replica(self) -> int:
        """The replica of this rank."""
        return self._peers.rank

    def added_up(self, scalars: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """The sum over the replicas of each number."""
        if self._peers.size == 1 or not scalars:
            return list(scalars)
        values = np.array([float(scalar) for scalar in scalars], np.float64)
        self._peers.allreduce(values)
        return [tf.constant(v, s.dtype) for v, s in zip(values, scalars, strict=True)]

    def joined(self, tensors: Sequence[tf.Tensor], rows: Sequence[int]) -> list[tf.Tensor]:
        """Puts the samples of all replicas together."""
        if self._peers.size == 1:
            return list(tensors)
        gathered = [self._start_join(tensor, rows) for tensor in tensors]
        return [to_tensor(request.wait()[0]) for request in gathered]

    def _start_join(
        self, tensor: tf.Tensor, rows: Sequence[int]
    ) -> CollectiveRequest[list[np.ndarray[Any, Any]]]:
        own = rows[self._peers.rank]
        per_sample = tensor.shape[0] // max(own, 1)
        array = to_buffer(tensor)[: own * per_sample]  # a replica without samples has one to run
        counts = [count * per_sample for count in rows]
        return self._peers.start_allgather([array], counts, label="samples of replicas")

    def begin_metrics(self, variables: Sequence[Any]) -> None:
        """Has the metrics of all replicas but the first count from zero; see `merge_metrics`."""
        if self._peers.rank > 0:
            for variable in variables:
                variable.assign(tf.zeros_like(variable.value))

    def merge_metrics(self, variables: Sequence[Any]) -> None:
        """Gives every replica the sum of the states of metrics that add up."""
        if self._peers.size == 1:
            return
        states = [np.atleast_1d(variable.numpy()) for variable in variables]
        sums = [self._peers.start_allreduce(state, label="metrics") for state in states]
        for variable, request in zip(variables, sums, strict=True):
            variable.assign(request.wait().reshape(tuple(variable.shape)))
