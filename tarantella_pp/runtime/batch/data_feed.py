"""Batches for every rank, in the order of the one rank that reads the data set.

Unseeded shuffles differ between ranks: inputs and targets must come from one reader, and only it
opens the data set. Every rank gets the parts of a batch that its stages use. Of arrays that all
ranks have it gets nothing but the numbers of the samples, and takes its parts itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import keras
import msgspec
import numpy as np
import tensorflow as tf

from tarantella_pp.errors import ConfigurationError, UnsupportedModelError
from tarantella_pp.runtime.batch.array_rows import ArrayRows
from tarantella_pp.runtime.batch.batch import Batch
from tarantella_pp.runtime.batch.need import Need
from tarantella_pp.runtime.batch.nested_structure import (
    describe,
    rebuild,
    tensors_in,
)
from tarantella_pp.runtime.comm.communicator import Communicator, TensorSpec
from tarantella_pp.runtime.comm.tensor_buffers import to_buffer, to_tensor
from tarantella_pp.runtime.replicas.batch_share import BatchShare

READER = 0
_HEADER_TAG, _SIGNATURE_TAG, _DATA_TAG = 1, 2, 3
_END, _FAILED = -1, -2


class DataFeed:
    """Hands every rank its part of each batch.

    Args:
        communicator: The ranks of all pipelines.
        needs: What each of them gets.
        standardize: Makes the flat list of model inputs of what the data set gives for `x`.
        shares: Shares a batch of so many samples among the replicas.
    """

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
        self._known: bytes = b""
        self._signature: Any = None

    def batches(self, source: Iterator[Any] | None, arrays: ArrayRows | None = None) -> Batches:
        """Iterates over the batches of one epoch, on all ranks together.

        Args:
            source: What the data set gives, on the reader; ignored elsewhere.
            arrays: What all ranks have, if the data set gives the numbers of samples.
        """
        return Batches(self, iter(source or ()), arrays)

    def next(self, source: Iterator[Any], arrays: ArrayRows | None = None) -> Batch | None:
        """Returns this rank's part of the next batch; `None` after the last one.

        Args:
            source: As of `batches`.
            arrays: As of `batches`.

        Raises:
            ConfigurationError: If the reader could not read a batch, on the other ranks.
        """
        if self._communicator.rank != READER:
            return self._receive(arrays)
        try:
            data = next(source)
            return self._distribute(data) if arrays is None else self._order(data, arrays)
        except (StopIteration, tf.errors.OutOfRangeError):
            self._announce(_END, b"")
            return None
        except Exception as error:
            self._announce(_FAILED, f"{type(error).__name__}: {error}".encode())
            raise

    def _distribute(self, data: Any) -> Batch:
        inputs, targets, structures = self._opened(_without_optionals(data))
        rows = int(inputs[0].shape[0])
        self._announce(rows, _signature(inputs, *structures))
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
        """Which of so many inputs a rank gets."""
        return need.inputs

    def _order(self, numbers: tf.Tensor, arrays: ArrayRows) -> Batch:
        """Tells every rank the numbers of the samples that come next."""
        order = to_buffer(numbers)
        inputs, leaves = self._own_parts(order, arrays)
        first = order[:1]  # is enough to see what there is, on a rank that does not need it
        inputs = inputs or self._standardize(arrays.inputs(first))
        structures = self._structures(arrays, first)
        self._announce(len(order), _signature(inputs, *structures))
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
        return Batch(rows, shares, share, inputs, y, weight, targets, self._known)

    def _announce(self, rows: int, signature: bytes) -> None:
        """Tells every rank the size of the next batch, and its structure if that is new.

        Or that there is no next batch, because the data have ended or because of an error.
        """
        news = np.frombuffer(signature if signature != self._known else b"", np.uint8)
        header = np.array([rows, news.size], np.int64)
        for rank in range(self._communicator.size):
            if rank != self._communicator.rank:
                self._communicator.send([header], rank, _HEADER_TAG, label="batch header")
                if news.size:
                    self._communicator.send([news], rank, _SIGNATURE_TAG, label="batch structure")
        if rows >= 0:
            self._known = signature

    def _receive(self, arrays: ArrayRows | None) -> Batch | None:
        rows, news = self._get([TensorSpec((2,), np.dtype(np.int64))], _HEADER_TAG)[0].tolist()
        if rows == _END:
            return None
        if news:
            data = self._get([TensorSpec((news,), np.dtype(np.uint8))], _SIGNATURE_TAG)[0]
            if rows == _FAILED:
                text = data.tobytes().decode()
                raise ConfigurationError(f"Rank {READER} could not read the data: {text}")
            self._known = data.tobytes()
            self._signature = msgspec.msgpack.decode(self._known)
        if arrays is not None:
            return self._take(rows, arrays)
        specs, y, weight = self._signature
        need = self._wanted(self._need, len(specs))
        own = sum(self._shares(rows)[self._need.replica].own_sizes)
        wanted = [(own, *specs[i]) for i in need]
        if self._need.targets:
            wanted += [(rows, *spec) for spec in (*tensors_in(y), *tensors_in(weight))]
        buffers = [
            TensorSpec((count, *shape[1:]), tf.as_dtype(dtype).as_numpy_dtype)
            for count, shape, dtype in wanted
        ]
        received = self._get(buffers, _DATA_TAG) if buffers else []
        tensors = [to_tensor(array) for array in received]
        inputs = dict(zip(need, tensors, strict=False))
        return self._batch(rows, inputs, tensors[len(need) :], (y, weight))

    def _take(self, rows: int, arrays: ArrayRows) -> Batch:
        """Takes the samples of the next batch, of which only the numbers come."""
        inputs: list[tf.Tensor] = []
        leaves: list[tf.Tensor] = []
        if self._need.any:
            order = self._get([TensorSpec((rows,), np.dtype(np.int64))], _DATA_TAG)[0]
            inputs, leaves = self._own_parts(order, arrays)
        mine = {i: inputs[i] for i in self._wanted(self._need, len(inputs))}
        return self._batch(rows, mine, leaves, self._signature[1:])

    def _get(self, specs: Sequence[TensorSpec], tag: int) -> list[np.ndarray[Any, Any]]:
        return self._communicator.post_receive(specs, READER, tag, label="data").wait()


class Batches:
    """The batches of one epoch, as this rank gets them.

    Args:
        feed: Hands every rank its part.
        source: What the data set gives, on the reader; ignored elsewhere.
        arrays: What all ranks have, if the data set gives the numbers of samples.
    """

    def __init__(
        self, feed: DataFeed, source: Iterator[Any], arrays: ArrayRows | None = None
    ) -> None:
        self._feed = feed
        self._source = source
        self._arrays = arrays
        self._ended = False

    def __iter__(self) -> Batches:
        return self

    def __next__(self) -> Batch:
        batch: Batch | None = None
        try:
            batch = None if self._ended else self._feed.next(self._source, self._arrays)
        finally:
            self._ended = batch is None
        if batch is None:
            raise StopIteration
        return batch


def _signature(inputs: Sequence[tf.Tensor], y: Any, weight: Any) -> bytes:
    """Names what there is in a batch."""
    specs = [([None, *tensor.shape[1:]], tensor.dtype.name) for tensor in inputs]
    return msgspec.msgpack.encode([specs, y, weight])


def dense(value: Any, what: str) -> Any:
    """Refuses what no buffer holds; plain Keras computes with it, each layer in its own way.

    Args:
        value: A tensor of a batch.
        what: What it is, for the error.
    """
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
