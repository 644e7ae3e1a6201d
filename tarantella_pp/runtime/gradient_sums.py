"""Gradients of a stage's weights, summed over the micro-batches of a step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

Slices = tuple[tf.Tensor, tf.Tensor]


class GradientSums:
    """One sum for each trainable weight of a stage.

    Dense gradients add up in place. Sparse ones (of an embedding) are collected as they are:
    Keras' optimizers treat the slices of a batch one by one, so merging those of equal rows would
    change the result. Weights that no gradient reaches have no sum, as in plain Keras.

    Args:
        weights: The trainable weights.

    Attributes:
        reached: For each weight whether the gradient of the loss gets as far as this stage's
            gradient of the weight; where not, the sum is nothing but zeros.
    """

    def __init__(self, weights: Sequence[Any]) -> None:
        self.weights = list(weights)
        self.reached = [True] * len(self.weights)
        self._kinds: list[str | None] | None = None
        self._dense: list[tf.Variable | None] = [None] * len(self.weights)
        self._slices: dict[int, list[Slices]] = {}
        self._empty = True

    def prepare(self, gradients: Sequence[Any]) -> None:
        """Learns from the gradients of one micro-batch what kind each weight's is.

        Args:
            gradients: A tensor, `tf.IndexedSlices` or `None` for each weight.
        """
        if self._kinds is not None:
            return
        self._kinds = [_kind(gradient) for gradient in gradients]
        for i, (kind, weight) in enumerate(zip(self._kinds, self.weights, strict=True)):
            if kind == "dense":
                zeros = tf.zeros(weight.shape, weight.dtype)
                self._dense[i] = tf.Variable(zeros, trainable=False, name="gradient_sum")
            elif kind == "sparse":
                self._slices[i] = []

    def begin(self) -> bool:
        """Returns whether nothing has been added since the last reset; call it before adding."""
        empty, self._empty = self._empty, False
        return empty

    def add_dense(self, gradients: Sequence[Any], first: tf.Tensor | bool) -> None:
        """Adds the dense ones of a micro-batch's gradients; works inside a `tf.function`.

        The first ones take the place of what is there: their memory becomes that of the sum,
        which need neither be set to zero nor be read.

        Args:
            gradients: One for each weight.
            first: What `begin` said.
        """
        pairs = zip(self._dense, gradients, strict=True)
        dense = [(total, gradient) for total, gradient in pairs if total is not None]

        def replace() -> tf.Operation:
            return tf.group(*(total.assign(gradient) for total, gradient in dense))

        def add() -> tf.Operation:
            return tf.group(*(total.assign_add(gradient) for total, gradient in dense))

        if dense:
            tf.cond(first, replace, add)

    def slices_of(self, gradients: Sequence[Any]) -> list[Slices]:
        """The sparse ones of a micro-batch's gradients, as `add_slices` takes them."""
        sparse = [gradients[i] for i in self._slices]
        return [(gradient.values, gradient.indices) for gradient in sparse]

    def add_slices(self, slices: Sequence[Slices]) -> None:
        """Collects the sparse gradients of a micro-batch."""
        for kept, pair in zip(self._slices.values(), slices, strict=True):
            kept.append(pair)

    def collected(self) -> dict[int, Slices]:
        """The sparse gradients of all micro-batches so far, by weight."""
        return {
            i: (tf.concat([v for v, _ in kept], 0), tf.concat([n for _, n in kept], 0))
            for i, kept in self._slices.items()
            if kept
        }

    def gradient(self, index: int, collected: dict[int, Slices]) -> Any:
        """The sum for one weight, for the optimizer; works inside a `tf.function`.

        Args:
            index: The weight.
            collected: What `collected` returned.

        Returns:
            A tensor, `tf.IndexedSlices`, or `None` if no gradient reaches the weight.
        """
        if not self.reached[index]:
            return None
        total = self._dense[index]
        if total is not None:
            return tf.convert_to_tensor(total)
        if index in collected:
            values, indices = collected[index]
            return tf.IndexedSlices(values, indices, tf.constant(list(self.weights[index].shape)))
        return None

    def reset(self) -> None:
        """Forgets all gradients so far."""
        self._empty = True
        for kept in self._slices.values():
            kept.clear()


def _kind(gradient: Any) -> str | None:
    if gradient is None:
        return None
    return "sparse" if isinstance(gradient, tf.IndexedSlices) else "dense"
