"""Logs of loss and metrics on the rank of the last stage, as Keras computes them."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

import keras
import tensorflow as tf

from tarantella_pp.internals.training import compiled_loss, compiled_metrics, track_loss
from tarantella_pp.partition.costs.peak_memory import WAITING_OUTPUTS
from tarantella_pp.partition.graph.keras_reader import ExtractedModel
from tarantella_pp.runtime.data.batch import Batch
from tarantella_pp.runtime.modules.compiled_function import CompiledFunction, dense_tensors
from tarantella_pp.runtime.modules.model_outputs import output_spec, pack_outputs
from tarantella_pp.runtime.modules.stage_boundary import StageBoundary
from tarantella_pp.runtime.probes.metric_probe import why_not_by_parts


class MetricUpdates:
    """Updates a model's compiled metrics, on the rank of the last stage.

    A metric is additive if it ends in the same state whether it is updated with a batch or with
    its parts, as all of Keras' own are but for means of something that looks at several samples.
    Where all are, they are updated while the rank waits, and outputs are let go. Otherwise all
    outputs of a batch are kept, and the metrics updated with all of it at once.
    """

    def __init__(self, metrics: Any, pack: Callable[[Sequence[tf.Tensor]], Any]) -> None:
        self._metrics = metrics
        self._pack = pack
        self._reasons: dict[Hashable, str | None] = {}
        self._compiled: dict[Hashable, CompiledFunction] = {}
        self._waiting: deque[tuple[Hashable, list[tf.Tensor]]] = deque()

    @property
    def variables(self) -> list[Any]:
        """The state of the metrics."""
        return [] if self._metrics is None else list(self._metrics.variables)

    def why_whole(
        self, batch: Batch, outputs: Sequence[tf.TensorSpec], replicas: bool = False
    ) -> str | None:
        """Finds out why the metrics need the outputs of a whole batch."""
        if self._metrics is None:
            return None
        if batch.signature not in self._reasons:
            self._reasons[batch.signature] = why_not_by_parts(
                self._metrics, self._pack, batch.y, outputs, batch.sample_weight, replicas
            )
        return self._reasons[batch.signature]

    def add(self, y: Any, results: Sequence[tf.Tensor], weight: Any, signature: Hashable) -> None:
        """Takes samples to update the metrics with, now or later."""
        if self._metrics is None:
            return
        arguments = (y, list(results), weight)
        if signature not in self._compiled:
            self._compiled[signature] = CompiledFunction.like(
                self._update, arguments, any_rows=True
            )
        self._waiting.append((signature, dense_tensors(arguments)))

    def run_pending(self) -> bool:
        """Updates the metrics with what has waited longest; returns whether there was anything."""
        if not self._waiting:
            return False
        signature, tensors = self._waiting.popleft()
        self._compiled[signature](*tensors)
        return True

    def flush_overdue(self) -> bool:
        """Does what must not be left for later; returns whether there was anything."""
        return len(self._waiting) > WAITING_OUTPUTS and self.run_pending()

    def finish(self) -> None:
        """Does all that is left."""
        while self.run_pending():
            pass

    def clear(self) -> None:
        """Forgets what is left, of a step that does not end."""
        self._waiting.clear()

    def _update(self, y: Any, results: list[tf.Tensor], weight: Any) -> None:
        self._metrics.update_state(y, self._pack(results), weight)


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
