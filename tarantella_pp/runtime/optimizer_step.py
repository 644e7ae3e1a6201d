"""The optimizer step of one rank: weight regularizers, gradients summed, weights updated.

micro-batches -> stages of this rank -> tied weights -> replicas -> norm over ranks -> update
accumulators     `_local_gradients`     `gather`        `reduce`    `_measure`         `apply`
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeAlias

import keras
import numpy as np
import tensorflow as tf

from tarantella_pp.internals import optimizers
from tarantella_pp.internals.parted import columns_of, whole_of, wholes
from tarantella_pp.runtime.stage.stage_module import StageModule
from tarantella_pp.runtime.weights.rank_weights import Bucket, RankWeights
from tarantella_pp.runtime.weights.slices import Gradient, total, unmarked

# What is sparse of the gradients, by stage and by the weight's place in it.
Collected: TypeAlias = dict[int, dict[int, tf.IndexedSlices]]
# Gradients that other ranks have sent of weights that this one trains, by their id.
Arrived: TypeAlias = dict[int, list[Gradient]]


class OptimizerStep:
    """Applies the optimizer to the weights that this rank trains, all of them at once."""

    def __init__(
        self,
        optimizer: Any,
        modules: Mapping[int, StageModule],
        order: Sequence[Any],
        own: RankWeights,
    ) -> None:
        self._ranks = own.table.ranks
        self._spread = own.spread
        has_parts = any(map(columns_of, order))
        self._clips = optimizers.clips_by_norm(optimizer, has_parts)
        several = has_parts or self._ranks.size > 1
        self._together = several and (self._clips or optimizers.scales_dynamically(optimizer))
        self._buckets = own.buckets
        self._reduction = own.make_reduction()
        self._started: set[Bucket] = set()
        self._taken: Collected = {}
        self._places: dict[int, list[tuple[int, int]]] = {}
        for stage, module in modules.items():
            for i, weight in enumerate(module.accumulator.weights):
                self._places.setdefault(id(weight), []).append((stage, i))
        self._sums = {stage: module.accumulator for stage, module in modules.items()}
        self._ties = own.ties
        self.optimizer = optimizer
        # Regularizers have gradients whatever the loss is
        self._needs_no_loss = not order or any(weight.regularizer for weight in order)
        self._trained = np.array([own.table.trains(weight) for weight in order], bool)
        self._weights = list(itertools.compress(order, self._trained))
        numbers = {id(whole): i for i, whole in enumerate(wholes(order))}
        self._wholes = np.array([numbers[id(whole_of(weight))] for weight in order], np.int32)
        self._applying = False
        self._sums_of = {
            key: _compiled(functools.partial(self._local_gradients, weights))
            for key, weights in own.buckets.items()
        }
        self._measure = _compiled(self._measured)
        self._update = _compiled(self._apply_gradients)
        self.penalty = tf.function(self._regularization, autograph=False)

    @functools.cached_property
    def penalizes(self) -> bool:
        """Whether weight regularizers add to the loss."""
        return any(weight.regularizer is not None for weight in self._weights)

    def has_gradients(self) -> bool:
        """Whether this rank has a gradient of any weight, or there is nothing to train."""
        found = (each.has(i) for each in self._sums.values() for i in range(len(each.weights)))
        return self._needs_no_loss or any(found)

    def reduce(self, stage: int, bucket: int, counts: bool) -> None:
        """Starts to add up the gradients of a bucket over the replicas; never waits."""
        weights = self._buckets[stage, bucket]
        # What other stages add, of this rank or of others, is there only when `gather` is called.
        tied = self._ties.tied
        if not any(len(self._places.get(id(w), ())) > 1 or id(w) in tied for w in weights):
            self._start((stage, bucket), {}, counts)

    def gather(self, counts: bool) -> Arrived:
        """Brings together the gradients that have been summed up, also on other ranks."""
        collected = self._collected(self._sums)
        self._ties.hand_over(lambda weight: self._summed(weight, collected))
        arrived = self._ties.collect()
        for key in self._buckets:
            if key not in self._started:
                self._start(key, arrived, counts)
        return arrived

    def progress(self) -> None:
        """Moves the sums over the replicas on; never waits."""
        if self._started:
            self._reduction.communicator.progress()

    def finish_reductions(self) -> list[Gradient]:
        """Waits for the gradients that are being added up over the replicas."""
        found: dict[int, Gradient] = {}
        for key, weights in self._buckets.items():
            found.update(zip(map(id, weights), self._reduction.finish(key), strict=True))
        return [found.get(id(weight)) for weight in self._weights]

    def apply(self, arrived: Arrived, reduced: list[Gradient]) -> None:
        """Updates the weights, and begins new sums."""
        self._applying = True  # from here on an error leaves weights half updated
        # Without replicas the sums are taken inside the compiled update, which saves a copy.
        sums: Any = reduced
        if not self._buckets:
            sums = self._collected(self._sums), [arrived.get(id(w), []) for w in self._weights]
        if self._together:  # all ranks must know how long the gradients are, and whether finite
            sums, numbers = self._measure(sums)
            totals = np.zeros(1 + len(self._trained))
            totals[np.append(True, self._trained)] = numbers
            self._ranks.allreduce(totals)
            self._update(sums, tf.constant(totals))
        else:
            self._update(sums)
        self._applying = False
        self._forget()
        for sums_of_stage in self._sums.values():
            sums_of_stage.reset()
        self._spread()  # updated shards, to the replicas that have the others
        self._ties.copies.publish()

    def clear(self, error: BaseException) -> None:
        """Forgets a step that an error ended; says so if weights have been updated in part."""
        self._forget()
        if self._applying:
            self._applying = False
            error.add_note(
                "This came while the optimizer updated the weights: some may have made the step, "
                "others not. Load weights before you train on."
            )

    def _forget(self) -> None:
        self._taken.clear()
        self._started.clear()

    def _collected(self, stages: Iterable[int]) -> Collected:
        for stage in stages:
            if stage not in self._taken:
                self._taken[stage] = self._sums[stage].take_collected()
        return {stage: self._taken[stage] for stage in stages}

    def _start(self, key: Bucket, arrived: Arrived, counts: bool) -> None:
        weights = self._buckets[key]
        gradients: list[Gradient] = [None] * len(weights)
        if counts:  # a replica without samples has run one nevertheless
            stages = {stage for w in weights for stage, _ in self._places.get(id(w), [])}
            with self._reduction.communicator.computing():
                sums = self._collected(sorted(stages)), [arrived.get(id(w), []) for w in weights]
                gradients = self._sums_of[key](sums)
        self._started.add(key)
        self._reduction.start(key, gradients)

    # What follows runs inside TensorFlow's functions.

    def _regularization(self) -> tf.Tensor:
        """The sum of the weight regularizers, once per batch; in Keras' default float type."""
        dtype = keras.config.floatx()
        terms = [tf.cast(w.regularizer(w), dtype) for w in self._weights if w.regularizer]
        return tf.add_n([tf.zeros((), dtype), *terms])

    def _local_gradients(
        self, weights: Sequence[Any], sums: tuple[Collected, list[list[Gradient]]]
    ) -> list[Gradient]:
        """The gradients of some weights over all micro-batches of this replica."""
        collected, arrived = sums
        pairs = zip(weights, arrived, strict=True)
        return [total([self._summed(weight, collected), *far]) for weight, far in pairs]

    def _summed(self, weight: Any, collected: Collected) -> Gradient:
        """The sum of a weight's gradients over micro-batches and over this rank's stages."""
        places = self._places.get(id(weight), [])  # none where its results are not needed
        return total([self._sums[s].gradient(i, collected[s]) for s, i in places])

    def _regularized(self, sums: Any) -> list[Gradient]:
        """The gradients of all weights, summed over replicas, regularizers included."""
        if not self._buckets:
            sums = self._local_gradients(self._weights, sums)
        return list(map(self._with_penalty, self._weights, map(unmarked, sums)))

    def _measured(self, sums: Any) -> tuple[list[Gradient], tf.Tensor]:
        """The gradients, and what ranks must know of each other's."""
        gradients = self._regularized(sums)
        return gradients, optimizers.summands(self.optimizer, gradients, self._weights, self._clips)

    def _apply_gradients(self, sums: Any, totals: tf.Tensor | None = None) -> None:
        if totals is None:
            self._step(self._regularized(sums))
        else:
            with optimizers.with_norms(self.optimizer, totals[0] == 0, self._squares(totals[1:])):
                self._step(sums)

    def _squares(self, of_each: tf.Tensor) -> tf.Tensor | None:
        """The sums of squares by which the gradients of this rank's weights are clipped."""
        if not self._clips:
            return None
        groups = self._wholes
        if optimizers.wrapped_in(self.optimizer).global_clipnorm:
            groups = np.zeros_like(groups)
        sums = tf.math.unsorted_segment_sum(of_each, groups, len(groups))
        return tf.gather(sums, groups[self._trained])

    def _step(self, gradients: list[Gradient]) -> None:
        if any(gradient is not None for gradient in gradients):
            # By the name that plain Keras calls: a class may override either.
            self.optimizer.apply_gradients(zip(gradients, self._weights, strict=True))
        elif len(self._trained):
            optimizers.count_step(self.optimizer)

    def _with_penalty(self, weight: Any, gradient: Gradient) -> Any:
        """Adds the gradient of the weight's regularizer, scaled like the loss."""
        if weight.regularizer is None:
            return gradient
        scale = optimizers.loss_scale(self.optimizer)
        with tf.GradientTape() as tape:
            penalty = weight.regularizer(weight)
        seed = None if scale is None else tf.cast(scale, penalty.dtype)
        own = tape.gradient(penalty, weight.value, output_gradients=seed)
        return own if gradient is None else tf.convert_to_tensor(gradient) + own


def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    compiled: Callable[..., Any] = tf.function(function, autograph=False, reduce_retracing=True)
    return compiled
