"""In how many parts gradients of dense layers are multiplied: what plan and runtime agree on."""

from __future__ import annotations

from dataclasses import dataclass

_MANY_ROWS = 512
"""A product of so many rows takes several times as long as adding it to a sum."""

_MANY_FACTORS = 8
"""Where not all factors fit: two chunks of four are well worth it, two of two are not."""


@dataclass(frozen=True, slots=True)
class MatmulChunks:
    """How the factors of a weight's gradients are collected, and multiplied a chunk at a time.

    The gradient of a dense layer's kernel is the product of two matrices with a row for each
    sample. The sum of such products is the product of their factors put one below the other.

    Attributes:
        number: Chunks of a step. Where there are several, all but the last are multiplied before
            the optimizer's step.
        size: Micro-batches of a chunk; the last one may have fewer.
        fits: Whether the factors of all micro-batches take no more memory than the gradient.
    """

    number: int
    size: int
    fits: bool

    @classmethod
    def of(cls, micro_batches: int, rows: int, inputs: int, outputs: int) -> MatmulChunks | None:
        """Decides for a weight."""
        fitting = inputs * outputs // (rows * (inputs + outputs)) if rows else 0
        if not 2 <= min(micro_batches, _MANY_FACTORS) <= fitting:
            return None
        fits = micro_batches <= fitting
        if fits:
            number = 2 if micro_batches * rows >= 2 * _MANY_ROWS else 1
        else:  # one is multiplied while the next is collected
            number = -(-micro_batches // (fitting // 2))
        return cls(number, -(-micro_batches // number), fits)

    @property
    def beside_sum(self) -> int:
        """Micro-batches whose factors are there at a time besides a sum, at the most."""
        if self.number == 1:
            return 0
        return self.size if self.fits else 2 * self.size
