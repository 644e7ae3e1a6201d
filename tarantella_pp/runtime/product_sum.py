"""The sum of a weight's gradients that are products, multiplied many rows at a time."""

from __future__ import annotations

import math

import tensorflow as tf

from tarantella_pp.runtime.product import Product

_MANY_ROWS = 512
"""A product of so many rows takes several times as long as adding it to a sum."""


class ProductSum:
    """Collects the factors of a weight's gradients, and multiplies them a chunk at a time.

    The sum of products is the product of their factors put one below the other: one
    multiplication for several micro-batches instead of one for each with a sum to read and to
    write, which for few rows costs more than the multiplication. Where there are rows enough, it
    is not left to the end of the step: a rank can multiply the first chunk while it waits for
    others. What is multiplied with what does not depend on when that is, so that the sum is the
    same in each run.

    Args:
        micro_batches: Most micro-batches of a step.
        product: The gradient of one of them.
    """

    def __init__(self, micro_batches: int, product: Product) -> None:
        fitting = product.fitting
        self._fits = micro_batches <= fitting
        if self._fits:
            chunks = 2 if micro_batches * product.rows >= 2 * _MANY_ROWS else 1
        else:  # one is multiplied while the next is collected
            chunks = -(-micro_batches // (fitting // 2))
        self._chunk = -(-micro_batches // chunks)
        self._factors: list[Product] = []
        self._total: tf.Tensor | None = None

    @staticmethod
    def pays(micro_batches: int, product: Product) -> bool:
        """Returns whether there are enough factors that fit to collect them."""
        return 2 <= min(micro_batches, 4) <= product.fitting

    def add(self, product: Product) -> None:
        """Adds the gradient of a micro-batch."""
        self._factors.append(product)

    @property
    def is_due(self) -> bool:
        """Whether there is a whole chunk to multiply."""
        return len(self._factors) >= self._chunk

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
        """Multiplies what is left, chunk by chunk."""
        while self._factors:
            self.multiply()

    def take(self) -> tf.Tensor | None:
        """Returns the sum, `None` if nothing was added, and begins a new one."""
        self.finish()
        total, self._total = self._total, None
        return total

    def reset(self) -> None:
        """Forgets all gradients so far."""
        self._factors.clear()
        self._total = None
