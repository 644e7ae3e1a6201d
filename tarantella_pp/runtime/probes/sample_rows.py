"""Samples in tensors: some of them replaced, left out, or more of them put beside the others."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import keras
import numpy as np
import tensorflow as tf
from numpy.typing import NDArray

Array = NDArray[Any]
Change: TypeAlias = "Callable[[tf.Tensor, int], tf.Tensor]"


def samples_first(tensors: Sequence[Any], axes: Sequence[int | None]) -> list[Any]:
    """Puts the dimension of the samples first."""
    pairs = zip(tensors, axes, strict=True)
    return [keras.ops.moveaxis(x, axis, 0) if _moves(x, axis) else x for x, axis in pairs]


def samples_back(tensors: Sequence[Any], axes: Sequence[int | None]) -> list[Any]:
    """Puts the dimension of the samples where it was; see `samples_first`."""
    pairs = zip(tensors, axes, strict=True)
    return [keras.ops.moveaxis(x, 0, axis) if _moves(x, axis) else x for x, axis in pairs]


def _moves(tensor: Any, axis: int | None) -> bool:
    return bool(axis) and len(tensor.shape) > (axis or 0)


class SampleRows:
    """The inputs of a stage for some samples, which are along the first dimension."""

    def __init__(self, rows: int, inputs: Sequence[tf.Tensor], batched: Sequence[bool]) -> None:
        self.rows = rows
        self.inputs = list(inputs)
        pairs = zip(inputs, batched, strict=True)
        self._batched = [one and is_batched(x, rows) for x, one in pairs]

    def mixed(self, kept: Array, change: Change) -> list[tf.Tensor]:
        """The inputs with all but the kept samples changed."""
        return self._map(lambda x: replace(x, change(x, self.rows), kept))

    def only(self, part: Array) -> list[tf.Tensor]:
        """The inputs for some of the samples alone."""
        return self._map(
            lambda x: tf.gather(x, np.flatnonzero(np.repeat(part, x.shape[0] // self.rows)))
        )

    def beside(self, inputs: Sequence[tf.Tensor], change: Change) -> list[tf.Tensor]:
        """Other inputs with these samples, changed, beside their own."""
        changed = iter(self._map(lambda x: change(x, self.rows)))
        pairs = zip(inputs, changed, self._batched, strict=True)
        return [tf.concat([x, y], 0) if one else x for x, y, one in pairs]

    def _map(self, function: Callable[[tf.Tensor], tf.Tensor]) -> list[tf.Tensor]:
        pairs = zip(self.inputs, self._batched, strict=True)
        return [function(x) if one else x for x, one in pairs]


def is_batched(tensor: Any, rows: int) -> bool:
    """Whether a tensor may have a row, or several, for each sample."""
    return len(tensor.shape) > 0 and tensor.shape[0] > 0 and tensor.shape[0] % rows == 0


def rows_of(array: Array, part: Array) -> Array:
    """The rows of some samples; all of what has none for each."""
    if not is_batched(array, len(part)):
        return array
    found: Array = array[np.repeat(part, array.shape[0] // len(part))]
    return found


def replace(tensor: tf.Tensor, other: tf.Tensor, kept: Array) -> tf.Tensor:
    """The kept samples of one tensor and the other ones of another."""
    rows = np.repeat(kept, tensor.shape[0] // len(kept)).reshape(-1, *[1] * (tensor.shape.rank - 1))
    return tf.where(tf.constant(rows), tensor, other)


def neighbours(tensor: tf.Tensor, rows: int) -> tf.Tensor:
    """Other content for each sample, which a layer is sure to take: that of the one before."""
    return tf.roll(tensor, tensor.shape[0] // rows, 0)


def others(tensor: tf.Tensor, rows: int) -> tf.Tensor:
    """Other content for each sample: floating point numbers that no sample has."""
    moved = neighbours(tensor, rows)
    if not tensor.dtype.is_floating:
        return moved
    if tensor.shape.rank > 1:
        moved = tf.roll(moved, 1, -1)
    size = tf.reduce_max(tf.abs(tensor))
    size = tf.where(size > 0, size, tf.ones_like(size))
    wave = tf.cast(tf.range(tf.size(tensor)), tf.float64)
    wave = tf.cast(tf.abs(tf.cos(1.1 * wave)), tensor.dtype)
    return moved * 1.25 + 0.1 * size * tf.reshape(wave, tf.shape(tensor))


def negative(tensor: tf.Tensor, rows: int) -> tf.Tensor:
    """Other content for each sample, with other signs."""
    changed = others(tensor, rows)
    return -changed if tensor.dtype.is_floating else changed
