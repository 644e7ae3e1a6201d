"""A `tf.data` data set of which each replica reads its own samples.

What is above `batch()` and maps one sample after the other (decoding, resizing) is done by each
replica for its own samples; the order of samples is drawn by all, from the same seeds::

    files.shuffle(1000, seed=1)     every replica: the same order
        .batch(256)                 every replica: cut where the batches will be,
        own rows, unbatch           and only the samples of its own go on
        .map(decode)                for those
        .batch(64)                  that many are its part of a batch
        .prefetch(2)                whatever comes after, as it was

With each sample goes the size of its batch and a hash of the whole batch before it was mapped (of
large samples, of some hundred elements), by which the replicas see whether they read the same. A
data set that is not surely the same on all ranks, and the same each time, is left to one reader.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from tarantella_pp.keras_internals.tf_datasets import (
    every_dataset,
    function_hash,
    inputs_of,
    kind_of,
    mapping_of,
    may_change_order,
    number_of,
    stateful_operations,
)
from tarantella_pp.runtime.replicas.batch_share import BatchShare

Shares = Callable[[int], Sequence[BatchShare]]
_LARGEST_BATCH = 1 << 14  # the shares of all smaller batches are worked out at the beginning
_HASHED_ELEMENTS = 256  # of each sample and tensor, about
_MAPS = ("MapDataset", "ParallelMapDataset")
_BATCHES = ("BatchDataset", "ParallelBatchDataset")
_AFTERWARDS = ("PrefetchDataset", "OptionsDataset", "RepeatDataset", "TakeDataset", "SkipDataset")
_SAME_EACH_TIME = {
    *_MAPS, *_BATCHES, *_AFTERWARDS, "ShuffleDataset", "ShardDataset", "ZipDataset", "RangeDataset",
    "ConcatenateDataset", "TensorSliceDataset", "TensorDataset", "TFRecordDatasetV2",
    "TFRecordDataset", "TextLineDatasetV2", "TextLineDataset", "FixedLengthRecordDatasetV2",
    "FixedLengthRecordDataset", "FilterDataset", "FlatMapDataset", "InterleaveDataset",
    "ParallelInterleaveDataset", "UnbatchDataset", "WindowDataset", "TakeWhileDataset",
    "CacheDataset",
}  # fmt: skip
_NUMBERS = ("count", "seed", "seed2", "buffer_size", "batch_size", "num_shards", "index")


class NotSplitError(Exception):
    """Why one rank reads a data set for all: not an error of the user's."""


@dataclass(frozen=True)
class SplitDataset:
    """A data set taken apart.

    Attributes:
        whole: The user's data set.
        samples: Gives what the order of samples is known from, before any mapping.
        maps: What is done to each sample, in that order.
        batch: What makes batches of the samples.
        afterwards: What is done to batches, in that order.
    """

    whole: Any
    samples: Any
    maps: tuple[Any, ...]
    batch: Any
    afterwards: tuple[Any, ...]

    @classmethod
    def of(cls, dataset: Any) -> SplitDataset:
        """Takes a data set apart."""
        policy = dataset.options().experimental_distribute.auto_shard_policy
        if policy == tf.data.experimental.AutoShardPolicy.OFF:
            raise NotSplitError("its auto_shard_policy is OFF")
        afterwards, batch = _while_of(dataset, _AFTERWARDS)
        if kind_of(batch) not in _BATCHES:
            raise NotSplitError(f"{kind_of(batch)} stands behind batch()")
        maps, samples = _while_of(inputs_of(batch)[0], (*_MAPS, "PrefetchDataset"))
        maps = [each for each in maps if kind_of(each) in _MAPS]
        if not maps:
            raise NotSplitError("there is no map() directly before batch()")
        found = cls(dataset, samples, tuple(maps[::-1]), batch, tuple(afterwards[::-1]))
        found._check()
        return found

    @property
    def fingerprint(self) -> str:
        """A short text that is the same on ranks that read the same in the same order."""
        parts = [
            [
                kind_of(each),
                [number_of(each, name) for name in _NUMBERS if hasattr(each, f"_{name}")],
                function_hash(each),
            ]
            for each in every_dataset(self.whole)
        ]
        text = repr((parts, self.whole.element_spec))
        return hashlib.sha256(text.encode()).hexdigest()

    def part(self, shares: Shares, replica: int) -> tf.data.Dataset:
        """The data set of one replica's samples."""
        size = number_of(self.batch, "batch_size")
        rows = _rows_of_batches(size, shares, replica)
        drops = bool(number_of(self.batch, "drop_remainder"))
        found = self.samples.batch(size, drop_remainder=drops)
        found = found.map(_taking(rows, type(self.samples.element_spec) is tuple)).unbatch()
        for each in self.maps:
            found = found.map(_beside(mapping_of(each)), **_parallel(each))
        found = found.batch(rows[size][1])
        for each in self.afterwards:
            found = _again(found, each)
        return found.with_options(self.whole.options())

    def _check(self) -> None:
        """Refuses what may be different on another rank, or the next time."""
        if self.whole.options().deterministic is False:
            raise NotSplitError("the order of its samples is not deterministic")
        for each in every_dataset(self.whole):
            kind = kind_of(each)
            if kind not in _SAME_EACH_TIME:
                raise NotSplitError(f"{kind} may give each rank something else")
            if kind == "ShuffleDataset" and not (
                number_of(each, "seed") or number_of(each, "seed2")
            ):
                raise NotSplitError("shuffle() has no seed")
            if may_change_order(each):
                raise NotSplitError(f"{kind} does not keep the order of samples")
            if stateful := stateful_operations(each):
                raise NotSplitError(f"a function of {kind} calls {', '.join(sorted(stateful))}")
        for spec in tf.nest.flatten(self.samples.element_spec):
            if not isinstance(spec, tf.TensorSpec) or not spec.shape.is_fully_defined():
                raise NotSplitError(f"samples of {spec} before map() do not fit in a batch")


