"""Values of all ranks, handed to the one that writes a file; and values read from one.

    rank 3 writes   read             -> write   read             -> write ...   done
                       |            |              |            |                 |
    rank 0 serves      `-> look up -'              `-> look up -'                 `-> goes on

So no rank has more than its own share of a model and one variable of others.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import numpy as np
import tensorflow as tf

from tarantella_pp.runtime.comm.buffers import aligned_memory, give_back
from tarantella_pp.runtime.comm.collective import on_one_rank
from tarantella_pp.runtime.comm.communicator import Communicator, TensorSpec
from tarantella_pp.runtime.comm.tensor_buffers import buffer_of, to_tensor

_REQUEST_TAG, _VALUE_TAG = 12, 13

Array: TypeAlias = "np.ndarray[Any, Any]"


# Reads a value: takes the rank that has it, its number, and its shape and dtype.
Read: TypeAlias = Callable[[int, int, TensorSpec], Array]


class ValueStream:
    """Hands values of all ranks to one of them."""

    def __init__(self, ranks: Communicator, reader: int) -> None:
        self._ranks = ranks
        self._reader = reader
        self._kinds: list[Callable[[int], Any]] = []

    def add(self, variable_of: Callable[[int], Any]) -> Read:
        """Adds values of a kind, in the same order on all ranks."""
        kind = len(self._kinds)
        self._kinds.append(variable_of)

        def read(owner: int, number: int, spec: TensorSpec) -> Array:
            give_back(spec.nbytes)
            if owner == self._ranks.rank:
                return buffer_of(variable_of(number))
            label = f"value {number} of kind {kind}"
            self._ranks.send_json([kind, number], [owner], _REQUEST_TAG, label=label)
            return self._ranks.post_receive([spec], owner, _VALUE_TAG, label=label).wait()[0]

        return read

    def read_while(self, what: str, work: Callable[[], object]) -> None:
        """Lets the one rank work and read, while the others hand it values; all must call it."""

        def work_and_tell() -> None:
            try:
                work()
            finally:  # also if it has failed: the others serve until they hear that it is over
                self._ranks.send_json(None, self._ranks.others, _REQUEST_TAG, label="done")

        if self._ranks.rank != self._reader:
            self._serve()
        on_one_rank(self._ranks, self._reader, what, work_and_tell)

    def _serve(self) -> None:
        """Hands the one rank values until it has read all that it needs."""
        label = "a request for a value"
        while request := self._ranks.receive_json(self._reader, _REQUEST_TAG, label=label):
            kind, number = request
            value = buffer_of(self._kinds[kind](number))
            self._ranks.send([value], self._reader, _VALUE_TAG, label=f"value {number}")


def tensor_of(dataset: Any) -> tf.Tensor | None:
    """Reads a value of a file into memory that its variable takes over; else `None`."""
    dtype = np.dtype(dataset.dtype)
    if not dataset.shape or dtype.kind not in "fiu" or not dtype.isnative:
        return None
    size = dataset.size * dtype.itemsize
    give_back(size)  # what the value before it has replaced
    memory = aligned_memory(size).view(dtype).reshape(dataset.shape)
    dataset.read_direct(memory)
    return to_tensor(memory)
