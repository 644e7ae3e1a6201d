"""Weight gradients that are the product of two small matrices, as those of dense layers are."""

from __future__ import annotations

from dataclasses import dataclass

import tensorflow as tf


@dataclass(frozen=True, slots=True, eq=False)
class Product:
    """The gradient `left^T @ right` of a weight, not computed yet.

    The sum of such products is the product of what they are made of, put one below the other:
    one multiplication for all micro-batches instead of one for each, each with a sum to read and
    to write, which for few rows costs more than the multiplication.

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

    def is_small(self, micro_batches: int) -> bool:
        """Returns whether the factors of all micro-batches take no more memory than the gradient.

        Args:
            micro_batches: Number of micro-batches of a step; with one there is nothing to gain.
        """
        (rows, inputs), outputs = self.left.shape.as_list(), self.right.shape[1]
        if micro_batches < 2 or None in (rows, inputs, outputs):
            return False
        return bool(micro_batches * rows * (inputs + outputs) <= inputs * outputs)

    def value(self) -> tf.Tensor:
        """Computes it."""
        return tf.linalg.matmul(self.left, self.right, transpose_a=True)
