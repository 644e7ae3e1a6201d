"""A step of the user's that is ready to be run on shares of batches."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import keras
import tensorflow as tf

from tarantella_pp.custom_steps.shared_values import SharedValues
from tarantella_pp.custom_steps.step_probe import StepKinds
from tarantella_pp.custom_steps.step_program import StepProgram
from tarantella_pp.custom_steps.step_trace import StepTrace, Update
from tarantella_pp.partition.options import fusion_threshold_of
from tarantella_pp.runtime.comm.communicator import Communicator
from tarantella_pp.runtime.data.batch import Batch
from tarantella_pp.runtime.probes.parts import MEAN
from tarantella_pp.runtime.weights.forward_state import BatchStatistics
from tarantella_pp.runtime.weights.gradient_reduction import (
    Gradient,
    GradientReduction,
    in_buckets,
)
from tarantella_pp.runtime.weights.process_groups import ReplicaExchange


class PreparedStep:
    """Runs a step on this replica's share of a batch, and makes of it one of the whole batch."""

    def __init__(
        self,
        trace: StepTrace,
        kinds: StepKinds,
        statistics: BatchStatistics,
        ranks: Communicator,
        gradient_dtype: str | None,
    ) -> None:
        self._trace = trace
        self._ranks = ranks
        self._weighted = kinds.weighted
        self._statistics = statistics
        self._program = StepProgram(trace)
        self._updates = ReplicaUpdates(trace.updates, kinds, ranks, gradient_dtype)
        self._values = SharedValues(trace, kinds, ranks)
        self._metrics = tf.function(self._results_of_metrics, autograph=False)

    def run(self, batch: Batch) -> Any:
        """Runs a training or a test step; all replicas must call it."""
        share = batch.share.counted_rows / batch.rows
        found = self._on_own(batch, share)
        shared = self._values.finish(found, share)
        self._statistics.merge(self._ranks, [each.count for each in batch.shares])
        self._statistics.finish()
        of_metrics = iter(self._metrics())
        values = [
            next(of_metrics) if i in self._trace.metric_logs else shared[i]
            for i in range(len(found))
        ]
        return self._trace.results_with([_plain(value) for value in values])

    def predict(self, batch: Batch) -> Any:
        """Runs a prediction step; as `run`, but puts the samples of all replicas together."""
        share = batch.share.counted_rows / batch.rows
        found = self._on_own(batch, share)
        self._values.finish(found, share)
        rows = [each.counted_rows for each in batch.shares]
        return self._trace.results_with(ReplicaExchange(self._ranks).joined(found, rows))

    def clear(self) -> None:
        """Forgets a step that does not end."""
        self._values.clear()
        self._statistics.clear()

    def _on_own(self, batch: Batch, share: float) -> list[tf.Tensor]:
        self._values.begin()
        if self._weighted:
            self._trace.weight.assign(share)
        tensors = [batch.inputs[i] for i in range(len(batch.inputs))]
        return self._program.run(
            tensors, lambda number, gradients: self._updates.make(number, gradients, share)
        )

    def _results_of_metrics(self) -> list[tf.Tensor]:
        logs = [log for _, log in sorted(self._trace.metric_logs.items())]
        found = {id(log.metric): keras.tree.flatten(log.metric.result()) for log in logs}
        return [tf.convert_to_tensor(found[id(log.metric)][log.position]) for log in logs]


def _plain(value: Any) -> Any:
    """A value of the logs as callbacks of Keras get it."""
    array = value.numpy() if isinstance(value, tf.Tensor) else value
    return array if array.ndim else float(array)


class ReplicaUpdates:
    """Makes the updates of a step those of the whole batch."""

    def __init__(
        self,
        updates: Sequence[Update],
        kinds: StepKinds,
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
            fixed = [place for place, (i, _) in enumerate(own) if (number, i) in self._kinds.fixed]
            weighted = [self._weighted(number, i, g, share) for i, g in own]
            self._reduction.start(key, weighted, fixed)
        for key in keys:
            found = zip(self._buckets[key], self._reduction.finish(key), strict=True)
            for i, gradient in found:
                gradients[i] = gradient
        self._apply[number](gradients)

    def _weighted(self, number: int, i: int, gradient: Gradient, share: float) -> Gradient:
        """What a replica adds to a gradient of the whole batch."""
        if gradient is None or not share:
            return None
        if self._kinds.gradients[number, i] != MEAN:
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
