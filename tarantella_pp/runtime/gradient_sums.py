"""Gradients of a stage's weights, summed over the micro-batches of a step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tarantella_pp.runtime.product import Product

Pair = tuple[tf.Tensor, tf.Tensor]


class GradientSums:
    """One sum for each trainable weight of a stage.

    Dense gradients add up in place. Sparse ones (of an embedding) are collected as they are:
    Keras' optimizers treat the slices of a batch one by one, so merging those of equal rows would
    change the result. Gradients that are small products are collected, too: one product of the
    factors of all micro-batches is their sum. Weights that no gradient reaches have no sum, as in
    plain Keras.

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
        self._pairs: dict[int, list[Pair]] = {}
        self._empty = True

    def prepare(self, gradients: Sequence[Any]) -> None:
        """Learns from the gradients of one micro-batch what kind each weight's is.

        Args:
            gradients: A tensor, `tf.IndexedSlices`, `Product` or `None` for each weight.
        """
        if self._kinds is not None:
            return
        self._kinds = [_kind(gradient) for gradient in gradients]
        for i, (kind, weight) in enumerate(zip(self._kinds, self.weights, strict=True)):
            if kind == "dense":
                zeros = tf.zeros(weight.shape, weight.dtype)
                self._dense[i] = tf.Variable(zeros, trainable=False, name="gradient_sum")
            elif kind is not None:
                self._pairs[i] = []

    def collects_products(self, index: int) -> bool | None:
        """Whether the gradient of a weight is collected by its factors; `None` before `prepare`."""
        return None if self._kinds is None else self._kinds[index] == "product"

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

    def pairs_of(self, gradients: Sequence[Any]) -> list[Pair]:
        """Those of a micro-batch's gradients that are collected, as `add_pairs` takes them."""
        return [_pair(gradients[i]) for i in self._pairs]

    def add_pairs(self, pairs: Sequence[Pair]) -> None:
        """Collects gradients of a micro-batch."""
        for kept, pair in zip(self._pairs.values(), pairs, strict=True):
            kept.append(pair)

    def take_collected(self) -> dict[int, Pair]:
        """What was collected of the gradients of all micro-batches so far, by weight; forgets it.

        Weight by weight, so that not all of it is there twice at a time.
        """
        found: dict[int, Pair] = {}
        for i, kept in self._pairs.items():
            if kept:
                found[i] = tf.concat([a for a, _ in kept], 0), tf.concat([b for _, b in kept], 0)
                kept.clear()
        return found

    def gradient(self, index: int, collected: dict[int, Pair]) -> Any:
        """The sum for one weight, for the optimizer; works inside a `tf.function`.

        Args:
            index: The weight.
            collected: What `take_collected` returned.

        Returns:
            A tensor, `tf.IndexedSlices`, or `None` if no gradient reaches the weight.
        """
        if not self.reached[index]:
            return None
        total = self._dense[index]
        if total is not None:
            return tf.convert_to_tensor(total)
        if index not in collected:
            return None
        if self.collects_products(index):
            return Product(*collected[index]).value()
        values, indices = collected[index]
        return tf.IndexedSlices(values, indices, tf.constant(list(self.weights[index].shape)))

    def reset(self) -> None:
        """Forgets all gradients so far."""
        self._empty = True
        for kept in self._pairs.values():
            kept.clear()


def _kind(gradient: Any) -> str | None:
    if gradient is None:
        return None
    if isinstance(gradient, Product):
        return "product"
    return "sparse" if isinstance(gradient, tf.IndexedSlices) else "dense"


def _pair(gradient: Any) -> Pair:
    if isinstance(gradient, tf.IndexedSlices):
        return gradient.values, gradient.indices
    if not isinstance(gradient, Product):  # where another pass of the stage found no product
        gradient = Product(tf.eye(gradient.shape[0], dtype=gradient.dtype), gradient)
    return gradient.left, gradient.right
