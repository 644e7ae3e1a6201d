"""Logs of loss and metrics on the rank of the last stage, as Keras computes them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import keras
import tensorflow as tf

from tarantella_pp.keras_internals.training import compiled_loss, compiled_metrics, track_loss
from tarantella_pp.partition.extraction.keras_reader import ExtractedModel
from tarantella_pp.runtime.batch.batch import Batch
from tarantella_pp.runtime.batch.metric_updates import MetricUpdates
from tarantella_pp.runtime.modules.model_outputs import output_spec, pack_outputs
from tarantella_pp.runtime.modules.stage_boundary import StageBoundary


class LossAndMetrics:
    """The compiled loss and metrics of a model, applied to the outputs of a pipeline.

    Attributes:
        metrics: Updates the metrics.
    """

    def __init__(self, model: Any, extracted: ExtractedModel, boundary: StageBoundary) -> None:
        self._model = model
        self._extracted = extracted
        self._results = boundary.model_outputs
        self._activations = boundary.activations
        self.metrics = MetricUpdates(compiled_metrics(model), self._pack)
        self._finish = tf.function(self._update, autograph=False, reduce_retracing=True)

    def why_whole(self, batch: Batch) -> str | None:
        """Finds out why the metrics need all outputs of a batch at once; `None` if they do not."""
        outputs = [output_spec(self._extracted, tensor) for tensor in self._results]
        return self.metrics.why_whole(batch, outputs, replicas=len(batch.shares) > 1)

    def finish(self, loss: tf.Tensor, each: Sequence[tf.Tensor], rows: int) -> Mapping[str, Any]:
        """Updates the loss trackers with one batch, and the metrics with what is left of it."""
        self.metrics.finish()
        logs: Mapping[str, Any] = self._finish(loss, list(each), tf.constant(rows))
        return logs

    def _update(self, loss: tf.Tensor, each: list[tf.Tensor], rows: tf.Tensor) -> Mapping[str, Any]:
        model = self._model
        track_loss(model, loss, rows)
        compiled = compiled_loss(model)
        trackers = [] if compiled is None else compiled.metrics
        # As in Keras' own step, where the number of samples is not known: each batch counts once.
        for tracker, value in zip(trackers, each, strict=False):
            tracker.update_state(value)
        logs: Mapping[str, Any] = keras.Model.get_metrics_result(model)
        return logs

    def _pack(self, results: Sequence[tf.Tensor]) -> Any:
        values = dict(zip(self._results, results, strict=True))
        return pack_outputs(self._extracted, values, self._activations)
