"""Arrays that every rank has: each takes the rows that it needs."""

from __future__ import annotations

import zlib
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tarantella_pp.internals.data import arrays_of, as_sliced
from tarantella_pp.runtime.comm.tensor_buffers import to_buffer, to_tensor
from tarantella_pp.runtime.data.batch_announcement import describe


class ArrayRows:
    """The arrays of a data set: model inputs, targets and sample weights."""

    def __init__(self, arrays: Any) -> None:
        self._parts = keras.utils.unpack_x_y_sample_weight(keras.tree.lists_to_tuples(arrays))

    @classmethod
    def of(cls, adapter: Any) -> ArrayRows | None:
        """Those that a data adapter of Keras reads; `None` if it reads something else."""
        arrays = arrays_of(adapter)
        if arrays is None:
            return None
        leaves = [_as_numpy(leaf) for leaf in keras.tree.flatten(arrays)]
        if any(leaf is not None and not _has_numbers(leaf) for leaf in leaves):
            return None
        return cls(keras.tree.pack_sequence_as(arrays, leaves))

    def inputs(self, rows: Any) -> Any:
        """The model inputs of some samples, as Keras would read them."""
        return _rows_of(self._parts[0], rows)

    def targets(self, rows: Any) -> tuple[Any, Any]:
        """The targets of some samples, and their weights."""
        y, weight = (_rows_of(part, rows) for part in self._parts[1:])
        return y, weight

    def whole(self, rows: Any) -> Any:
        """All that there is of some samples, in the structure in which Keras gives a batch."""
        x, y, weight = (_rows_of(part, rows) for part in self._parts)
        return keras.utils.pack_x_y_sample_weight(x, y, weight)

    def fingerprint(self) -> str:
        """A short text that is the same for the same arrays in the same structure."""
        description, leaves = describe(self._parts)
        shapes = ", ".join(f"{leaf.dtype} {leaf.shape}" for leaf in leaves)
        found = zlib.crc32(repr(description).encode())  # several times as fast as other hashes
        for leaf in leaves:
            found = zlib.crc32(np.ascontiguousarray(leaf).reshape(-1).view(np.uint8).data, found)
        return f"{shapes}, hash {found:08x}"


def _as_numpy(leaf: Any) -> Any:
    """A leaf as an array on the same memory, where there is one."""
    if not isinstance(leaf, (np.ndarray, tf.Tensor)):
        leaf = as_sliced(leaf)
    return to_buffer(leaf) if isinstance(leaf, tf.Tensor) else leaf


def _has_numbers(leaf: Any) -> bool:
    """Whether a leaf is a dense array of numbers; bfloat16 is none to NumPy."""
    return isinstance(leaf, np.ndarray) and leaf.dtype.kind in "biuf" and leaf.dtype.isnative


def _rows_of(part: Any, rows: Any) -> Any:
    taken = keras.tree.map_structure(lambda leaf: None if leaf is None else leaf[rows], part)
    return keras.tree.map_structure(
        lambda leaf: None if leaf is None else to_tensor(leaf), as_sliced(taken)
    )
