"""What a model is compiled with, as one rank of its pipeline needs it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import keras
import tensorflow as tf

from tarantella_pp.errors import ConfigurationError
from tarantella_pp.internals.training import build_metrics, compiled_loss, compiled_metrics
from tarantella_pp.partition.graph.keras_reader import ExtractedModel
from tarantella_pp.partition.plan.plan_parts import OutputUse
from tarantella_pp.runtime.data.batch import Batch
from tarantella_pp.runtime.data.batch_announcement import rebuild, tensors_in
from tarantella_pp.runtime.loss import BatchLoss
from tarantella_pp.runtime.loss_and_metrics import LossAndMetrics
from tarantella_pp.runtime.modules.model_outputs import unpacked
from tarantella_pp.runtime.modules.stage_boundary import StageBoundary
from tarantella_pp.runtime.modules.stage_module import StageModule
from tarantella_pp.runtime.one_rank import on_one_rank
from tarantella_pp.runtime.optimizer_step import OptimizerStep
from tarantella_pp.runtime.probes.loss_probe import loss_kinds, whole_batch_reason
from tarantella_pp.runtime.weights.rank_weights import RankWeights


class Compilation:
    """Loss, metrics and optimizer of a compiled model; all ranks make it with their first batch.

    Attributes:
        loss_and_metrics: The metrics, on the rank of the last stage; elsewhere `None`.
        loss: The loss, likewise.
        update: The optimizer's step.
        coupling: Why the loss needs the outputs of the whole batch at once, if it does.
        reach_known: Whether it is known which weights gradients reach.
        loss_per_sample: Whether the compiled loss has a value for each sample.
        tried: The kinds of batches whose steps have been compiled.
    """

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
        y, weight = (_symbolic(description) for description in batch.targets)
        outputs = unpacked(extracted.outputs_struct)
        self.loss_per_sample = bool(build_metrics(model, y, outputs, weight))
        self.coupling, kinds = loss_kinds(compiled_loss(model), extracted, y)
        self.loss_and_metrics: LossAndMetrics | None = None
        self.loss: BatchLoss | None = None
        ranks = weights.groups.pipeline
        if ranks.rank == last_rank:
            self.loss_and_metrics = LossAndMetrics(model, extracted, boundary)
            self.loss = BatchLoss(model, extracted, boundary, kinds)
        self.update = OptimizerStep(model.optimizer, modules, model.trainable_variables, weights)
        self.reach_known = False
        self.tried: set[tuple[bool, bytes, int]] = set()
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
            found = self.loss_and_metrics

            def find() -> str | None:
                return None if found is None else found.why_whole(batch)

            self._why_whole[batch.signature] = on_one_rank(
                self._communicator, self._last_rank, "update the metrics", find
            )
        return self._why_whole[batch.signature]

    def penalty(self) -> tf.Tensor:
        """What the regularizers of this rank's weights add to the loss, counted by one replica."""
        if not self._speaks:
            return tf.zeros((), keras.config.floatx())
        return self.update.regularization_loss()

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

    def clear(self, error: BaseException) -> None:
        """Drops the rest of a step that an error has ended."""
        self.update.clear(error)
        if self.loss_and_metrics is not None:
            self.loss_and_metrics.metrics.clear()


def expected_outputs(loss: Any, has_metrics: bool, extracted: ExtractedModel) -> OutputUse:
    """What loss and metrics need of the outputs as far as it is known before the first batch.

    Metrics are expected not to need the whole batch's, as hardly any does.
    """
    return OutputUse(whole_batch_reason(loss, extracted), None, has_metrics)


def _symbolic(description: Any) -> Any:
    leaves = [keras.KerasTensor(shape, dtype) for shape, dtype in tensors_in(description)]
    return rebuild(description, leaves)
