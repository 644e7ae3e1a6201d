"""Batches for every rank, in the order of the one rank that reads the data set.

Unseeded shuffles differ between ranks: inputs and targets must come from one reader, and only it
opens the data set. Every rank gets the parts of a batch that its stages use. Of arrays that all
ranks have it gets nothing but the numbers of the samples, and takes its parts itself. A function
of an `InputContext` has the first rank of each replica read the samples of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import keras
import msgspec
import numpy as np
import tensorflow as tf

from tarantella_pp.errors import ConfigurationError, UnsupportedModelError
from tarantella_pp.runtime.comm.communicator import Communicator, TensorSpec
from tarantella_pp.runtime.comm.messages import RecvRequest
from tarantella_pp.runtime.comm.tensor_buffers import to_buffer, to_tensor
from tarantella_pp.runtime.data.batch import (
    END,
    READER,
    ArrayRows,
    Batch,
    BatchAnnouncement,
    Need,
    describe,
    rebuild,
    tensors_in,
)
from tarantella_pp.runtime.weights.process_groups import BatchShare

_DATA_TAG, _TARGETS_TAG = 3, 16


class ReadPart(NamedTuple):
    """What the reader of a replica has read of a batch; nothing at the end, and elsewhere."""

    rows: int = END
    signature: bytes = b""
    inputs: Sequence[tf.Tensor] = ()
    targets: Sequence[tf.Tensor] = ()
    failure: Exception | None = None


class DataFeed:
    """Hands every rank its part of each batch."""

    def __init__(
        self,
        communicator: Communicator,
        needs: Sequence[Need],
        standardize: Callable[[Any], list[tf.Tensor]],
        shares: Callable[[int], Sequence[BatchShare]],
    ) -> None:
        self._communicator = communicator
        self._needs = needs
        self._need = needs[communicator.rank]
        self._standardize = standardize
        self._shares = shares
        self._announcement = BatchAnnouncement(communicator)
        first = {need.replica: rank for rank, need in reversed(list(enumerate(needs)))}
        # The first rank of each replica reads for it where each of them reads.
        self.readers = [first[replica] for replica in sorted(first)]

    @property
    def replica(self) -> int:
        """The replica whose samples this rank gets."""
        return self._need.replica

    @property
    def num_replicas(self) -> int:
        """Number of replicas."""
        return len(self.readers)

    @property
    def reads_for_replica(self) -> bool:
        """Whether this rank is one of the readers."""
        return self._communicator.rank in self.readers

    def batches(
        self,
        source: Iterator[Any] | None,
        arrays: ArrayRows | None = None,
        *,
        is_split: bool = False,
    ) -> Batches:
        """Iterates over the batches of one epoch, on all ranks together."""
        return Batches(self, iter(source or ()), arrays, is_split)

    def next(
        self, source: Iterator[Any], arrays: ArrayRows | None = None, is_split: bool = False
    ) -> Batch | None:
        """Returns this rank's part of the next batch; `None` after the last one."""
        if is_split:
            return self._next_split(source)
        if self._communicator.rank != READER:
            return self._receive(arrays)
        # Others wait for news: whatever happens here, the end and errors too, is announced.
        try:
            data = next(source)
            return self._distribute(data) if arrays is None else self._order(data, arrays)
        except (StopIteration, tf.errors.OutOfRangeError):
            self._announcement.announce(END)
            return None
        except Exception as error:
            self._announcement.fail(failure_text(READER, error))
            raise

    def _next_split(self, source: Iterator[Any]) -> Batch | None:
        """Gets a batch whose samples the first rank of each replica reads, each its own."""
        part = self._read_part(source) if self.reads_for_replica else ReadPart()
        everyones = self._communicator.allgather_json(
            [part.rows, part.signature.hex(), failure_text(self._communicator.rank, part.failure)]
        )
        heard: list[Any] = [everyones[rank] for rank in self.readers]
        for _, _, failure in heard:
            if failure:
                raise part.failure or ConfigurationError(failure)
        rows = self._agreed([rows for rows, _, _ in heard], {text for _, text, _ in heard})
        if rows == END:
            return None
        self._announcement.keep(bytes.fromhex(heard[0][1]))
        return self._exchange(rows, part)

    def _agreed(self, parts: list[int], signatures: set[str]) -> int:
        """Number of samples of a batch that readers have read parts of; or `END`."""
        if set(parts) == {END}:
            return END
        if len(signatures) == 1:
            shares = [share.counted_rows for share in self._shares(sum(parts))]
            if parts == shares and 0 not in parts:
                return sum(parts)
            wrong = f"parts of {parts} samples, where the replicas' shares are {shares}"
        else:
            ended = END in parts
            wrong = "no more batch on some ranks" if ended else "batches of different structures"
        raise ConfigurationError(
            "A function of an InputContext must give each replica its share of every batch. "
            f"Received: {wrong}. Batch by `context.get_per_replica_batch_size(batch_size)` with "
            "drop_remainder=True, and let every replica read as many batches."
        )

    def _read_part(self, source: Iterator[Any]) -> ReadPart:
        """Reads the samples of this rank's replica."""
        try:
            inputs, targets, structures = self._opened(_without_optionals(next(source)))
            signature = _signature(inputs, *structures)
            return ReadPart(int(inputs[0].shape[0]), signature, inputs, targets)
        except (StopIteration, tf.errors.OutOfRangeError):
            return ReadPart()
        except Exception as error:
            return ReadPart(failure=error)

    def _exchange(self, rows: int, part: ReadPart) -> Batch:
        """Gets inputs from the replica's reader, and targets from all replicas' readers."""
        specs, *structures = self._announcement.signature
        shares, wanted = self._shares(rows), self._wanted(self._need, len(specs))
        leaves = [spec for structure in structures for spec in tensors_in(structure)]
        awaited = [
            self._awaited(share.counted_rows, leaves, reader, _TARGETS_TAG)
            for reader, share in zip(self.readers, shares, strict=True)
            if self._need.targets and leaves
        ]
        own = [to_buffer(target) for target in part.targets]
        if self.reads_for_replica:
            self._send_part(part.inputs, own)
            inputs = {i: part.inputs[i] for i in wanted}
        elif wanted:
            mine, reader = [specs[i] for i in wanted], self.readers[self.replica]
            request = self._awaited(shares[self.replica].counted_rows, mine, reader, _DATA_TAG)
            received = request.wait() if request else ()
            inputs = dict(zip(wanted, map(to_tensor, received), strict=True))
        else:
            inputs = {}
        pieces = [own if request is None else request.wait() for request in awaited]
        targets = [to_tensor(np.concatenate(each)) for each in zip(*pieces, strict=True)]
        return self._batch(rows, inputs, targets, tuple(structures))

    def _send_part(self, inputs: Sequence[tf.Tensor], targets: Sequence[Any]) -> None:
        """Sends model inputs within the replica, and targets to the last ranks of all."""
        for rank, need in enumerate(self._needs):
            if rank == self._communicator.rank:
                continue
            if need.replica == self.replica and (wanted := self._wanted(need, len(inputs))):
                arrays = [to_buffer(inputs[i]) for i in wanted]
                self._communicator.send(arrays, rank, _DATA_TAG, label="data")
            if need.targets and targets:
                self._communicator.send(targets, rank, _TARGETS_TAG, label="data")

    def _awaited(self, rows: int, specs: Sequence[Any], rank: int, tag: int) -> RecvRequest | None:
        """Makes ready to receive samples; `None` where this rank has them itself."""
        if rank == self._communicator.rank:
            return None
        return self._communicator.post_receive(_buffers(rows, specs), rank, tag, label="data")

    def _distribute(self, data: Any) -> Batch:
        inputs, targets, structures = self._opened(_without_optionals(data))
        rows = int(inputs[0].shape[0])
        self._announcement.announce(rows, _signature(inputs, *structures))
        shares = self._shares(rows)
        for rank, need in enumerate(self._needs):
            if rank != self._communicator.rank:
                own = shares[need.replica].own_rows
                arrays = [to_buffer(inputs[i])[own] for i in self._wanted(need, len(inputs))]
                arrays += map(to_buffer, targets if need.targets else ())
                if arrays:
                    self._communicator.send(arrays, rank, _DATA_TAG, label="data")
        own = shares[self._need.replica].own_rows
        whole = own == slice(0, rows)
        wanted = self._wanted(self._need, len(inputs))
        mine = {i: inputs[i] if whole else inputs[i][own] for i in wanted}
        return self._batch(rows, mine, targets, structures)

    def _opened(self, data: Any) -> tuple[list[tf.Tensor], list[tf.Tensor], tuple[Any, Any]]:
        """Takes a batch apart: model inputs; targets and their weights; the structures of both."""
        x, y, weight = keras.utils.unpack_x_y_sample_weight(data)
        inputs = [dense(tensor, "an input") for tensor in self._standardize(x)]
        y_struct, y_leaves = describe(y)
        w_struct, w_leaves = describe(weight)
        targets = [tf.convert_to_tensor(dense(t, "a target")) for t in (*y_leaves, *w_leaves)]
        return inputs, targets, (y_struct, w_struct)

    def _wanted(self, need: Need, count: int) -> Sequence[int]:
        """The inputs that a rank gets."""
        return need.inputs

    def _order(self, numbers: tf.Tensor, arrays: ArrayRows) -> Batch:
        """Tells every rank the numbers of the samples that come next."""
        order = to_buffer(numbers)
        inputs, leaves = self._own_parts(order, arrays)
        first = order[:1]  # is enough to see what there is, on a rank that does not need it
        inputs = inputs or self._standardize(arrays.inputs(first))
        structures = self._structures(arrays, first)
        self._announcement.announce(len(order), _signature(inputs, *structures))
        for rank, need in enumerate(self._needs):
            if rank != self._communicator.rank and need.any:
                self._communicator.send([order], rank, _DATA_TAG, label="order of samples")
        mine = {i: inputs[i] for i in self._wanted(self._need, len(inputs))}
        return self._batch(len(order), mine, leaves, structures)

    def _structures(self, arrays: ArrayRows, rows: Any) -> tuple[Any, Any]:
        """The structures of targets and of their weights."""
        y, weight = (describe(part)[0] for part in arrays.targets(rows))
        return y, weight

    def _own_parts(
        self, order: np.ndarray[Any, Any], arrays: ArrayRows
    ) -> tuple[list[tf.Tensor], list[tf.Tensor]]:
        """This rank's parts of a batch: all model inputs, and the targets and their weights."""
        inputs, targets = [], []
        if self._need.inputs:
            own = self._shares(len(order))[self._need.replica].own_rows
            inputs = self._standardize(arrays.inputs(order[own]))
        if self._need.targets:
            targets = [leaf for part in arrays.targets(order) for leaf in describe(part)[1]]
        return inputs, targets

    def _batch(
        self, rows: int, inputs: Mapping[int, Any], leaves: Sequence[Any], targets: tuple[Any, Any]
    ) -> Batch:
        shares, y, weight = self._shares(rows), None, None
        if self._need.targets:
            count = len(tensors_in(targets[0]))
            y, weight = rebuild(targets[0], leaves[:count]), rebuild(targets[1], leaves[count:])
        share = shares[self._need.replica]
        return Batch(rows, shares, share, inputs, y, weight, targets, self._announcement.known)

    def _receive(self, arrays: ArrayRows | None) -> Batch | None:
        rows = self._announcement.hear()
        if rows == END:
            return None
        if arrays is not None:
            return self._take(rows, arrays)
        specs, y, weight = self._announcement.signature
        need = self._wanted(self._need, len(specs))
        own = sum(self._shares(rows)[self._need.replica].own_sizes)
        buffers = _buffers(own, [specs[i] for i in need])
        if self._need.targets:
            buffers += _buffers(rows, [*tensors_in(y), *tensors_in(weight)])
        received = self._get(buffers, _DATA_TAG) if buffers else []
        tensors = [to_tensor(array) for array in received]
        inputs = dict(zip(need, tensors, strict=False))
        return self._batch(rows, inputs, tensors[len(need) :], (y, weight))

    def _take(self, rows: int, arrays: ArrayRows) -> Batch:
        """Takes the samples of the next batch from their numbers."""
        inputs: list[tf.Tensor] = []
        leaves: list[tf.Tensor] = []
        if self._need.any:
            order = self._get([TensorSpec((rows,), np.dtype(np.int64))], _DATA_TAG)[0]
            inputs, leaves = self._own_parts(order, arrays)
        mine = {i: inputs[i] for i in self._wanted(self._need, len(inputs))}
        return self._batch(rows, mine, leaves, self._announcement.signature[1:])

    def _get(self, specs: Sequence[TensorSpec], tag: int) -> list[np.ndarray[Any, Any]]:
        return self._communicator.post_receive(specs, READER, tag, label="data").wait()