def shards_of(dataset: Any) -> list[tuple[int, int]]:
    """Index and number of each sharding in a data set."""
    return [
        (number_of(each, "index"), number_of(each, "num_shards"))
        for each in every_dataset(dataset)
        if kind_of(each) == "ShardDataset"
    ]


def _while_of(dataset: Any, kinds: Sequence[str]) -> tuple[list[Any], Any]:
    """The last steps of a data set that are of some kinds, and what they read."""
    found = []
    while kind_of(dataset) in kinds:
        found.append(dataset)
        (dataset,) = inputs_of(dataset)
    return found, dataset


def _rows_of_batches(size: int, shares: Shares, replica: int) -> list[tuple[int, int]]:
    """First row and number of rows of a replica, for batches of all sizes up to `size`."""
    if size > _LARGEST_BATCH:
        raise NotSplitError(f"its batches of {size} samples are larger than {_LARGEST_BATCH}")
    own = [shares(count)[replica].own_rows for count in range(1, size + 1)]
    rows = [(0, 0), *((each.start, each.stop - each.start) for each in own)]
    if max(count for _, count in rows) > rows[-1][1]:
        raise NotSplitError("a replica has more samples of a smaller batch")
    return rows


def _taking(rows: Sequence[tuple[int, int]], unpacked: bool) -> Callable[..., Any]:
    """Makes a function that takes the replica's rows of a batch, and tells of the whole."""
    table = tf.constant(rows, tf.int64)

    def take(*batch: Any) -> Any:
        element = batch if unpacked else batch[0]
        leaves = tf.nest.flatten(element)
        size = tf.shape(leaves[0], out_type=tf.int64)[0]
        start, count = tf.unstack(table[size])
        text = tf.strings.join([tf.io.serialize_tensor(_sampled(leaf)) for leaf in leaves])
        about = tf.stack([size, tf.strings.to_hash_bucket_fast(text, 2**62)])
        own = tf.nest.map_structure(lambda leaf: leaf[start : start + count], element)
        return tf.repeat(about[None], count, axis=0), own

    return take


def _sampled(leaf: tf.Tensor) -> tf.Tensor:
    """Some hundred elements of each sample, where there are many: enough to tell them apart."""
    elements = math.prod(leaf.shape[1:])
    if elements < 2 * _HASHED_ELEMENTS:
        return leaf
    return tf.reshape(leaf, [-1, elements])[:, :: elements // _HASHED_ELEMENTS]


def _beside(function: Callable[[Any], Any]) -> Callable[[Any, Any], Any]:
    return lambda about, element: (about, function(element))


def _parallel(mapped: Any) -> dict[str, Any]:
    if kind_of(mapped) == "MapDataset":
        return {}
    return {"num_parallel_calls": number_of(mapped, "num_parallel_calls"), "deterministic": True}


def _again(dataset: tf.data.Dataset, step: Any) -> tf.data.Dataset:
    """Does to a data set of batches what was done to the user's."""
    kind = kind_of(step)
    if kind == "PrefetchDataset":
        return dataset.prefetch(number_of(step, "buffer_size"))
    if kind == "OptionsDataset":  # all options are set in the end
        return dataset
    count = number_of(step, "count")
    if kind == "RepeatDataset":
        return dataset.repeat(count)
    return dataset.take(count) if kind == "TakeDataset" else dataset.skip(count)
