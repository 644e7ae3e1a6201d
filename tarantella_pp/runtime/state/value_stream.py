"""Values that one rank reads from all others, one at a time, while it writes a file.

    rank 3 writes   read             -> write   read             -> write ...   done
                       |            |              |            |                 |
    rank 0 serves      `-> look up -'              `-> look up -'                 `-> goes on

So no rank has more than its own share of a model and one value of others.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, TypeAlias

import numpy as np

from tarantella_pp.runtime.comm.communicator import Communicator, TensorSpec
from tarantella_pp.runtime.state.free_memory import give_back

_REQUEST_TAG, _VALUE_TAG = 12, 13
_REQUEST = TensorSpec((2,), np.dtype(np.int64))
_DONE = -1

Array: TypeAlias = "np.ndarray[Any, Any]"
Read: TypeAlias = Callable[[int, int, TensorSpec], Array]
"""Reads a value: takes the rank that has it, its number, and its shape and dtype."""


class ValueStream:
    """Hands values of all ranks to one of them.

    Args:
        ranks: All ranks of the job.
        reader: The one that reads.
    """

    def __init__(self, ranks: Communicator, reader: int) -> None:
        self._ranks = ranks
        self._reader = reader
        self._kinds: list[Callable[[int], Array]] = []

    def add(self, value_of: Callable[[int], Array]) -> Read:
        """Adds values of a kind, in the same order on all ranks.

        Args:
            value_of: Looks up one of this rank's, by its number.

        Returns:
            What reads one of any rank's, for the rank that reads.
        """
        kind = len(self._kinds)
        self._kinds.append(value_of)

        def read(owner: int, number: int, spec: TensorSpec) -> Array:
            if owner == self._ranks.rank:
                return value_of(number)
            give_back(spec.nbytes)
            label = f"value {number} of kind {kind}"
            self._ranks.send([np.array([kind, number])], owner, _REQUEST_TAG, label=label)
            return self._ranks.post_receive([spec], owner, _VALUE_TAG, label=label).wait()[0]

        return read

    @contextlib.contextmanager
    def open(self) -> Iterator[None]:
        """Lets the one rank read; the others wait in `serve` meanwhile."""
        try:
            yield
        finally:
            for rank in range(self._ranks.size):
                if rank != self._reader:
                    self._ranks.send([np.array([_DONE, 0])], rank, _REQUEST_TAG, label="done")

    def serve(self) -> None:
        """Hands the one rank values until it has read all that it needs; there it does nothing."""
        if self._ranks.rank == self._reader:
            return
        while True:
            request = self._ranks.post_receive(
                [_REQUEST], self._reader, _REQUEST_TAG, label="a request for a value"
            )
            kind, number = request.wait()[0].tolist()
            if kind == _DONE:
                return
            value = self._kinds[kind](number)
            self._ranks.send([value], self._reader, _VALUE_TAG, label=f"value {number}")
            size = value.nbytes
            del value
            give_back(size)
