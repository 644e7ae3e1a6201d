"""A batch as one rank has it: what the rank needs of it, its structure, arrays it reads."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tarantella_pp.errors import UnsupportedModelError
from tarantella_pp.internals.data import arrays_of, as_sliced
from tarantella_pp.runtime.comm.process_groups import ProcessGroups
from tarantella_pp.runtime.comm.tensor_buffers import to_buffer, to_tensor

READER = 0


def describe(value: Any) -> tuple[Any, list[Any]]:
    """Takes a nested structure apart: a description that messages can have, and tensors."""
    leaves: list[Any] = []

    def told(part: Any) -> Any:
        if part is None:
            return None
        if isinstance(part, dict):
            return {key: told(item) for key, item in part.items()}
        if isinstance(part, (list, tuple)):
            return ["list" if isinstance(part, list) else "tuple", *map(told, part)]
        if not hasattr(part, "dtype") or not hasattr(part, "shape") or len(part.shape) == 0:
            raise UnsupportedModelError(
                "Targets and sample weights must be dense tensors with a batch dimension. "
                f"Received: {type(part).__name__}"
            )
        leaves.append(part)
        return ["tensor", [None, *part.shape[1:]], part.dtype.name]

    return told(value), leaves


def made_of(description: Any, make: Callable[[list[int | None], str], Any]) -> Any:
    """Makes a structure like the described one, of something made of each shape and dtype."""
    if description is None:
        return None
    if isinstance(description, dict):
        return {key: made_of(item, make) for key, item in description.items()}
    kind, *parts = description
    if kind == "tensor":
        return make(*parts)
    items = [made_of(item, make) for item in parts]
    return items if kind == "list" else tuple(items)


def rebuild(description: Any, leaves: Iterable[Any]) -> Any:
    """Puts a structure together again; undoes `describe`."""
    left = iter(leaves)
    return made_of(description, lambda shape, dtype: next(left))


def tensors_in(description: Any) -> list[tuple[list[int | None], str]]:
    """Shape and dtype of each tensor of a description, in order."""
    found: list[tuple[list[int | None], str]] = []
    made_of(description, lambda *spec: found.append(spec))
    return found


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


@dataclass(frozen=True)
class Batch:
    """One rank's part of a batch."""

    rows: int  # number of samples, of all replicas
    shares: Sequence[BatchShare]  # the share of each replica
    share: BatchShare  # the share of this rank's replica
    # The model inputs that this rank's stages use, by position among all inputs: the samples of
    # its replica
    inputs: Mapping[int, tf.Tensor]
    y: Any  # the targets of all samples, on the last rank of each pipeline; elsewhere `None`
    sample_weight: Any  # the weights of the samples likewise
    targets: tuple[Any, Any]  # description of `y` and of `sample_weight`, on every rank
    signature: bytes  # names the structure, shapes and dtypes of the batch, but for its rows


@dataclass(frozen=True, slots=True)
class Need:
    """What a rank gets of each batch."""

    inputs: tuple[int, ...] | None  # the positions of the model inputs that it uses; `None`: all
    replica: int = 0  # its replica, whose samples it gets
    targets: bool = False  # whether it gets targets and sample weights

    def inputs_of(self, count: int) -> Sequence[int]:
        """The positions of the inputs that it gets, out of `count`."""
        return range(count) if self.inputs is None else self.inputs


def needs_of_ranks(
    inputs: Sequence[Sequence[int]], placement: Sequence[int], groups: ProcessGroups
) -> list[Need]:
    """What each rank of the job gets of each batch."""
    used: list[set[int]] = [set() for _ in range(groups.pipeline.size)]
    for rank, places in zip(placement, inputs, strict=True):
        used[rank].update(places)
    needs = {
        rank: Need(tuple(sorted(used[position])), replica, targets=position == placement[-1])
        for replica, ranks in enumerate(groups.world_ranks)
        for position, rank in enumerate(ranks)
    }
    return [needs[rank] for rank in sorted(needs)]


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
        leaves = keras.tree.flatten(arrays)
        for i, leaf in enumerate(leaves):
            if not isinstance(leaf, (np.ndarray, tf.Tensor)):
                leaf = as_sliced(leaf)
            # On the same memory, where there is one; bfloat16 is no number to NumPy.
            found = leaves[i] = to_buffer(leaf) if isinstance(leaf, tf.Tensor) else leaf
            dense = isinstance(found, np.ndarray) and found.dtype.isnative
            if found is not None and not (dense and found.dtype.kind in "biuf"):
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
        return f"{shapes}, hash {checksum(repr(description), leaves)}"


def checksum(text: str, arrays: Iterable[Any]) -> str:
    """A short text that is the same for the same text and numbers."""
    found = zlib.crc32(text.encode())  # several times as fast as other hashes
    for array in arrays:
        found = zlib.crc32(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data, found)
    return f"{found:08x}"


def _rows_of(part: Any, rows: Any) -> Any:
    taken = keras.tree.map_structure(lambda leaf: None if leaf is None else leaf[rows], part)
    return keras.tree.map_structure(
        lambda leaf: None if leaf is None else to_tensor(leaf), as_sliced(taken)
    )
