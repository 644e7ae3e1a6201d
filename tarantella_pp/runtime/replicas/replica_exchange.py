"""What the last ranks of all replicas tell each other of a batch: losses, metrics, outputs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tarantella_pp.runtime.comm.communicator import Communicator
from tarantella_pp.runtime.comm.tensor_buffers import to_buffer, to_tensor


class ReplicaExchange:
    """Adds up and puts together what replicas have computed of their shares of a batch.

    All of it comes out with the same bits on every replica. With one replica nothing changes.

    Args:
        peers: The ranks with the same stages, one of each replica.
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
        """Puts the samples of all replicas together.

        Args:
            tensors: This replica's, one row or more for each of its samples.
            rows: Number of samples of each replica that count.
        """
        if self._peers.size == 1:
            return list(tensors)
        parts: list[list[tf.Tensor]] = [[] for _ in tensors]
        for replica, count in enumerate(rows):
            for tensor, found in zip(tensors, parts, strict=True):
                if count:
                    found.append(self._of(replica, tensor, count, rows[self._peers.rank]))
        return [tf.concat(found, 0) for found in parts]

    def _of(self, replica: int, tensor: tf.Tensor, count: int, own: int) -> tf.Tensor:
        if replica == self._peers.rank:
            self._peers.broadcast(to_buffer(tensor), replica)
            return tensor
        per_sample = tensor.shape[0] // max(own, 1)
        array: Any = np.empty(
            (per_sample * count, *tensor.shape[1:]), tf.as_dtype(tensor.dtype).as_numpy_dtype
        )
        self._peers.broadcast(array, replica)
        return to_tensor(array)

    def begin_metrics(self, variables: Sequence[Any]) -> None:
        """Has the metrics of all replicas but the first count from zero; see `merge_metrics`."""
        if self._peers.rank > 0:
            for variable in variables:
                variable.assign(tf.zeros_like(variable.value))

    def merge_metrics(self, variables: Sequence[Any]) -> None:
        """Gives every replica the sum of the states of metrics that add up."""
        if self._peers.size == 1:
            return
        for variable in variables:
            value = np.array(variable.numpy())  # a scalar would be no array
            self._peers.allreduce(value)
            variable.assign(value)
