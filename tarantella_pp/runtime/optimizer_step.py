"""The optimizer step of one rank: weight regularizers, gradients summed, weights updated."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import keras
import numpy as np
import tensorflow as tf

from tarantella_pp.keras_internals.optimizers import (
    count_step,
    looks_at_all_gradients,
    loss_scale,
    summands,
    told,
    updates_weights_alone,
)
from tarantella_pp.runtime.modules.gradient_accumulator import Collected
from tarantella_pp.runtime.modules.stage_module import StageModule
from tarantella_pp.runtime.replicas.gradient_reduction import GradientReduction
from tarantella_pp.runtime.state.rank_weights import Bucket, RankWeights
from tarantella_pp.runtime.state.tied_weights import Gradient, total

OfStage: TypeAlias = dict[int, Collected]
Collections: TypeAlias = dict[int, OfStage]
Gathered: TypeAlias = tuple[Collections, list[list[Gradient]]]


class OptimizerStep:
    """Applies the optimizer to the weights of one rank's stages.

    It does so stage by stage, so that a rank with several can update those that have run all their
    backward passes while it waits for others. The first stage is last, together with weights that
    several stages use, and with all weights if the optimizer does not treat each by itself. Which
    weights are updated together does not depend on when that is.
    """

    def __init__(
        self,
        optimizer: Any,
        modules: Mapping[int, StageModule],
        order: Sequence[Any],
        own: RankWeights,
        reduction: GradientReduction,
    ) -> None:
        self._ranks = own.trainers.ranks
        self._updated = own.updated
        self._together = self._ranks.size > 1 and looks_at_all_gradients(optimizer)
        self._buckets = own.buckets
        self._reduction = reduction
        self._started: set[Bucket] = set()
        self._taken: Collections = {}
        self._places: dict[int, list[tuple[int, int]]] = {}
        for stage, module in modules.items():
            for i, weight in enumerate(module.accumulator.weights):
                self._places.setdefault(id(weight), []).append((stage, i))
        self._sums = {stage: module.accumulator for stage, module in modules.items()}
        self._ties = own.ties
        self._optimizer = optimizer
        self._last = min(modules)
        self._groups: dict[int, list[Any]] = {stage: [] for stage in modules}
        apart = updates_weights_alone(optimizer)
        for weight in filter(own.trainers.is_own, order):
            self._groups[self._stage_of(weight) if apart else self._last].append(weight)
        self._steps = {stage: _compiled(self._apply, stage) for stage in modules}
        self._sums_of = {
            key: _compiled(self._local_gradients, ws) for key, ws in own.buckets.items()
        }
        self._updates = {stage: _compiled(self._update, stage) for stage in modules}
        self._sum_up = _compiled(self._local_gradients, self._groups[self._last])
        self._measure = tf.function(self._measured, autograph=False, reduce_retracing=True)
        self._update_told = tf.function(self._told, autograph=False, reduce_retracing=True)
        self._ahead: Collections = {}
        self._trains = bool(order)
        self._applying = False
        self._penalty = tf.function(self._regularization, autograph=False)

    def _stage_of(self, weight: Any) -> int:
        """The stage with which a weight is updated, if they need not all be updated at once."""
        places = self._places.get(id(weight), [])  # none where its results are not needed
        return places[0][0] if len(places) == 1 and not self._ties.is_tied(weight) else self._last

    def loss_scale(self) -> tf.Tensor | None:
        """What the loss of this step is multiplied with before gradients; `None` for nothing."""
        return loss_scale(self._optimizer)

    def regularization_loss(self) -> tf.Tensor:
        """The sum of the weight regularizers, once per batch; in Keras' default float type."""
        return self._penalty() if self.penalizes else tf.zeros((), keras.config.floatx())

    @functools.cached_property
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
        """Updates the weights of a stage before the step ends."""
        if stage == self._last or stage in self._ahead or not self._groups[stage]:
            return False
        if self._buckets:
            return False
        self._applying = True
        self._ahead[stage] = self._apply_stage(stage, self._sums[stage].take_collected())
        return True

    def reduce(self, stage: int, bucket: int, counts: bool) -> None:
        """Starts to add up the gradients of a bucket over the replicas; never waits."""
        weights = self._buckets[stage, bucket]
        if any(self._ties.is_tied(weight) for weight in weights):
            return  # `gather` will have what other ranks add to it
        self._start((stage, bucket), {stage: self._collected(stage)}, {}, counts)

    def gather(self, counts: bool = True) -> Gathered:
        """Brings together the gradients that have been summed up, those of other ranks, too."""
        collected = {stage: self._collected(stage) for stage in self._sums}
        self._ties.hand_over(lambda weight: self._summed(weight, collected))
        arrived = self._ties.collect()
        for key in self._buckets:
            if key not in self._started:
                self._start(key, collected, arrived, counts)
        return collected, [arrived.get(id(weight), []) for weight in self._groups[self._last]]

    def _collected(self, stage: int) -> OfStage:
        """What was collected of the gradients of a stage in this step."""
        if stage in self._ahead:
            return self._ahead[stage]
        if stage not in self._taken:
            if self._buckets:
                with self._reduction.computing():
                    self._sums[stage].finish()
            self._taken[stage] = self._sums[stage].take_collected()
        return self._taken[stage]

    def _start(
        self,
        key: Bucket,
        collected: Collections,
        arrived: Mapping[int, list[Gradient]],
        counts: bool,
    ) -> None:
        weights = self._buckets[key]
        gradients: list[Gradient] = [None] * len(weights)
        if counts:
            far = [arrived.get(id(weight), []) for weight in weights]
            with self._reduction.computing():
                gradients = self._sums_of[key](collected, far)
        self._started.add(key)
        self._reduction.start(key, gradients)

    def progress(self) -> None:
        """Moves on what is being added up over the replicas; never waits."""
        if self._started:
            self._reduction.progress()

    def finish_reductions(self) -> dict[int, Gradient]:
        """Waits for the gradients that are being added up over the replicas."""
        found: dict[int, Gradient] = {}
        for key, weights in self._buckets.items():
            gradients = self._reduction.finish(key)
            found.update({id(w): g for w, g in zip(weights, gradients, strict=True)})
        return found

    def apply(self, gradients: Gathered, sums: Mapping[int, Gradient]) -> None:
        """Updates the weights that have not been, and begins new sums."""
        self._applying = True
        if self._together:
            self._apply_together(gradients, sums)
        elif self._buckets:
            for stage, weights in self._groups.items():
                if weights or stage == self._last:
                    self._updates[stage]([sums.get(id(weight)) for weight in weights])
        else:
            collected, arrived = gradients
            for stage, weights in self._groups.items():
                if weights and stage != self._last and stage not in self._ahead:
                    collected[stage] = self._apply_stage(stage, collected[stage])
            self._steps[self._last](collected, arrived)
        self._applying = False
        self._forget()
        for sums_of_stage in self._sums.values():
            sums_of_stage.reset()
        if self._updated is not None:
            self._updated.spread()
        self._ties.publish()

    def _apply_together(self, gradients: Gathered, sums: Mapping[int, Gradient]) -> None:
        """Updates all weights once all ranks know how long their gradients are, and if finite."""
        weights = self._groups[self._last]
        own = [sums.get(id(weight)) for weight in weights]
        found, numbers = self._measure(own if self._buckets else self._sum_up(*gradients))
        totals = np.array(numbers)
        self._ranks.allreduce(totals)
        self._update_told(found, tf.constant(totals))

    def _forget(self) -> None:
        self._ahead.clear()
        self._taken.clear()
        self._started.clear()

    def clear(self, error: BaseException) -> None:
        """Forgets a step that an error ended; says so if weights have been updated in part."""
        self._forget()
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
        self._update(stage, self._local_gradients(self._groups[stage], collected, arrived))

    def _local_gradients(
        self, weights: Sequence[Any], collected: Collections, arrived: list[list[Gradient]]
    ) -> list[Gradient]:
        """The gradients of some weights over all micro-batches of this replica."""
        pairs = zip(weights, arrived, strict=True)
        return [total([self._summed(weight, collected), *far]) for weight, far in pairs]

    def _measured(self, sums: list[Gradient]) -> tuple[list[Gradient], tf.Tensor]:
        """The gradients with those of regularizers, and what ranks must know of each other's."""
        weights = self._groups[self._last]
        pairs = zip(weights, sums, strict=True)
        gradients = [self._gradient(weight, gradient) for weight, gradient in pairs]
        return gradients, summands(self._optimizer, gradients, weights)

    def _told(self, gradients: list[Gradient], totals: tf.Tensor) -> None:
        with told(self._optimizer, totals):
            self._step(self._last, gradients)

    def _update(self, stage: int, sums: list[Gradient]) -> None:
        pairs = zip(self._groups[stage], sums, strict=True)
        self._step(stage, [self._gradient(weight, gradient) for weight, gradient in pairs])

    def _step(self, stage: int, gradients: list[Gradient]) -> None:
        weights = self._groups[stage]
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
        """Adds the gradient of the weight's regularizer, multiplied as that of the loss is."""
        if weight.regularizer is None:
            return gradient
        scale = loss_scale(self._optimizer)
        with tf.GradientTape() as tape:
            penalty = weight.regularizer(weight)
        seed = None if scale is None else tf.cast(scale, penalty.dtype)
        own = tape.gradient(penalty, weight.value, output_gradients=seed)
        return own if gradient is None else tf.convert_to_tensor(gradient) + own


def _compiled(function: Callable[..., Any], of: Any) -> Callable[..., Any]:
    """A part of the step for one stage or for some weights."""
    bound = functools.partial(function, of)
    compiled: Callable[..., Any] = tf.function(bound, autograph=False, reduce_retracing=True)
    return compiled
