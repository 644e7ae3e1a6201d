"""The sum of a weight's gradients that are products, multiplied many rows at a time."""

from __future__ import annotations

import math

import tensorflow as tf

from tarantella_pp.runtime.product import Product

_PIECE = 6e8
"""Operations of one piece: what a core does in some milliseconds, so that others hardly wait."""


class ProductSum:
    """Collects the factors of a weight's gradients, and multiplies them a chunk at a time.

    The sum of products is the product of their factors put one below the other: one
    multiplication for several micro-batches instead of one for each with a sum to read and to
    write, which for few rows costs more than the multiplication. And it need not be done at once:
    a rank does it piece by piece while it waits for others, and what is left after its last
    backward pass. What is multiplied with what does not depend on when that is, so that the sum
    is the same in each run.

    Args:
        micro_batches: Most micro-batches of a step.
        product: The gradient of one of them.
    """

    def __init__(self, micro_batches: int, product: Product) -> None:
        fitting = product.fitting
        # Two chunks at least: one is multiplied while the next is collected.
        chunks = max(2, -(-micro_batches // max(2, fitting // 2)))
        self._chunk = max(2, -(-micro_batches // chunks))
        self._fits = micro_batches <= fitting
        self._num_pieces = math.ceil(self._chunk * product.operations / _PIECE)
        self._factors: list[Product] = []
        self._pieces: list[Product] = []
        self._sums: dict[int, tf.Tensor] = {}

    @staticmethod
    def pays(micro_batches: int, product: Product) -> bool:
        """Returns whether there are enough factors that fit to collect them."""
        return 2 <= min(micro_batches, 4) <= product.fitting

    def add(self, product: Product) -> None:
        """Adds the gradient of a micro-batch."""
        self._factors.append(product)

    @property
    def due(self) -> int:
        """Pieces that can be multiplied by now, those of whole chunks."""
        return len(self._pieces) + len(self._factors) // self._chunk * self._num_pieces

    @property
    def room(self) -> float:
        """How many more micro-batches fit before what is due has to be done."""
        if self._fits:
            return math.inf
        return 2 * self._chunk - len(self._factors) - self._chunk * bool(self._pieces)

    def multiply(self) -> None:
        """Multiplies a piece, and adds the product to the sum."""
        if not self._pieces:
            chunk = Product.below_each_other(self._factors[: self._chunk])
            del self._factors[: self._chunk]
            self._pieces = chunk.pieces(self._num_pieces)
        gradient = self._pieces.pop().value()
        place = len(self._pieces)
        self._sums[place] = self._sums[place] + gradient if place in self._sums else gradient

    def finish(self) -> None:
        """Multiplies what is left, chunk by chunk."""
        while self._factors or self._pieces:
            self.multiply()

    def take(self) -> tf.Tensor | None:
        """Returns the sum, `None` if nothing was added, and begins a new one."""
        self.finish()
        sums = [self._sums.pop(place) for place in sorted(self._sums)]
        return tf.concat(sums, 0) if len(sums) > 1 else next(iter(sums), None)

    def reset(self) -> None:
        """Forgets all gradients so far."""
        self._factors.clear()
        self._pieces.clear()
        self._sums.clear()
