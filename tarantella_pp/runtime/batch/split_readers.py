"""A batch that several ranks read, each the samples of its replica: is it one batch?"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import tensorflow as tf

from tarantella_pp.errors import ConfigurationError
from tarantella_pp.runtime.batch.batch_announcement import END, READER, BatchAnnouncement
from tarantella_pp.runtime.comm.communicator import Communicator, TensorSpec

_FAILED = -2
_HEADER_TAG, _TEXT_TAG = 14, 15


@dataclass(frozen=True)
class ReadPart:
    """The samples of a batch that are those of one replica, as its reader has read them.

    Attributes:
        rows: Number of samples in the whole batch; or `END`.
        content: A hash of the whole batch, before it was mapped.
        signature: Names the structure of the batch.
        inputs: Model inputs.
        targets: Targets and their weights.
        failure: Why nothing could be read.
    """

    rows: int = END
    content: int = 0
    signature: bytes = b""
    inputs: Sequence[tf.Tensor] = ()
    targets: Sequence[tf.Tensor] = ()
    failure: Exception | None = None


class SplitReaders:
    """The ranks that read for their replicas; the first one compares what they have read."""

    def __init__(
        self, communicator: Communicator, ranks: Sequence[int], news: BatchAnnouncement
    ) -> None:
        self._communicator = communicator
        self.ranks = ranks
        self._news = news

    def agree(self, part: ReadPart) -> int:
        """Makes sure that all have read the same batch, and tells all ranks of it."""
        if self._communicator.rank != READER:
            return self._tell(part)
        told = [(READER, *_header(part), failure_text(READER, part.failure))]
        told += [(rank, *self._told_by(rank)) for rank in self.ranks[1:]]
        text = _disagreement(told)
        if not text:
            self._news.announce(part.rows, part.signature)
            return part.rows
        self._news.fail(text)
        raise part.failure or ConfigurationError(text)

    def _tell(self, part: ReadPart) -> int:
        """Tells the first reader what was read, and hears what came of it."""
        text = np.frombuffer(failure_text(self._communicator.rank, part.failure).encode(), np.uint8)
        header = np.array([*_header(part), text.size], np.int64)
        self._communicator.send([header], READER, _HEADER_TAG, label="batch header")
        if text.size:
            self._communicator.send([text], READER, _TEXT_TAG, label="batch header")
        try:
            return self._news.hear()
        except ConfigurationError as error:
            raise part.failure or error from None

    def _told_by(self, rank: int) -> tuple[int, int, int, str]:
        header = self._get(rank, 4, np.int64, _HEADER_TAG)
        rows, content, structure, size = header.tolist()
        text = self._get(rank, size, np.uint8, _TEXT_TAG).tobytes().decode() if size else ""
        return rows, content, structure, text

    def _get(self, rank: int, size: int, dtype: Any, tag: int) -> np.ndarray[Any, Any]:
        spec = TensorSpec((size,), np.dtype(dtype))
        return self._communicator.post_receive([spec], rank, tag, label="data").wait()[0]


def failure_text(rank: int, failure: Exception | None) -> str:
    """What the other ranks are told of an error while reading; nothing if there is none."""
    if failure is None:
        return ""
    return f"Rank {rank} could not read the data: {type(failure).__name__}: {failure}"


def _header(part: ReadPart) -> tuple[int, int, int]:
    rows = part.rows if part.failure is None else _FAILED
    return rows, part.content, zlib.crc32(part.signature)


def _disagreement(told: Sequence[tuple[int, int, int, int, str]]) -> str:
    """What is wrong with a batch, as its readers tell of it."""
    for *_, text in told:
        if text:
            return text
    (_, *expected, _), *others = told
    for rank, *found, _ in others:
        if found != expected:
            return (
                "All ranks must have the same data, in the same order. Received: "
                f"{_described(expected)} on rank {READER}, and {_described(found)} on rank {rank}. "
                "Seed what draws or shuffles the samples, and let all ranks see the same files. Or "
                "set the data set's option experimental_distribute.auto_shard_policy to OFF: then "
                f"rank {READER} reads for all."
            )
    return ""


def _described(found: Sequence[int]) -> str:
    rows, content, structure = found
    if rows == END:
        return "no batch"
    return f"a batch of {rows} samples with the hash {content:x} and the structure {structure:x}"
