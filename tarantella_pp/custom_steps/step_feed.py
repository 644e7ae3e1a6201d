"""Batches of any structure, of which each replica gets its samples."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from tarantella_pp.errors import ConfigurationError
from tarantella_pp.runtime.comm.communicator import Communicator
from tarantella_pp.runtime.data.batch import ArrayRows, Batch, Need, describe, rebuild
from tarantella_pp.runtime.data.data_feed import DataFeed, dense
from tarantella_pp.runtime.weights.process_groups import BatchShare

_NOTHING = ["none"]


class StepFeed(DataFeed):
    """Hands every rank its samples of all that a batch has: a step gets what Keras gives."""

    def __init__(
        self, communicator: Communicator, shares: Callable[[int], Sequence[BatchShare]]
    ) -> None:
        needs = [Need((0,), replica) for replica in range(communicator.size)]
        super().__init__(communicator, needs, list, shares)

    def _opened(self, data: Any) -> tuple[list[tf.Tensor], list[tf.Tensor], tuple[Any, Any]]:
        structure, leaves = describe(data)
        tensors = [tf.convert_to_tensor(dense(leaf, "data")) for leaf in leaves]
        if len({int(tensor.shape[0]) for tensor in tensors}) != 1:
            raise ConfigurationError(
                "Each replica takes its samples of a batch, which are along the first dimension of "
                f"all tensors in it. Received: shapes {[list(t.shape) for t in tensors]}"
            )
        return tensors, [], (structure, _NOTHING)

    def _wanted(self, need: Need, count: int) -> Sequence[int]:
        return range(count)

    def _structures(self, arrays: ArrayRows, rows: Any) -> tuple[Any, Any]:
        return describe(arrays.whole(rows))[0], _NOTHING

    def _own_parts(self, order: Any, arrays: ArrayRows) -> tuple[list[tf.Tensor], list[tf.Tensor]]:
        own = self._shares(len(order))[self._need.replica].own_rows
        return describe(arrays.whole(order[own]))[1], []


def data_of(batch: Batch, leaves: Sequence[Any]) -> Any:
    """What a step of Keras is given."""
    return rebuild(batch.targets[0], leaves)
