"""Weight gradients that are products of two small matrices, multiplied many rows at a time."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import tensorflow as tf

from tarantella_pp.partition.costs.deferred_gradients import MatmulChunks


@dataclass(frozen=True, slots=True, eq=False)
class DeferredMatmul:
    """The gradient `left^T @ right` of a weight, not computed yet.

    Attributes:
        left: What the layer was given, shape `(rows, inputs)`.
        right: Gradient of what it made, shape `(rows, outputs)`.
    """

    left: tf.Tensor
    right: tf.Tensor

    @classmethod
    def of(cls, gradient: tf.Tensor) -> DeferredMatmul | None:
        """Finds the factors of a gradient in a traced graph."""
        op = gradient.op
        if op.type != "MatMul" or not op.get_attr("transpose_a") or op.get_attr("transpose_b"):
            return None
        return cls(*op.inputs)

    @classmethod
    def below_each_other(cls, products: Sequence[DeferredMatmul]) -> DeferredMatmul:
        """Returns the sum of some products as one product."""
        lefts, rights = [p.left for p in products], [p.right for p in products]
        return cls(tf.concat(lefts, 0), tf.concat(rights, 0))

    def chunking(self, micro_batches: int) -> MatmulChunks | None:
        """Returns how such gradients are collected by their factors; `None` if they are not."""
        (rows, inputs), outputs = self.left.shape.as_list(), self.right.shape[1]
        if None in (rows, inputs, outputs):
            return None
        return MatmulChunks.of(micro_batches, rows, inputs, outputs)

    def value(self) -> tf.Tensor:
        """Computes it."""
        return tf.linalg.matmul(self.left, self.right, transpose_a=True)


Parts: TypeAlias = dict[str, tf.Tensor]


class DeferredMatmulSum:
    """Collects the factors of a weight's gradients, and multiplies them a chunk at a time.

    The sum of products is the product of their factors put one below the other: one
    multiplication for several micro-batches instead of one for each with a sum to read and to
    write, which for few rows costs more than the multiplication. The last chunk is multiplied in
    the optimizer's step; where there are rows enough, there is one before, which a rank can
    multiply while it waits for others. What is multiplied with what does not depend on when that
    is, so that the sum is the same in each run.

    Attributes:
        has_chunks: Whether there are several chunks, so that some are multiplied before the last.
    """

    def __init__(self, chunking: MatmulChunks) -> None:
        self.has_chunks = chunking.number > 1
        self._chunk = chunking.size
        self._fits = chunking.fits
        self._factors: list[DeferredMatmul] = []
        self._total: tf.Tensor | None = None

    def add(self, product: DeferredMatmul) -> None:
        """Adds the gradient of a micro-batch."""
        self._factors.append(product)

    @property
    def is_due(self) -> bool:
        """Whether there is a chunk to multiply that is not the last one."""
        return len(self._factors) > self._chunk

    @property
    def room(self) -> float:
        """How many more micro-batches fit before what is due has to be done."""
        return math.inf if self._fits else 2 * self._chunk - len(self._factors)

    def multiply(self) -> None:
        """Multiplies a chunk, and adds the product to the sum."""
        product = DeferredMatmul.below_each_other(self._factors[: self._chunk]).value()
        del self._factors[: self._chunk]
        self._total = product if self._total is None else self._total + product

    def finish(self) -> None:
        """Multiplies all chunks but the last one."""
        while len(self._factors) > self._chunk:
            self.multiply()

    def take(self) -> Parts:
        """Returns what the sum is made of, for `value`, and begins a new one."""
        self.finish()
        parts = {} if self._total is None else {"total": self._total}
        if self._factors:
            last = DeferredMatmul.below_each_other(self._factors)
            parts |= {"left": last.left, "right": last.right}
        self.reset()
        return parts

    @staticmethod
    def value(parts: Parts) -> tf.Tensor:
        """Computes the sum; works inside a `tf.function`."""
        product = DeferredMatmul(parts["left"], parts["right"]).value()
        return parts["total"] + product if "total" in parts else product

    def reset(self) -> None:
        """Forgets all gradients so far."""
        self._factors.clear()
        self._total = None
