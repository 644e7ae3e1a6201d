"""A step of the user's that is ready to be run on shares of batches."""

from __future__ import annotations

from typing import Any

import keras
import tensorflow as tf

from tarantella_pp.models.own_steps.replica_updates import ReplicaUpdates
from tarantella_pp.models.own_steps.shared_values import SharedValues
from tarantella_pp.models.own_steps.step_probe import StepKinds
from tarantella_pp.models.own_steps.step_program import StepProgram
from tarantella_pp.models.own_steps.step_trace import StepTrace
from tarantella_pp.runtime.batch.batch import Batch
from tarantella_pp.runtime.comm.communicator import Communicator
from tarantella_pp.runtime.replicas.forward_state import BatchStatistics
from tarantella_pp.runtime.replicas.replica_exchange import ReplicaExchange


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
        self._updates = ReplicaUpdates(trace.updates, kinds.gradients, ranks, gradient_dtype)
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
