"""What a model is compiled with, as one rank of its pipeline needs it."""

from __future__ import annotations

import functools
from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import keras
import tensorflow as tf

from tarantella_pp.errors import ConfigurationError
from tarantella_pp.internals.parted import in_parts
from tarantella_pp.internals.training import (
    build_metrics,
    compiled_loss,
    compiled_metrics,
    track_loss,
)
from tarantella_pp.partition.graph.keras_reader import ExtractedModel
from tarantella_pp.partition.plan.plan_parts import OutputUse
from tarantella_pp.runtime.batch import Batch, made_of
from tarantella_pp.runtime.comm.collective import on_one_rank
from tarantella_pp.runtime.loss import BatchLoss
from tarantella_pp.runtime.optimizer_step import OptimizerStep
from tarantella_pp.runtime.probes.loss_probe import loss_kinds, refuse_weights_reached
from tarantella_pp.runtime.probes.metric_probe import why_not_by_parts
from tarantella_pp.runtime.stage.graph_functions import CompiledFunction, dense_tensors
from tarantella_pp.runtime.stage.model_outputs import pack_outputs, unpacked
from tarantella_pp.runtime.stage.stage_boundary import StageBoundary, shape_and_dtype
from tarantella_pp.runtime.stage.stage_module import StageModule
from tarantella_pp.runtime.weights.rank_weights import RankWeights


class BatchMetrics:
    """The metrics of a model and its logs, on the rank of the last stage.

    A metric is additive if parts of a batch add to its state what the batch adds, as with all of
    Keras' own but means of something that looks at several samples.
    Where all are, they are updated with each micro-batch, and its outputs are let go. Otherwise all
    outputs are kept, and metrics updated with all at once.
    """

    def __init__(self, model: Any, extracted: ExtractedModel, boundary: StageBoundary) -> None:
        self._model = model
        self._metrics = compiled_metrics(model)
        self._pack = functools.partial(pack_outputs, extracted, boundary)
        looks = (shape_and_dtype(extracted.graph, tensor) for tensor in boundary.model_outputs)
        self._outputs = [tf.TensorSpec(*look) for look in looks]
        self._compiled: dict[Hashable, CompiledFunction] = {}
        self._make_logs = tf.function(self._logs, autograph=False, reduce_retracing=True)

    @property
    def variables(self) -> list[Any]:
        """The state of the metrics."""
        return [] if self._metrics is None else list(self._metrics.variables)

    def why_whole(self, batch: Batch) -> str | None:
        """Finds out why the metrics need all outputs of a batch at once; `None` if they do not."""
        if self._metrics is None:
            return None
        return why_not_by_parts(
            self._metrics, self._pack, batch.y, self._outputs, batch.sample_weight
        )

    def update(
        self, y: Any, results: Sequence[tf.Tensor], weight: Any, signature: Hashable
    ) -> None:
        """Updates the metrics with some samples."""
        if self._metrics is None:
            return
        arguments = (y, list(results), weight)
        if signature not in self._compiled:
            self._compiled[signature] = CompiledFunction.like(
                self._update, arguments, any_rows=True
            )
        self._compiled[signature](*dense_tensors(arguments))

    def logs(self, loss: tf.Tensor, each: Sequence[tf.Tensor], rows: int) -> Mapping[str, Any]:
        """Updates the loss trackers with one batch; returns Keras' logs."""
        logs: Mapping[str, Any] = self._make_logs(loss, list(each), tf.constant(rows))
        return logs

    def _update(self, y: Any, results: list[tf.Tensor], weight: Any) -> None:
        self._metrics.update_state(y, self._pack(results), weight)

    def _logs(self, loss: tf.Tensor, each: list[tf.Tensor], rows: tf.Tensor) -> Mapping[str, Any]:
        track_loss(self._model, loss, rows)
        compiled = compiled_loss(self._model)
        trackers = [] if compiled is None else compiled.metrics
        # As in Keras' own step, where the number of samples is not known: each batch counts once.
        for tracker, value in zip(trackers, each, strict=False):
            tracker.update_state(value)
        logs: Mapping[str, Any] = keras.Model.get_metrics_result(self._model)
        return logs


class Compilation:
    """Loss, metrics and optimizer of a compiled model; all ranks make it with their first batch."""

    def __init__(
        self,
        model: Any,
        extracted: ExtractedModel,
        batch: Batch,
        *,
        boundary: StageBoundary,
        last_rank: int,
        modules: Mapping[int, StageModule],
        weights: RankWeights,
    ) -> None:
        y, weight = (made_of(description, keras.KerasTensor) for description in batch.targets)
        outputs = unpacked(extracted.outputs_struct)
        self.loss_per_sample = bool(build_metrics(model, y, outputs, weight))
        self.coupling, kinds = loss_kinds(compiled_loss(model), extracted, y)
        given = y, outputs, weight
        refuse_weights_reached(model, extracted, weights.table, last_rank, given)
        self.metrics: BatchMetrics | None = None
        self.loss: BatchLoss | None = None
        ranks = weights.groups.pipeline
        if ranks.rank == last_rank:
            self.metrics = BatchMetrics(model, extracted, boundary)
            self.loss = BatchLoss(model, extracted, boundary, kinds)
        order = in_parts(model.trainable_variables)
        self.update = OptimizerStep(model.optimizer, modules, order, weights)
        # Only a step that has run shows which weights gradients reach.
        self.reach_known = False
        self._model = model
        self._modules = modules
        self._speaks = weights.table.speaks
        self._losses_checked: set[bool] = set()
        self._has_metrics = compiled_metrics(model) is not None
        self._last_rank = last_rank
        self._communicator = ranks
        self._why_whole: dict[bytes, str | None] = {}

    def outputs(self, batch: Batch) -> OutputUse:
        """What loss and metrics need of the model's outputs; all ranks must call it."""
        return OutputUse(self.coupling, self.why_whole(batch), self._has_metrics)

    def why_whole(self, batch: Batch) -> str | None:
        """Why metrics need the whole batch at once, if they do; all ranks must call it."""
        if batch.signature not in self._why_whole:
            found = self.metrics
            self._why_whole[batch.signature] = on_one_rank(
                self._communicator,
                self._last_rank,
                "update the metrics",
                lambda: None if found is None else found.why_whole(batch),
            )
        return self._why_whole[batch.signature]

    def penalty(self) -> tf.Tensor:
        """What the regularizers of this rank's weights add to the loss, counted by one replica."""
        if self._speaks and self.update.penalizes:
            return self.update.penalty()
        return tf.zeros((), keras.config.floatx())

    def check_losses(self, training: bool) -> None:
        """Refuses, as Keras does, a step without a loss, and what cannot be added to its loss."""
        loss = self._model.loss
        if (loss is not None and not self.loss_per_sample) or training in self._losses_checked:
            return
        added = any(module.added_by[training] for module in self._modules.values())
        added = any(self._communicator.allgather_json(added or self.update.penalizes))
        if loss is None and not added:
            raise ConfigurationError(
                "No loss to compute. Provide a `loss` argument in `compile()`, or layers that add "
                "losses. Received: loss=None"
            )
        if self.loss_per_sample and added:
            raise ConfigurationError(
                "The compiled loss has a value for each sample instead of one for the batch, and "
                "regularizers or losses that layers add are one for the batch: Keras does not add "
                "them up either. Use reduction='sum_over_batch_size' or 'sum'. "
                "Received: a loss with reduction=None"
            )
        self._losses_checked.add(training)
