"""What a model is compiled with, as one rank of its pipeline needs it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import keras

from tarantella_pp.keras_internals.training import build_metrics, compiled_loss, compiled_metrics
from tarantella_pp.partition.extraction.keras_reader import ExtractedModel
from tarantella_pp.partition.plan.plan_parts import OutputUse
from tarantella_pp.runtime.batch.batch import Batch
from tarantella_pp.runtime.batch.loss import BatchLoss
from tarantella_pp.runtime.batch.loss_and_metrics import LossAndMetrics
from tarantella_pp.runtime.batch.nested_structure import rebuild, tensors_in
from tarantella_pp.runtime.modules.model_outputs import unpacked
from tarantella_pp.runtime.modules.stage_boundary import StageBoundary
from tarantella_pp.runtime.modules.stage_module import StageModule
from tarantella_pp.runtime.one_rank import on_one_rank
from tarantella_pp.runtime.optimizer_step import Bucket, OptimizerStep
from tarantella_pp.runtime.probes.loss_probe import whole_batch_reason
from tarantella_pp.runtime.replicas.gradient_reduction import GradientReduction
from tarantella_pp.runtime.replicas.owned_values import OwnedValues
from tarantella_pp.runtime.replicas.process_groups import ProcessGroups
from tarantella_pp.runtime.state.tied_weights import TiedWeights
from tarantella_pp.runtime.state.trainers import Trainers


class Compilation:
    """Loss, metrics and optimizer of a compiled model; all ranks make it with their first batch.

    Args:
        model: The compiled Keras model.
        extracted: The model's graph and calls.
        batch: A batch with its targets, for which metrics are built on every rank alike.
        boundary: The border of the last stage.
        last_rank: The rank of the last stage, which computes loss and metrics.
        modules: What this rank's stages compute with.
        owners: The ranks that update weights.
        ties: The weights that several ranks have.
        groups: The ranks of the job.
        buckets: The weights whose gradients are added up together over the replicas.
        updated: The weights that replicas update for each other.
        gradient_dtype: Dtype in which gradients travel between replicas; `None` for their own.

    Attributes:
        loss_and_metrics: The metrics, on the rank of the last stage; elsewhere `None`.
        loss: The loss, likewise.
        update: The optimizer's step.
        coupling: Why the loss needs the outputs of the whole batch at once, if it does.
        reach_known: Whether it is known which weights gradients reach.
        loss_per_sample: Whether the compiled loss has a value for each sample.
        tried: The kinds of batches whose steps have been compiled.
        losses_checked: Whether it has been checked, in training or not, what layers add to it.
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
        owners: Trainers,
        ties: TiedWeights,
        groups: ProcessGroups,
        buckets: Mapping[Bucket, Sequence[Any]],
        updated: OwnedValues | None,
        gradient_dtype: str | None,
    ) -> None:
        y, weight = (_symbolic(description) for description in batch.targets)
        outputs = unpacked(extracted.outputs_struct)
        self.loss_per_sample = bool(build_metrics(model, y, outputs, weight))
        self.coupling = whole_batch_reason(compiled_loss(model), extracted, y)
        self.loss_and_metrics: LossAndMetrics | None = None
        self.loss: BatchLoss | None = None
        if groups.pipeline.rank == last_rank:
            self.loss_and_metrics = LossAndMetrics(model, extracted, boundary)
            self.loss = BatchLoss(model, extracted, boundary)
        shared_out = None
        if updated is not None:
            shared_out = {key: [*map(owners.replica, ws)] for key, ws in buckets.items()}
        self.update = OptimizerStep(
            model.optimizer,
            modules,
            model.trainable_variables,
            owners,
            ties,
            buckets,
            GradientReduction(groups.peers, buckets, gradient_dtype, owners=shared_out),
            updated,
        )
        self.reach_known = False
        self.losses_checked: set[bool] = set()
        self.tried: set[tuple[bool, bytes, int]] = set()
        self._has_metrics = compiled_metrics(model) is not None
        self._last_rank = last_rank
        self._communicator = groups.pipeline
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

    def clear(self, error: BaseException) -> None:
        """Drops what is left of a step that an error has ended."""
        self.update.clear(error)
        if self.loss_and_metrics is not None:
            self.loss_and_metrics.metrics.clear()


def expected_outputs(loss: Any, has_metrics: bool, extracted: ExtractedModel) -> OutputUse:
    """What loss and metrics need of the outputs as far as it is known before the first batch.

    Metrics are expected not to need those of the whole batch, as hardly any does.

    Args:
        loss: The `CompileLoss` of the model; `None` for none.
        has_metrics: Whether there are metrics.
        extracted: The model's graph and calls.
    """
    return OutputUse(whole_batch_reason(loss, extracted), None, has_metrics)


def _symbolic(description: Any) -> Any:
    leaves = [keras.KerasTensor(shape, dtype) for shape, dtype in tensors_in(description)]
    return rebuild(description, leaves)
