"""A batch as one rank has it: what the rank needs of it, how it hears of it, arrays it reads."""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import keras
import msgspec
import numpy as np
import tensorflow as tf

from tarantella_pp.errors import ConfigurationError, UnsupportedModelError
from tarantella_pp.internals.data import arrays_of, as_sliced
from tarantella_pp.partition.graph.layer_graph import LayerGraph
from tarantella_pp.runtime.comm.communicator import Communicator, TensorSpec
from tarantella_pp.runtime.comm.tensor_buffers import to_buffer, to_tensor
from tarantella_pp.runtime.stage.stage_boundary import StageBoundary
from tarantella_pp.runtime.weights.process_groups import BatchShare, ProcessGroups

READER = 0
END = -1
_FAILED = -2
_HEADER_TAG, _STRUCTURE_TAG = 1, 2


class BatchAnnouncement:
    """Tells every rank the size of the next batch, and its structure where that is new."""

    def __init__(self, communicator: Communicator) -> None:
        self._communicator = communicator
        self.known = b""
        self.signature: Any = None

    def announce(self, rows: int, signature: bytes = b"") -> None:
        """Says, on the reader, what comes next."""
        self._tell(rows, signature if signature != self.known else b"")
        if rows >= 0:
            self.keep(signature)

    def fail(self, text: str) -> None:
        """Says, on the reader, that the data could not be read."""
        self._tell(_FAILED, text.encode())

    def hear(self) -> int:
        """Returns, elsewhere, the number of samples in the next batch; or `END`."""
        rows, size = self._get((2,), np.int64, _HEADER_TAG).tolist()
        if size:
            news = self._get((size,), np.uint8, _STRUCTURE_TAG).tobytes()
            if rows == _FAILED:
                raise ConfigurationError(news.decode())
            self.keep(news)
        return int(rows)

    def _tell(self, rows: int, news: bytes) -> None:
        header, text = np.array([rows, len(news)], np.int64), np.frombuffer(news, np.uint8)
        for rank in range(self._communicator.size):
            if rank != self._communicator.rank:
                self._communicator.send([header], rank, _HEADER_TAG, label="batch header")
                if news:
                    self._communicator.send([text], rank, _STRUCTURE_TAG, label="batch structure")

    def keep(self, signature: bytes) -> None:
        """Remembers the structure of the last batch."""
        if signature != self.known:
            self.known, self.signature = signature, msgspec.msgpack.decode(signature)

    def _get(self, shape: Sequence[int], dtype: Any, tag: int) -> np.ndarray[Any, Any]:
        spec = TensorSpec(tuple(shape), np.dtype(dtype))
        return self._communicator.post_receive([spec], READER, tag, label="data").wait()[0]


def describe(value: Any) -> tuple[Any, list[Any]]:
    """Takes a nested structure apart."""
    leaves: list[Any] = []
    return _describe(value, leaves), leaves


def rebuild(description: Any, leaves: Sequence[Any]) -> Any:
    """Puts a structure together again; undoes `describe`."""
    return _rebuild(description, iter(leaves))


def _describe(value: Any, leaves: list[Any]) -> Any:
    if value is None:
        return ["none"]
    if isinstance(value, dict):
        return ["dict", [[key, _describe(item, leaves)] for key, item in value.items()]]
    if isinstance(value, (list, tuple)):
        kind = "list" if isinstance(value, list) else "tuple"
        return [kind, [_describe(item, leaves) for item in value]]
    if not hasattr(value, "dtype") or not hasattr(value, "shape") or len(value.shape) == 0:
        raise UnsupportedModelError(
            "Targets and sample weights must be dense tensors with a batch dimension. "
            f"Received: {type(value).__name__}"
        )
    leaves.append(value)
    return ["tensor", [None, *value.shape[1:]], value.dtype.name]


def _rebuild(description: Any, leaves: Any) -> Any:
    kind, *rest = description
    if kind == "none":
        return None
    if kind == "tensor":
        return next(leaves)
    if kind == "dict":
        return {key: _rebuild(item, leaves) for key, item in rest[0]}
    items = [_rebuild(item, leaves) for item in rest[0]]
    return items if kind == "list" else tuple(items)


def tensors_in(description: Any) -> list[tuple[list[int | None], str]]:
    """Shape and dtype of each tensor of a description, in order."""
    kind, *rest = description
    if kind == "tensor":
        return [(rest[0], rest[1])]
    if kind == "none":
        return []
    items = [item for _, item in rest[0]] if kind == "dict" else rest[0]
    return [found for item in items for found in tensors_in(item)]


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

    inputs: tuple[int, ...]  # the positions of the model inputs that it uses
    replica: int = 0  # its replica, whose samples it gets
    targets: bool = False  # whether it gets targets and sample weights

    @property
    def any(self) -> bool:
        """Whether it gets anything."""
        return bool(self.inputs) or self.targets


def inputs_of_stages(boundaries: Sequence[StageBoundary], graph: LayerGraph) -> list[list[int]]:
    """For each stage, the positions of the model inputs that it uses."""
    places = {tensor: i for i, tensor in enumerate(graph.inputs)}
    return [[places[port.tensor] for port in boundary.model_inputs] for boundary in boundaries]


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