class Batches:
    """The batches of one epoch, as this rank gets them."""

    def __init__(
        self,
        feed: DataFeed,
        source: Iterator[Any],
        arrays: ArrayRows | None = None,
        is_split: bool = False,
    ) -> None:
        self._feed = feed
        self._source = source
        self._arrays = arrays
        self._is_split = is_split
        self._ended = False

    def __iter__(self) -> Batches:
        return self

    def __next__(self) -> Batch:
        batch: Batch | None = None
        try:
            if not self._ended:
                batch = self._feed.next(self._source, self._arrays, self._is_split)
        finally:
            self._ended = batch is None
        if batch is None:
            raise StopIteration
        return batch


def _buffers(rows: int, specs: Sequence[Any]) -> list[TensorSpec]:
    """The buffers of some samples whose shapes and dtypes were announced."""
    return [
        TensorSpec((rows, *shape[1:]), tf.as_dtype(dtype).as_numpy_dtype) for shape, dtype in specs
    ]


def _signature(inputs: Sequence[tf.Tensor], y: Any, weight: Any) -> bytes:
    """Names what there is in a batch."""
    specs = [([None, *tensor.shape[1:]], tensor.dtype.name) for tensor in inputs]
    return msgspec.msgpack.encode([specs, y, weight])


def failure_text(rank: int, failure: Exception | None) -> str:
    """An error while reading, for the other ranks; empty if there is none."""
    if failure is None:
        return ""
    return f"Rank {rank} could not read the data: {type(failure).__name__}: {failure}"


def dense(value: Any, what: str) -> Any:
    """Refuses what no buffer holds; plain Keras computes with it, each layer in its own way."""
    if isinstance(value, (tf.RaggedTensor, tf.SparseTensor)):
        raise UnsupportedModelError(
            f"Expected dense tensors from the data. Received: {what} that is a "
            f"{type(value).__name__}. Make it dense in the data pipeline, with `to_tensor()` or "
            "`tf.sparse.to_dense()`, and mask what it is filled up with."
        )
    return value


def _without_optionals(data: Any) -> Any:
    return keras.tree.map_structure(
        lambda item: None if isinstance(item, tf.experimental.Optional) else item, data
    )
