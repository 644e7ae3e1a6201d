"""The optimizer step of one rank: weight regularizers, gradients summed, weights updated."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from tarantella_pp.runtime.body import StageBody
from tarantella_pp.runtime.gradient_sums import GradientSums, Slices
from tarantella_pp.runtime.keras_training import count_step


class Update:
    """Applies the optimizer to the weights of one rank's stages.

    Args:
        optimizer: The rank's optimizer; it is built for the rank's own weights.
        bodies: The rank's stages.
        order: The model's trainable variables, in its order.
    """

    def __init__(self, optimizer: Any, bodies: Sequence[StageBody], order: Sequence[Any]) -> None:
        found = {
            id(weight): (weight, body.sums, i)
            for body in bodies
            for i, weight in enumerate(body.sums.weights)
        }
        self._own = [found[id(weight)] for weight in order if id(weight) in found]
        self._sums = [body.sums for body in bodies]
        self._optimizer = optimizer
        if not optimizer.built and self._own:
            optimizer.build([weight for weight, _, _ in self._own])
        self._step = tf.function(self._apply, autograph=False, reduce_retracing=True)
        self._penalty = tf.function(self._regularization, autograph=False)

    def penalty(self) -> tf.Tensor:
        """The sum of the weight regularizers, once per batch; in Keras' default float type."""
        return self._penalty()

    def apply(self) -> None:
        """Updates the weights with the gradients summed so far, and begins new sums."""
        self._step([sums.collected() for sums in self._sums])
        for sums in self._sums:
            sums.reset()

    def _regularization(self) -> tf.Tensor:
        dtype = keras.config.floatx()
        terms = [tf.cast(w.regularizer(w), dtype) for w, _, _ in self._own if w.regularizer]
        return tf.add_n([tf.zeros((), dtype), *terms])

    def _apply(self, collected: list[dict[int, Slices]]) -> None:
        slices = {id(sums): each for sums, each in zip(self._sums, collected, strict=True)}
        gradients = [self._gradient(w, sums, i, slices[id(sums)]) for w, sums, i in self._own]
        if all(gradient is None for gradient in gradients):
            count_step(self._optimizer)
        else:
            self._optimizer.apply(gradients, [weight for weight, _, _ in self._own])

    def _gradient(
        self, weight: Any, sums: GradientSums, index: int, collected: dict[int, Slices]
    ) -> Any:
        gradient = sums.gradient(index, collected)
        if weight.regularizer is None:
            return gradient
        with tf.GradientTape() as tape:
            penalty = weight.regularizer(weight)
        own = tape.gradient(penalty, weight.value)
        return own if gradient is None else tf.convert_to_tensor(gradient) + own
