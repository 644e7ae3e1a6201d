"""New values of weights, from the replica that has updated them to all others."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import numpy as np
import tensorflow as tf

from tarantella_pp.runtime.comm.communicator import Communicator
from tarantella_pp.runtime.comm.tensor_buffers import (
    to_buffer,
    to_tensor,
    variable_bytes,
    variable_dtype,
)
from tarantella_pp.runtime.comm.wire_format import as_bytes


class OwnedValues:
    """Weights each of which one replica updates, for all (ZeRO-1).

    Args:
        communicator: The ranks with the same weights, one of each replica.
        variables: The weights, Keras or TensorFlow variables, in an order that all replicas share.
        owners: The replica that updates each of them.
    """

    def __init__(
        self, communicator: Communicator, variables: Sequence[Any], owners: Sequence[int]
    ) -> None:
        self._communicator = communicator
        self._of_ranks: list[list[Any]] = [[] for _ in range(communicator.size)]
        for variable, owner in zip(variables, owners, strict=True):
            self._of_ranks[owner].append(variable)
        self._sizes = [sum(map(variable_bytes, own)) for own in self._of_ranks]

    def spread(self) -> None:
        """Gives all replicas the values that the owners have; takes all of them."""
        ranks = self._communicator
        if ranks.size == 1:
            return
        mine = [
            as_bytes(np.ascontiguousarray(to_buffer(tf.convert_to_tensor(variable))))
            for variable in self._of_ranks[ranks.rank]
        ]
        packed = np.concatenate([np.empty(0, np.uint8), *mine])
        everything = ranks.start_allgather([packed], self._sizes, label="updated weights").wait()[0]
        begins = accumulate(self._sizes, initial=0)
        for rank, (begin, variables) in enumerate(zip(begins, self._of_ranks, strict=False)):
            for variable in variables if rank != ranks.rank else ():
                end = begin + variable_bytes(variable)
                value = everything[begin:end].view(variable_dtype(variable))
                variable.assign(to_tensor(value.reshape(tuple(variable.shape))))
                begin = end
