"""Batches for every rank, in the order of the one rank that reads the data set.

Every rank gets the parts of a batch that its stages use. Of arrays that all ranks have it gets
nothing but the order of the samples, and takes its parts itself.

    reader   reads, announces rows and structure   sends each rank the inputs and targets it needs
    others                   hear of them          receive
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, NamedTuple

import keras
import msgspec
import numpy as np
import tensorflow as tf

from tarantella_pp.errors import ConfigurationError, UnsupportedModelError
from tarantella_pp.runtime.batch import (
    READER,
    ArrayRows,
    Batch,
    BatchShare,
    Need,
    describe,
    rebuild,
    tensors_in,
)
from tarantella_pp.runtime.comm.communicator import Communicator, TensorSpec
from tarantella_pp.runtime.comm.tensor_buffers import to_buffer, to_tensor

_NEWS_TAG, _DATA_TAG = 2, 3
# What stands for a number of samples where none follow.
_END, _FAILED = -1, -2


class ReadPart(NamedTuple):
    """What a reader has read of a batch, and what the other ranks hear of it."""

    rows: int  # number of samples; `_END` or `_FAILED`
    signature: bytes = b""  # what there is, or why it could not be read
    inputs: Sequence[tf.Tensor] = ()
    targets: Sequence[tf.Tensor] = ()
    failure: Exception | None = None


@dataclass(eq=False)
class DataFeed:
    """Hands every rank its part of each batch."""

    communicator: Communicator
    needs: Sequence[Need]  # of all ranks
    standardize: Callable[[Any], list[tf.Tensor]]  # makes model inputs of what a script gives
    shares: Callable[[int], Sequence[BatchShare]]  # of the replicas, in a number of samples

    def __post_init__(self) -> None:
        self._need = self.needs[self.communicator.rank]
        self.replica = self._need.replica  # whose samples this rank gets
        first = {need.replica: rank for rank, need in reversed(list(enumerate(self.needs)))}
        # The first rank of each replica reads for it where each of them reads.
        self.readers = [first[replica] for replica in sorted(first)]

    def batches(self, source: Iterable[Any] | None, *, is_split: bool = False) -> Iterator[Batch]:
        """Iterates over the batches of one epoch, on all ranks together."""
        readers = self.readers if is_split else [READER]
        reads = self.communicator.rank in readers
        data = iter(source or ())
        while True:
            part = self._read(data) if reads else ReadPart(_END)
            heard = [
                part
                if reader == self.communicator.rank
                else ReadPart(*self.communicator.receive_json(reader, _NEWS_TAG, label="a batch"))
                for reader in readers
            ]
            for reader, theirs in zip(readers, heard, strict=True):
                if theirs.rows == _FAILED:
                    text = f"Rank {reader} could not read the data: {theirs.signature.decode()}"
                    raise part.failure or ConfigurationError(text)
            if is_split:
                self._check_parts(heard)
            if heard[0].rows == _END:
                return
            rows = [theirs.rows for theirs in heard]
            yield self._exchange(readers, rows, part, heard[0].signature)

    def batches_of(
        self, arrays: ArrayRows, orders: Iterable[np.ndarray[Any, Any]]
    ) -> Iterator[Batch]:
        """Iterates over batches of arrays that this rank has, from the numbers of their samples."""
        inputs, _, structures = self._opened(arrays.whole(slice(0, 1)))
        signature = _signature(inputs, *structures)
        for order in orders:
            own = order[self.shares(len(order))[self.replica].own_rows]
            inputs, targets = self._own_parts(arrays, own, order)
            wanted = self._need.inputs_of(len(inputs))
            yield self._batch(len(order), {i: inputs[i] for i in wanted}, targets, signature)

    def _own_parts(
        self, arrays: ArrayRows, own: np.ndarray[Any, Any], order: np.ndarray[Any, Any]
    ) -> tuple[list[tf.Tensor], list[tf.Tensor]]:
        """This rank's parts of a batch: all model inputs, and the targets and their weights."""
        inputs, targets = [], []
        if self._need.inputs != ():
            inputs = self.standardize(arrays.inputs(own))
        if self._need.targets:
            targets = [leaf for part in arrays.targets(order) for leaf in describe(part)[1]]
        return inputs, targets

    def _read(self, source: Iterator[Any]) -> ReadPart:
        """Reads a batch, and tells the others, who wait for it, whatever comes of it."""
        try:
            data = keras.tree.map_structure(
                lambda item: None if isinstance(item, tf.experimental.Optional) else item,
                next(source),
            )
            inputs, targets, structures = self._opened(data)
            signature = _signature(inputs, *structures)
            part = ReadPart(int(inputs[0].shape[0]), signature, inputs, targets)
        except (StopIteration, tf.errors.OutOfRangeError):
            part = ReadPart(_END)
        except Exception as error:
            part = ReadPart(_FAILED, f"{type(error).__name__}: {error}".encode(), failure=error)
        ranks, news = self.communicator, [part.rows, part.signature]
        ranks.send_json(news, ranks.others, _NEWS_TAG, label="batch structure")
        return part

    def _check_parts(self, heard: Sequence[ReadPart]) -> None:
        """Refuses parts of a batch that are not the replicas' shares of it."""
        parts = [part.rows for part in heard]
        if set(parts) == {_END}:
            return
        if len({part.signature for part in heard}) == 1:
            shares = [share.counted_rows for share in self.shares(sum(parts))]
            if parts == shares and 0 not in parts:
                return
            wrong = f"parts of {parts} samples, where the replicas' shares are {shares}"
        else:
            ended = _END in parts
            wrong = "no more batch on some ranks" if ended else "batches of different structures"
        raise ConfigurationError(
            "A function of an InputContext must give each replica its share of every batch. "
            f"Received: {wrong}. Batch by `context.get_per_replica_batch_size(batch_size)` with "
            "drop_remainder=True, and let every replica read as many batches."
        )

    def _exchange(
        self, readers: Sequence[int], parts: Sequence[int], part: ReadPart, signature: bytes
    ) -> Batch:
        """Gets inputs from the reader of this rank's replica, and targets from all readers."""
        own, (specs, *structures) = self.communicator.rank, _described(signature)
        leaves = [spec for structure in structures for spec in tensors_in(structure)]
        begins = [*accumulate(parts, initial=0)]
        shares = self.shares(begins[-1])

        def inputs_from(place: int, need: Need) -> tuple[Sequence[int], slice]:
            """Which inputs a rank gets from a reader, and which of that one's rows."""
            rows = shares[need.replica].own_rows
            gets = place == _source(need, readers)
            wanted = need.inputs_of(len(specs)) if gets else ()
            return wanted, slice(rows.start - begins[place], rows.stop - begins[place])

        requests = {}
        for place, reader in enumerate(readers):
            wanted, rows = inputs_from(place, self._need)
            buffers = _buffers(rows.stop - rows.start, [specs[i] for i in wanted])
            buffers += _buffers(parts[place], leaves) if self._need.targets else []
            if buffers and reader != own:
                request = self.communicator.post_receive(buffers, reader, _DATA_TAG, label="data")
                requests[place] = request
        received: list[list[tf.Tensor]] = [[] for _ in readers]
        if own in readers:
            place = readers.index(own)
            for rank, need in enumerate(self.needs):
                wanted, rows = inputs_from(place, need)
                whole = rows == slice(0, part.rows)
                tensors = [part.inputs[i] if whole else part.inputs[i][rows] for i in wanted]
                tensors += part.targets if need.targets else ()
                if rank == own:
                    received[place] = tensors
                elif tensors:
                    arrays = [to_buffer(tensor) for tensor in tensors]
                    self.communicator.send(arrays, rank, _DATA_TAG, label="data")
        for place, request in requests.items():
            received[place] = [to_tensor(array) for array in request.wait()]
        wanted, source = self._need.inputs_of(len(specs)), _source(self._need, readers)
        inputs = dict(zip(wanted, received[source], strict=False))
        received[source] = received[source][len(wanted) :]
        targets = [tf.concat(each, 0) for each in zip(*received, strict=True)]
        targets = targets if len(readers) > 1 else received[0]
        return self._batch(begins[-1], inputs, targets, signature)

    def _opened(self, data: Any) -> tuple[list[tf.Tensor], list[tf.Tensor], tuple[Any, Any]]:
        """Takes a batch apart: model inputs; targets and their weights; the structures of both."""
        x, y, weight = keras.utils.unpack_x_y_sample_weight(data)
        inputs = [dense(tensor, "an input") for tensor in self.standardize(x)]
        y_struct, y_leaves = describe(y)
        w_struct, w_leaves = describe(weight)
        targets = [tf.convert_to_tensor(dense(t, "a target")) for t in (*y_leaves, *w_leaves)]
        self._check_rows([*inputs, *targets])
        return inputs, targets, (y_struct, w_struct)

    def _check_rows(self, tensors: Sequence[tf.Tensor]) -> None:
        """Refuses what has not one row of each tensor for each sample, unless one rank has all."""
        rows = {int(tensor.shape[0]) for tensor in tensors}
        if len(rows) > 1 and len(self.shares(max(rows))[0].sizes) * self.communicator.size > 1:
            raise ConfigurationError(
                "Ranks and micro-batches take their samples of a batch, which are along the first "
                "dimension of all tensors in it: train on one rank, with num_micro_batches=1. "
                f"Received: shapes {[[*t.shape] for t in tensors]}"
            )

    def _batch(
        self, rows: int, inputs: Mapping[int, Any], leaves: Sequence[Any], signature: bytes
    ) -> Batch:
        _, *structures = _described(signature)
        shares, y, weight = self.shares(rows), None, None
        if self._need.targets:
            y_struct, w_struct = structures
            count = len(tensors_in(y_struct))
            y, weight = rebuild(y_struct, leaves[:count]), rebuild(w_struct, leaves[count:])
        share = shares[self.replica]
        return Batch(rows, shares, share, inputs, y, weight, tuple(structures), signature)


