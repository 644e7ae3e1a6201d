"""The updates of a step: gradients of all replicas added up, then applied by the optimizer."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import tensorflow as tf

from tarantella_pp.models.own_steps.step_trace import Update
from tarantella_pp.partition.options import fusion_threshold_of
from tarantella_pp.runtime.comm.communicator import Communicator
from tarantella_pp.runtime.probes.parts import MEAN
from tarantella_pp.runtime.replicas.gradient_reduction import (
    Gradient,
    GradientReduction,
    in_buckets,
)


class ReplicaUpdates:
    """Makes the updates of a step those of the whole batch."""

    def __init__(
        self,
        updates: Sequence[Update],
        kinds: Mapping[tuple[int, int], str],
        ranks: Communicator,
        gradient_dtype: str | None,
    ) -> None:
        self._updates = list(updates)
        self._kinds = kinds
        self._buckets: dict[tuple[int, int], list[int]] = {}
        threshold = fusion_threshold_of(None)
        for number, update in enumerate(updates):
            for place, bucket in enumerate(in_buckets(update.variables, threshold)):
                self._buckets[number, place] = bucket
        weights = {
            key: [updates[key[0]].variables[i] for i in bucket]
            for key, bucket in self._buckets.items()
        }
        self._reduction = GradientReduction(ranks, weights, gradient_dtype)
        self._apply = [_compiled(update) for update in updates]

    def make(self, number: int, tensors: Sequence[tf.Tensor], share: float) -> None:
        """Makes an update; all replicas must call it."""
        gradients = self._updates[number].rebuilt(tensors)
        keys = [key for key in self._buckets if key[0] == number]
        for key in keys:
            own = [(i, gradients[i]) for i in self._buckets[key]]
            self._reduction.start(key, [self._weighted(number, i, g, share) for i, g in own])
        for key in keys:
            found = zip(self._buckets[key], self._reduction.finish(key), strict=True)
            for i, gradient in found:
                gradients[i] = gradient
        self._apply[number](gradients)

    def _weighted(self, number: int, i: int, gradient: Gradient, share: float) -> Gradient:
        """What a replica adds to a gradient of the whole batch."""
        if gradient is None or not share:
            return None
        if self._kinds[number, i] != MEAN:
            return gradient
        factor = tf.constant(share, gradient.dtype)
        if isinstance(gradient, tf.IndexedSlices):
            return tf.IndexedSlices(
                gradient.values * factor, gradient.indices, gradient.dense_shape
            )
        return gradient * factor


def _compiled(update: Update) -> Callable[[list[Gradient]], Any]:
    def apply(gradients: list[Gradient]) -> None:
        update.optimizer.apply(gradients, update.variables)

    compiled: Callable[[list[Gradient]], Any] = tf.function(
        apply, autograph=False, reduce_retracing=True
    )
    return compiled
