"""Sparse gradients: rows of a table that samples choose, and rows that none has a say in.

Keras' optimizers treat slices one by one. So rows that samples choose, such as words, are put one
behind the other, as in a whole batch. Rows that are read whatever the samples are, such
as positions, are there once for a batch: they add up. On their way these are marked, with indices
behind the end of the table:

    words 7, 2 and positions 0, 1, all of one table of 50 rows    ->    7  2  50  51
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

import tensorflow as tf

from tarantella_pp.errors import UnsupportedModelError

# Values and indices of a sparse gradient, and how many of its rows each lookup has.
Slices: TypeAlias = "tuple[tf.Tensor, tf.Tensor, tf.Tensor]"
Gradient: TypeAlias = "tf.Tensor | tf.IndexedSlices | None"


def lookups_of(indices: tf.Tensor) -> list[tf.Tensor]:
    """The indices of each lookup: TensorFlow puts several one behind the other."""
    if indices.op.type != "ConcatV2":
        return [indices]
    return [one for each in indices.op.inputs[:-1] for one in lookups_of(each)]


def put_together(parts: Sequence[Slices], fixed: Sequence[bool], weight: Any) -> tf.IndexedSlices:
    """Makes the slices of several parts of a batch one gradient; `fixed` says which add up."""
    rows, shape = weight.shape[0], tf.constant(list(weight.shape))
    if not any(fixed):
        values, indices, _ = zip(*parts, strict=True)
        return tf.IndexedSlices(tf.concat(values, 0), tf.concat(indices, 0), shape)
    if all(fixed):
        fixed, parts = [True], [(v, i, tf.shape(i)) for v, i, _ in parts]
    if any(int(tf.size(sizes)) != len(fixed) for _, _, sizes in parts):
        raise UnsupportedModelError(
            f"Weight '{weight.path}' is read at rows that samples choose and at rows that are the "
            "same for all of them, in a stage that TensorFlow cannot cut. Use two tables."
        )
    every = [(tf.split(v, sizes), tf.split(i, sizes)) for v, i, sizes in parts]
    found = []
    for place, is_fixed in enumerate(fixed):
        values, indices = zip(*((v[place], i[place]) for v, i in every), strict=True)
        if is_fixed:
            found.append((tf.add_n(values), indices[0] + rows))
        else:  # any number in each part
            found.append((tf.concat(values, 0), tf.concat(indices, 0)))
    values, indices = zip(*found, strict=True)
    return tf.IndexedSlices(tf.concat(values, 0), tf.concat(indices, 0), shape)


def unmarked(gradient: Gradient) -> Gradient:
    """A gradient as an optimizer takes it."""
    if not isinstance(gradient, tf.IndexedSlices):
        return gradient
    rows = tf.cast(gradient.dense_shape[0], gradient.indices.dtype)
    return tf.IndexedSlices(gradient.values, gradient.indices % rows, gradient.dense_shape)


def total(gradients: Sequence[Gradient]) -> Gradient:
    """Adds up gradients of one weight, as TensorFlow does for several operations."""
    present = [gradient for gradient in gradients if gradient is not None]
    if len(present) < 2:
        return present[0] if present else None
    if all(isinstance(gradient, tf.IndexedSlices) for gradient in present):
        values = tf.concat([gradient.values for gradient in present], 0)
        indices = tf.concat([tf.cast(gradient.indices, tf.int64) for gradient in present], 0)
        return tf.IndexedSlices(values, indices, present[0].dense_shape)
    return tf.add_n([tf.convert_to_tensor(unmarked(gradient)) for gradient in present])