def _source(need: Need, readers: Sequence[int]) -> int:
    """Which of the readers has a rank's inputs."""
    return need.replica if len(readers) > 1 else 0


def _buffers(rows: int, specs: Sequence[Any]) -> list[TensorSpec]:
    """The buffers of some samples whose shapes and dtypes were announced."""
    return [
        TensorSpec((rows, *shape[1:]), tf.as_dtype(dtype).as_numpy_dtype) for shape, dtype in specs
    ]


def _signature(inputs: Sequence[tf.Tensor], y: Any, weight: Any) -> bytes:
    specs = [([None, *tensor.shape[1:]], tensor.dtype.name) for tensor in inputs]
    return msgspec.msgpack.encode([specs, y, weight])


@functools.lru_cache
def _described(signature: bytes) -> Any:
    """What a signature names; kept, for it is the same for most batches."""
    return msgspec.msgpack.decode(signature)


def dense(value: Any, what: str) -> Any:
    """Refuses what no buffer holds; plain Keras computes with it, each layer in its own way."""
    if isinstance(value, (tf.RaggedTensor, tf.SparseTensor)):
        raise UnsupportedModelError(
            f"Expected dense tensors from the data. Received: {what} that is a "
            f"{type(value).__name__}. Make it dense in the data pipeline, with `to_tensor()` or "
            "`tf.sparse.to_dense()`, and mask what it is filled up with."
        )
    return value
