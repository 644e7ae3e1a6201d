"""Batches for every rank from the one rank that reads the data set.

Unseeded shuffles differ between ranks: inputs and targets must come from one reader, and only it
opens the data set. Every rank gets the parts of a batch that its stages use.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import keras
import msgspec
import numpy as np
import tensorflow as tf

from tarantella_pp.errors import ConfigurationError, UnsupportedModelError
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


@dataclass(frozen=True, slots=True)
class Need:
    """What a rank gets of each batch.

    Attributes:
        inputs: The positions of the model inputs that it uses.
        replica: Its replica, whose samples it gets.
        targets: Whether it gets targets and sample weights.
    """

    inputs: tuple[int, ...]
    replica: int = 0
    targets: bool = False


@dataclass(frozen=True)
class Batch:
    """One rank's part of a batch.

    Attributes:
        rows: Number of samples, of all replicas.
        shares: The share of each replica.
        share: That of this rank's replica.
        inputs: The model inputs that this rank's stages use, by position among all inputs: the
            samples of its replica.
        y: The targets of all samples, on the last rank of each pipeline; elsewhere `None`.
        sample_weight: The weights of the samples likewise.
        targets: Description of `y` and of `sample_weight`, on every rank.
        signature: Names the structure, shapes and dtypes of the batch, but for its rows.
    """

    rows: int
    shares: Sequence[BatchShare]
    share: BatchShare
    inputs: Mapping[int, tf.Tensor]
    y: Any
    sample_weight: Any
    targets: tuple[Any, Any]
    signature: bytes


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

    def batches(self, source: Iterator[Any] | None) -> Batches:
        """Iterates over the batches of one epoch, on all ranks together.

        Args:
            source: What the data set gives, on the reader; ignored elsewhere.
        """
        return Batches(self, iter(source or ()))

    def next(self, source: Iterator[Any]) -> Batch | None:
        """Returns this rank's part of the next batch; `None` after the last one.

        Args:
            source: What the data set gives, on the reader; ignored elsewhere.

        Raises:
            ConfigurationError: If the reader could not read a batch, on the other ranks.
        """
        if self._communicator.rank != READER:
            return self._receive()
        try:
            return self._distribute(next(source))
        except (StopIteration, tf.errors.OutOfRangeError):
            self._announce(_END, b"")
            return None
        except Exception as error:
            self._announce(_FAILED, f"{type(error).__name__}: {error}".encode())
            raise

    def _distribute(self, data: Any) -> Batch:
        x, y, weight = keras.utils.unpack_x_y_sample_weight(_without_optionals(data))
        inputs = [_dense(tensor, "an input") for tensor in self._standardize(x)]
        y_struct, y_leaves = describe(y)
        w_struct, w_leaves = describe(weight)
        specs = [([None, *t.shape[1:]], t.dtype.name) for t in inputs]
        signature = msgspec.msgpack.encode([specs, y_struct, w_struct])
        rows = int(inputs[0].shape[0])
        targets = [tf.convert_to_tensor(_dense(t, "a target")) for t in (*y_leaves, *w_leaves)]
        self._announce(rows, signature)
        shares = self._shares(rows)
        for rank, need in enumerate(self._needs):
            if rank != self._communicator.rank:
                own = shares[need.replica].own_rows
                arrays = [to_buffer(inputs[i])[own] for i in need.inputs]
                arrays += map(to_buffer, targets if need.targets else ())
                if arrays:
                    self._communicator.send(arrays, rank, _DATA_TAG, label="data")
        own = shares[self._need.replica].own_rows
        whole = own == slice(0, rows)
        mine = {i: inputs[i] if whole else inputs[i][own] for i in self._need.inputs}
        return self._batch(rows, mine, targets, (y_struct, w_struct))

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

    def _receive(self) -> Batch | None:
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
        specs, y, weight = self._signature
        need = self._need.inputs
        own = sum(self._shares(rows)[self._need.replica].own_sizes)
        wanted = [(own, *specs[i]) for i in need]
        if self._need.targets:
            wanted += [(rows, *spec) for spec in (*tensors_in(y), *tensors_in(weight))]
        buffers = [
            TensorSpec((count, *shape[1:]), tf.as_dtype(dtype).as_numpy_dtype)
            for count, shape, dtype in wanted
        ]
        arrays = self._get(buffers, _DATA_TAG) if buffers else []
        tensors = [to_tensor(array) for array in arrays]
        inputs = dict(zip(need, tensors, strict=False))
        return self._batch(rows, inputs, tensors[len(need) :], (y, weight))

    def _get(self, specs: Sequence[TensorSpec], tag: int) -> list[np.ndarray[Any, Any]]:
        return self._communicator.post_receive(specs, READER, tag, label="data").wait()


class Batches:
    """The batches of one epoch, as this rank gets them.

    Args:
        feed: Hands every rank its part.
        source: What the data set gives, on the reader; ignored elsewhere.
    """

    def __init__(self, feed: DataFeed, source: Iterator[Any]) -> None:
        self._feed = feed
        self._source = source
        self._ended = False

    def __iter__(self) -> Batches:
        return self

    def __next__(self) -> Batch:
        batch: Batch | None = None
        try:
            batch = None if self._ended else self._feed.next(self._source)
        finally:
            self._ended = batch is None
        if batch is None:
            raise StopIteration
        return batch


def _dense(value: Any, what: str) -> Any:
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
