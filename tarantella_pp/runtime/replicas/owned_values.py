"""New values of weights, from the replica that has updated them to all others."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tarantella_pp.runtime.comm.buffers import TensorSpec
from tarantella_pp.runtime.comm.communicator import Communicator
from tarantella_pp.runtime.comm.tensor_buffers import (
    to_buffer,
    to_tensor,
    variable_dtype,
)

_TAG = 17
_LABEL = "updated weights"


class OwnedValues:
    """Weights each of which one replica updates, for all (ZeRO-1)."""

    def __init__(
        self, communicator: Communicator, variables: Sequence[Any], owners: Sequence[int]
    ) -> None:
        self._communicator = communicator
        self._of_ranks: list[list[Any]] = [[] for _ in range(communicator.size)]
        for variable, owner in zip(variables, owners, strict=True):
            self._of_ranks[owner].append(variable)
        self._specs = [
            [TensorSpec(tuple(v.shape), variable_dtype(v)) for v in own] for own in self._of_ranks
        ]

    def spread(self) -> None:
        """Gives all replicas the values that the owners have; takes all of them.

        They go straight from the memory of a variable to what becomes that of the others'.
        """
        ranks = self._communicator
        others = [(ranks.rank + step) % ranks.size for step in range(1, ranks.size)]
        receives = {
            rank: ranks.post_receive(self._specs[rank], rank, _TAG, label=_LABEL)
            for rank in others
            if self._of_ranks[rank]
        }
        mine = [to_buffer(tf.convert_to_tensor(v)) for v in self._of_ranks[ranks.rank]]
        for rank in others if mine else ():
            ranks.send(mine, rank, _TAG, label=_LABEL)
        for rank, request in receives.items():
            for variable, value in zip(self._of_ranks[rank], request.wait(), strict=True):
                variable.assign(to_tensor(value))
