"""Weight gradients that are the product of two small matrices, as those of dense layers are."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import tensorflow as tf

from tarantella_pp.partition.chunking import Chunking


@dataclass(frozen=True, slots=True, eq=False)
class Product:
    """The gradient `left^T @ right` of a weight, not computed yet.

    Attributes:
        left: What the layer was given, shape `(rows, inputs)`.
        right: Gradient of what it made, shape `(rows, outputs)`.
    """

    left: tf.Tensor
    right: tf.Tensor

    @classmethod
    def of(cls, gradient: tf.Tensor) -> Product | None:
        """Finds the factors of a gradient in a traced graph.

        Args:
            gradient: A symbolic tensor.

        Returns:
            The factors, or `None` where it is no such product.
        """
        op = gradient.op
        if op.type != "MatMul" or not op.get_attr("transpose_a") or op.get_attr("transpose_b"):
            return None
        return cls(*op.inputs)

    @classmethod
    def below_each_other(cls, products: Sequence[Product]) -> Product:
        """Returns the sum of some products as one product."""
        lefts, rights = [p.left for p in products], [p.right for p in products]
        return cls(tf.concat(lefts, 0), tf.concat(rights, 0))

    def chunking(self, micro_batches: int) -> Chunking | None:
        """Returns how such gradients are collected by their factors; `None` if they are not.

        Args:
            micro_batches: Most micro-batches of a step.
        """
        (rows, inputs), outputs = self.left.shape.as_list(), self.right.shape[1]
        if None in (rows, inputs, outputs):
            return None
        return Chunking.of(micro_batches, rows, inputs, outputs)

    def value(self) -> tf.Tensor:
        """Computes it."""
        return tf.linalg.matmul(self.left, self.right, transpose_a=True)
