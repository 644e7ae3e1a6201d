"""The optimizer step of one rank: weight regularizers, gradients summed, weights updated."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import keras
import tensorflow as tf

from tarantella_pp.keras_internals.training import count_step, updates_weights_alone
from tarantella_pp.runtime.modules.gradient_accumulator import Collected
from tarantella_pp.runtime.modules.stage_module import StageModule
from tarantella_pp.runtime.state.owners import Owners
from tarantella_pp.runtime.state.tied_weights import (
    Gradient,
    TiedWeights,
    total,
)

OfStage: TypeAlias = dict[int, Collected]
Collections: TypeAlias = dict[int, OfStage]
Gathered: TypeAlias = tuple[Collections, list[list[Gradient]]]


class OptimizerStep:
    """Applies the optimizer to the weights of one rank's stages.

    It does so stage by stage, so that a rank with several can update those that have run all their
    backward passes while it waits for others. The first stage is last, together with weights that
    several stages use, and with all weights if the optimizer does not treat each by itself. Which
    weights are updated together does not depend on when that is.

    Args:
        optimizer: The rank's optimizer, built for its own weights before it trains. `None` for a
            model that is only evaluated, or has nothing to train.
        modules: The rank's stages.
        order: The model's trainable variables, in its order.
        owners: The ranks of the weights.
        ties: Weights that other ranks use or train, too.
    """

    def __init__(
        self,
        optimizer: Any,
        modules: Mapping[int, StageModule],
        order: Sequence[Any],
        owners: Owners,
        ties: TiedWeights,
    ) -> None:
        self._places: dict[int, list[tuple[int, int]]] = {}
        for stage, module in modules.items():
            for i, weight in enumerate(module.accumulator.weights):
                self._places.setdefault(id(weight), []).append((stage, i))
        self._sums = {stage: module.accumulator for stage, module in modules.items()}
        self._ties = ties
        self._optimizer = optimizer
        self._last = min(modules)
        self._groups: dict[int, list[Any]] = {stage: [] for stage in modules}
        apart = updates_weights_alone(optimizer)
        for weight in filter(owners.is_own, order):
            self._groups[self._stage_of(weight) if apart else self._last].append(weight)
        self._steps = {
            stage: tf.function(
                functools.partial(self._apply, stage), autograph=False, reduce_retracing=True
            )
            for stage in modules
        }
        self._ahead: Collections = {}
        self._trains = bool(order)
        self._applying = False
        self._penalty = tf.function(self._regularization, autograph=False)

    def _stage_of(self, weight: Any) -> int:
        """The stage with which a weight is updated, if they need not all be updated at once."""
        places = self._places.get(id(weight), [])  # none where its results are not needed
        return places[0][0] if len(places) == 1 and not self._ties.is_tied(weight) else self._last

    def regularization_loss(self) -> tf.Tensor:
        """The sum of the weight regularizers, once per batch; in Keras' default float type."""
        return self._penalty()

    @property
    def penalizes(self) -> bool:
        """Whether weight regularizers add to the loss."""
        return any(w.regularizer is not None for ws in self._groups.values() for w in ws)

    @property
    def has_deferred_matmuls(self) -> bool:
        """Whether there are sums to finish; known after the first backward pass."""
        return any(sums.multiplies for sums in self._sums.values())

    def finish_deferred_matmuls(self) -> None:
        """Does what is left of summing up gradients, as far as it is no part of `apply`."""
        for sums in self._sums.values():
            sums.finish()

    def apply_early(self, stage: int) -> bool:
        """Updates the weights of a stage before the step ends.

        Args:
            stage: A stage that has run all its backward passes.

        Returns:
            Whether there was anything to do that need not wait for other stages.
        """
        if stage == self._last or stage in self._ahead or not self._groups[stage]:
            return False
        self._applying = True
        self._ahead[stage] = self._apply_stage(stage, self._sums[stage].take_collected())
        return True

    def gather(self) -> Gathered:
        """Brings together the gradients that have been summed up, those of other ranks, too."""
        collected = {
            stage: self._ahead[stage] if stage in self._ahead else sums.take_collected()
            for stage, sums in self._sums.items()
        }
        self._ties.hand_over(lambda weight: self._summed(weight, collected))
        arrived = self._ties.collect()
        return collected, [arrived.get(id(weight), []) for weight in self._groups[self._last]]

    def apply(self, gradients: Gathered) -> None:
        """Updates the weights that have not been, and begins new sums.

        Args:
            gradients: What `gather` returned.
        """
        collected, arrived = gradients
        self._applying = True
        for stage, weights in self._groups.items():
            if weights and stage != self._last and stage not in self._ahead:
                collected[stage] = self._apply_stage(stage, collected[stage])
        self._steps[self._last](collected, arrived)
        self._applying = False
        self._ahead.clear()
        for sums in self._sums.values():
            sums.reset()
        self._ties.publish()

    def clear(self, error: BaseException) -> None:
        """Forgets a step that an error ended; says so if weights have been updated in part.

        Args:
            error: The error.
        """
        self._ahead.clear()
        if self._applying:
            self._applying = False
            error.add_note(
                "This came while the optimizer updated the weights: some may have made the step, "
                "others not. Load weights before you train on."
            )

    def _apply_stage(self, stage: int, collected: OfStage) -> OfStage:
        """Updates the weights of one stage; returns what was collected of others that it has."""
        weights = self._groups[stage]
        self._steps[stage]({stage: collected}, [[]] * len(weights))
        done = set(map(id, weights))
        every = self._sums[stage].weights
        return {i: parts for i, parts in collected.items() if id(every[i]) not in done}

    def _regularization(self) -> tf.Tensor:
        dtype = keras.config.floatx()
        own = [weight for weights in self._groups.values() for weight in weights]
        terms = [tf.cast(w.regularizer(w), dtype) for w in own if w.regularizer]
        return tf.add_n([tf.zeros((), dtype), *terms])

    def _apply(self, stage: int, collected: Collections, arrived: list[list[Gradient]]) -> None:
        weights = self._groups[stage]
        gradients = [
            self._gradient(weight, total([self._summed(weight, collected), *far]))
            for weight, far in zip(weights, arrived, strict=True)
        ]
        if any(gradient is not None for gradient in gradients):
            self._optimizer.apply(gradients, weights)
        elif self._trains:
            count_step(self._optimizer)
        if stage != self._last:  # all of them are one step
            self._optimizer.iterations.assign_sub(1)

    def _summed(self, weight: Any, collected: Collections) -> Gradient:
        """The sum of a weight's gradients over micro-batches and over this rank's stages."""
        places = self._places.get(id(weight), [])
        return total([self._sums[s].gradient(i, collected[s]) for s, i in places])

    def _gradient(self, weight: Any, gradient: Gradient) -> Any:
        """Adds the gradient of the weight's regularizer."""
        if weight.regularizer is None:
            return gradient
        with tf.GradientTape() as tape:
            penalty = weight.regularizer(weight)
        own = tape.gradient(penalty, weight.value)
        return own if gradient is None else tf.convert_to_tensor(gradient) + own
