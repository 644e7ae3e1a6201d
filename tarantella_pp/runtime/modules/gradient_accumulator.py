"""Gradients of a stage's weights, summed over the micro-batches of a step."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, TypeAlias

import tensorflow as tf

from tarantella_pp.runtime.modules.deferred_matmul import DeferredMatmul, DeferredMatmulSum, Parts

Pair: TypeAlias = tuple[tf.Tensor, tf.Tensor]
Collected: TypeAlias = Pair | Parts


class GradientAccumulator:
    """One sum for each trainable weight of a stage.

    Dense gradients add up in place. Sparse ones (of an embedding) are collected as they are:
    Keras' optimizers treat the slices of a batch one by one, so merging those of equal rows would
    change the result. Those that are small products are collected, too, see `DeferredMatmulSum`.
    Weights that no gradient reaches have no sum, as in plain Keras.

    Attributes:
        reached: For each weight whether the gradient of the loss gets as far as this stage's
            gradient of the weight; where not, the sum is nothing but zeros.
    """

    def __init__(self, weights: Sequence[Any], micro_batches: int = 1) -> None:
        self.weights = list(weights)
        self._micro_batches = micro_batches
        self.reached = [True] * len(self.weights)
        self._kinds: list[str | None] | None = None
        self._dense: list[tf.Variable | None] = [None] * len(self.weights)
        self._sparse: dict[int, list[Pair]] = {}
        self._products: dict[int, DeferredMatmulSum] = {}
        self._empty = True

    def prepare(self, gradients: Sequence[Any]) -> None:
        """Learns from the gradients of one micro-batch what kind each weight's is."""
        if self._kinds is not None:
            return
        kinds = [_kind(gradient) for gradient in gradients]
        for i, (kind, weight) in enumerate(zip(kinds, self.weights, strict=True)):
            if kind == "dense":
                zeros = tf.zeros(weight.shape, weight.dtype)
                self._dense[i] = tf.Variable(zeros, trainable=False, name="gradient_sum")
            elif kind == "sparse":
                self._sparse[i] = []
            elif kind == "product" and (chunking := gradients[i].chunking(self._micro_batches)):
                self._products[i] = DeferredMatmulSum(chunking)
        self._kinds = kinds  # last, for an error may come before

    def collects(self, index: int, product: DeferredMatmul) -> bool:
        """Whether the gradients of a weight are collected by their factors."""
        if self._kinds is None:
            return product.chunking(self._micro_batches) is not None
        return self._kinds[index] == "product"

    def begin(self) -> bool:
        """Returns whether nothing has been added since the last reset; call it before adding."""
        empty, self._empty = self._empty, False
        return empty

    def add_dense(self, gradients: Sequence[Any], first: tf.Tensor | bool) -> None:
        """Adds the dense ones of a micro-batch's gradients; works inside a `tf.function`.

        The first ones take the place of what is there: their memory becomes that of the sum,
        which need neither be set to zero nor be read.
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
        """Those of a micro-batch's gradients that are collected, as `append_sparse` takes them."""
        products = (_as_product(gradients[i]) for i in self._products)
        return [
            *((gradients[i].values, gradients[i].indices) for i in self._sparse),
            *((product.left, product.right) for product in products),
        ]

    def append_sparse(self, pairs: Sequence[Pair]) -> None:
        """Collects gradients of a micro-batch."""
        for kept, pair in zip(self._sparse.values(), pairs, strict=False):
            kept.append(pair)
        rest = pairs[len(self._sparse) :]
        for products, factors in zip(self._products.values(), rest, strict=True):
            products.add(DeferredMatmul(*factors))

    def flush_overdue(self) -> bool:
        """Multiplies evenly as much as it takes not to keep more factors than fit."""
        due = [products for products in self._products.values() if products.is_due]
        if not due:
            return False
        due.sort(key=lambda products: products.room)
        needed = [math.ceil(number / products.room) for number, products in enumerate(due, 1)]
        late = due[: max(needed)]
        for products in late:
            products.multiply()
        return bool(late)

    @property
    def multiplies(self) -> bool:
        """Whether there are multiplications to do before the optimizer's step."""
        return any(products.has_chunks for products in self._products.values())

    def multiply(self) -> bool:
        """Multiplies one of the chunks that are due; returns whether there was one."""
        due = next((products for products in self._products.values() if products.is_due), None)
        if due is not None:
            due.multiply()
        return due is not None

    def finish(self) -> None:
        """Does all multiplications that are left, but those of the optimizer's step."""
        for products in self._products.values():
            products.finish()

    def take_collected(self) -> dict[int, Collected]:
        """What was collected of the gradients of all micro-batches so far, by weight; forgets it.

        Weight by weight, so that not all of it is there twice at a time.
        """
        collected: dict[int, Collected] = {}
        for i, kept in self._sparse.items():
            if kept:
                collected[i] = (
                    tf.concat([a for a, _ in kept], 0),
                    tf.concat([b for _, b in kept], 0),
                )
                kept.clear()
        for i, products in self._products.items():
            parts = products.take()
            if parts:
                collected[i] = parts
        return collected

    def gradient(self, index: int, collected: dict[int, Collected]) -> Any:
        """The sum for one weight, for the optimizer; works inside a `tf.function`."""
        if not self.reached[index]:
            return None
        total = self._dense[index]
        if total is not None:
            return tf.convert_to_tensor(total)
        parts = collected.get(index)
        if parts is None:
            return None
        if isinstance(parts, dict):
            return DeferredMatmulSum.value(parts)
        values, indices = parts
        return tf.IndexedSlices(values, indices, tf.constant(list(self.weights[index].shape)))

    def reset(self) -> None:
        """Forgets all gradients so far."""
        self._empty = True
        for kept in self._sparse.values():
            kept.clear()
        for products in self._products.values():
            products.reset()


def _kind(gradient: Any) -> str | None:
    if gradient is None:
        return None
    if isinstance(gradient, DeferredMatmul):
        return "product"
    return "sparse" if isinstance(gradient, tf.IndexedSlices) else "dense"


def _as_product(gradient: Any) -> DeferredMatmul:
    """A gradient that is collected, also where another pass of the stage found no product."""
    if isinstance(gradient, DeferredMatmul):
        return gradient
    return DeferredMatmul(tf.eye(gradient.shape[0], dtype=gradient.dtype), gradient)
