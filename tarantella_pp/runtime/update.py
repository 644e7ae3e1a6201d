"""The optimizer step of one rank: weight regularizers, gradients summed, weights updated."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

import keras
import tensorflow as tf

from tarantella_pp.runtime.body import StageBody
from tarantella_pp.runtime.gradient_sums import Collected
from tarantella_pp.runtime.keras_training import count_step
from tarantella_pp.runtime.tied_weights import Gradient, TiedWeights, total

OfStage: TypeAlias = dict[int, Collected]
Gathered: TypeAlias = tuple[list[OfStage], list[list[Gradient]]]


class Update:
    """Applies the optimizer to the weights of one rank's stages.

    Args:
        optimizer: The rank's optimizer; it is built for the rank's own weights.
        bodies: The rank's stages.
        order: The model's trainable variables, in its order.
        ties: Weights that other ranks use or train, too.
    """

    def __init__(
        self,
        optimizer: Any,
        bodies: Sequence[StageBody],
        order: Sequence[Any],
        ties: TiedWeights,
    ) -> None:
        self._places: dict[int, list[tuple[int, int]]] = {}
        for stage, body in enumerate(bodies):
            for i, weight in enumerate(body.sums.weights):
                self._places.setdefault(id(weight), []).append((stage, i))
        self._own = [w for w in order if id(w) in self._places and not ties.is_borrowed(w)]
        self._sums = [body.sums for body in bodies]
        self._ties = ties
        self._optimizer = optimizer
        if not optimizer.built and self._own:
            optimizer.build(self._own)
        self._step = tf.function(self._apply, autograph=False, reduce_retracing=True)
        self._penalty = tf.function(self._regularization, autograph=False)

    def penalty(self) -> tf.Tensor:
        """The sum of the weight regularizers, once per batch; in Keras' default float type."""
        return self._penalty()

    @property
    def multiplies(self) -> bool:
        """Whether there are sums to finish; known after the first backward pass."""
        return any(sums.multiplies for sums in self._sums)

    def finish_sums(self) -> None:
        """Does what is left of summing up gradients, as far as it is no part of `apply`."""
        for sums in self._sums:
            sums.finish()

    def gather(self) -> Gathered:
        """Brings together the gradients that have been summed up, those of other ranks, too."""
        collected = [sums.take_collected() for sums in self._sums]
        self._ties.hand_over(lambda weight: self._summed(weight, collected))
        arrived = self._ties.collect()
        return collected, [arrived.get(id(weight), []) for weight in self._own]

    def apply(self, gradients: Gathered) -> None:
        """Updates the weights, and begins new sums.

        Args:
            gradients: What `gather` returned.
        """
        self._step(*gradients)
        self._ties.publish()
        for sums in self._sums:
            sums.reset()

    def _regularization(self) -> tf.Tensor:
        dtype = keras.config.floatx()
        terms = [tf.cast(w.regularizer(w), dtype) for w in self._own if w.regularizer]
        return tf.add_n([tf.zeros((), dtype), *terms])

    def _apply(self, collected: list[OfStage], arrived: list[list[Gradient]]) -> None:
        gradients = [
            self._gradient(weight, total([self._summed(weight, collected), *far]))
            for weight, far in zip(self._own, arrived, strict=True)
        ]
        if all(gradient is None for gradient in gradients):
            count_step(self._optimizer)
        else:
            self._optimizer.apply(gradients, self._own)

    def _summed(self, weight: Any, collected: Sequence[OfStage]) -> Gradient:
        """The sum of a weight's gradients over micro-batches and over this rank's stages."""
        places = self._places[id(weight)]
        return total([self._sums[s].gradient(i, collected[s]) for s, i in places])

    def _gradient(self, weight: Any, gradient: Gradient) -> Any:
        """Adds the gradient of the weight's regularizer."""
        if weight.regularizer is None:
            return gradient
        with tf.GradientTape() as tape:
            penalty = weight.regularizer(weight)
        own = tape.gradient(penalty, weight.value)
        return own if gradient is None else tf.convert_to_tensor(gradient) + own
