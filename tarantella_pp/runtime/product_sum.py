"""The sum of a weight's gradients that are products, multiplied many rows at a time."""

from __future__ import annotations

import math
from typing import TypeAlias

import tensorflow as tf

from tarantella_pp.runtime.product import Product

_MANY_ROWS = 512
"""A product of so many rows takes several times as long as adding it to a sum."""

_MANY_FACTORS = 8
"""Where not all factors fit: two chunks of four are well worth it, two of two are not."""

Parts: TypeAlias = dict[str, tf.Tensor]


class ProductSum:
    """Collects the factors of a weight's gradients, and multiplies them a chunk at a time.

    The sum of products is the product of their factors put one below the other: one
    multiplication for several micro-batches instead of one for each with a sum to read and to
    write, which for few rows costs more than the multiplication. The last chunk is multiplied in
    the optimizer's step; where there are rows enough, there is one before, which a rank can
    multiply while it waits for others. What is multiplied with what does not depend on when that
    is, so that the sum is the same in each run.

    Args:
        micro_batches: Most micro-batches of a step.
        product: The gradient of one of them.

    Attributes:
        has_chunks: Whether there are several chunks, so that some are multiplied before the last.
    """

    def __init__(self, micro_batches: int, product: Product) -> None:
        fitting = product.fitting
        self._fits = micro_batches <= fitting
        if self._fits:
            chunks = 2 if micro_batches * product.rows >= 2 * _MANY_ROWS else 1
        else:  # one is multiplied while the next is collected
            chunks = -(-micro_batches // (fitting // 2))
        self.has_chunks = chunks > 1
        self._chunk = -(-micro_batches // chunks)
        self._factors: list[Product] = []
        self._total: tf.Tensor | None = None

    @staticmethod
    def pays(micro_batches: int, product: Product) -> bool:
        """Returns whether there are enough factors that fit to collect them."""
        return 2 <= min(micro_batches, _MANY_FACTORS) <= product.fitting

    def add(self, product: Product) -> None:
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
        product = Product.below_each_other(self._factors[: self._chunk]).value()
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
            last = Product.below_each_other(self._factors)
            parts |= {"left": last.left, "right": last.right}
        self.reset()
        return parts

    @staticmethod
    def value(parts: Parts) -> tf.Tensor:
        """Computes the sum; works inside a `tf.function`.

        Args:
            parts: What `take` returned, not empty.
        """
        product = Product(parts["left"], parts["right"]).value()
        return parts["total"] + product if "total" in parts else product

    def reset(self) -> None:
        """Forgets all gradients so far."""
        self._factors.clear()
        self._total = None
