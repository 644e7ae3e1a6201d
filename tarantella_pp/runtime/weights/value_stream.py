"""Large values in pieces: read from other ranks while a file is written, or from a file.

    rank 3 writes   read             -> write   read             -> write ...   done
                       |            |              |            |                 |
    rank 0 serves      `-> look up -'              `-> look up -'                 `-> goes on

So no rank has more than its own share of a model and one piece of others.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import tensorflow as tf

from tarantella_pp.internals.model_files import goes_in_pieces
from tarantella_pp.runtime.comm.buffers import aligned_memory, give_back, numpy_dtype
from tarantella_pp.runtime.comm.communicator import Communicator, TensorSpec
from tarantella_pp.runtime.comm.tensor_buffers import elements_of, to_tensor

_REQUEST_TAG, _VALUE_TAG = 12, 13

Array: TypeAlias = "np.ndarray[Any, Any]"


@dataclass(frozen=True, slots=True)
class ValuePieces:
    """A value that is read from where it is, when it is needed, as a whole or some of its rows."""

    spec: TensorSpec
    # Reads some of its elements, given the first and the one behind the last in row-major order; an
    # array with one dimension, not to be written to
    elements: Callable[[int, int], Array]

    @property
    def shape(self) -> tuple[int, ...]:
        """Its shape."""
        return self.spec.shape

    @property
    def dtype(self) -> np.dtype[Any]:
        """Its dtype."""
        return numpy_dtype(self.spec.dtype)

    def __getitem__(self, rows: slice) -> Array:
        """Reads some of its rows."""
        begin, end, _ = rows.indices(self.shape[0])
        row = math.prod(self.shape[1:])
        return self.elements(begin * row, end * row).reshape(end - begin, *self.shape[1:])

    def whole(self) -> Array:
        """Reads all of it."""
        return self.elements(0, math.prod(self.shape)).reshape(self.shape)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Array:
        """All of it, for those who want an array."""
        return np.array(self.whole(), dtype)


# Finds a value: takes the rank that has it, its number, and its shape and dtype.
Read: TypeAlias = Callable[[int, int, TensorSpec], ValuePieces]


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

        def read(owner: int, number: int, spec: TensorSpec) -> ValuePieces:
            def elements(begin: int, end: int) -> Array:
                if owner == self._ranks.rank:
                    return elements_of(variable_of(number), begin, end)
                piece = TensorSpec((end - begin,), spec.dtype)
                give_back(piece.nbytes)
                label = f"value {number} of kind {kind}"
                request = [kind, number, begin, end]
                self._ranks.send_json(request, [owner], _REQUEST_TAG, label=label)
                return self._ranks.post_receive([piece], owner, _VALUE_TAG, label=label).wait()[0]

            return ValuePieces(spec, elements)

        return read

    @contextlib.contextmanager
    def open(self) -> Iterator[None]:
        """Lets the one rank read; the others wait in `serve` meanwhile."""
        try:
            yield
        finally:
            # Also if writing has failed: the others wait in `serve` until they hear that it is
            # over.
            self._ranks.send_json(None, self._ranks.others, _REQUEST_TAG, label="done")

    def serve(self) -> None:
        """Hands the one rank values until it has read all that it needs; there it does nothing."""
        if self._ranks.rank == self._reader:
            return
        label = "a request for a value"
        while request := self._ranks.receive_json(self._reader, _REQUEST_TAG, label=label):
            kind, number, begin, end = request
            value = elements_of(self._kinds[kind](number), begin, end)
            self._ranks.send([value], self._reader, _VALUE_TAG, label=f"value {number}")
            size = value.nbytes
            del value
            give_back(size)


def tensor_of(dataset: Any) -> tf.Tensor | None:
    """Reads a large value into memory that its variable takes over; `None` for any other one."""
    dtype = np.dtype(dataset.dtype)
    if not goes_in_pieces(dataset.shape, dtype) or not dtype.isnative:
        return None
    size = dataset.size * dtype.itemsize
    give_back(size)  # what the value before it has replaced
    memory = aligned_memory(size).view(dtype).reshape(dataset.shape)
    dataset.read_direct(memory)
    return to_tensor(memory)
