"""What a model is compiled with, as one rank of its pipeline needs it: optimizer and metrics."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import Any, TypeAlias

import keras
import numpy as np
import tensorflow as tf

from tarantella_pp.errors import ConfigurationError
from tarantella_pp.internals import optimizers
from tarantella_pp.internals.parted import columns_of, in_parts, whole_of, wholes
from tarantella_pp.internals.training import (
    build_metrics,
    compiled_loss,
    compiled_metrics,
    track_loss,
)
from tarantella_pp.partition.graph.keras_reader import ExtractedModel
from tarantella_pp.partition.plan.plan_parts import OutputUse
from tarantella_pp.runtime.batch import Batch, made_of
from tarantella_pp.runtime.comm.collective import on_all_ranks, on_one_rank
from tarantella_pp.runtime.comm.process_groups import refuse_unlike
from tarantella_pp.runtime.loss import BatchLoss
from tarantella_pp.runtime.probes.compilation_probe import (
    loss_kinds,
    refuse_weights_reached,
    why_not_by_parts,
)
from tarantella_pp.runtime.stage.graph_functions import (
    CompiledFunction,
    CompiledUpdate,
    dense_tensors,
)
from tarantella_pp.runtime.stage.model_outputs import pack_outputs, symbolic_outputs
from tarantella_pp.runtime.stage.stage_boundary import StageBoundary, shape_and_dtype
from tarantella_pp.runtime.stage.stage_module import StageModule
from tarantella_pp.runtime.weights.rank_weights import Bucket, PlacedModel, RankWeights
from tarantella_pp.runtime.weights.slices import Gradient, total, unmarked

# What is sparse of the gradients, by stage and by the weight's place in it.
Collected: TypeAlias = dict[int, dict[int, tf.IndexedSlices]]
# Gradients that other ranks have sent of weights that this one trains, by their id.
Arrived: TypeAlias = dict[int, list[Gradient]]


# micro-batches -> stages of this rank -> tied weights -> replicas -> norm over ranks -> update
# accumulators     `_local_gradients`     `gather`        `reduce`    `_measure`         `apply`
class OptimizerStep:
    """Applies the optimizer to the weights that this rank trains, all of them at once."""

    def __init__(
        self,
        optimizer: Any,
        modules: Mapping[int, StageModule],
        order: Sequence[Any],
        own: RankWeights,
    ) -> None:
        self._own = own
        has_parts = any(map(columns_of, order))
        self._clips = optimizers.clips_by_norm(optimizer, has_parts)
        several = has_parts or own.table.ranks.size > 1
        self._together = several and (self._clips or optimizers.scales_dynamically(optimizer))
        self._reduction = own.make_reduction()
        self._started: set[Bucket] = set()
        self._taken: Collected = {}
        self._places: dict[int, list[tuple[int, int]]] = {}
        for stage, module in modules.items():
            for i, weight in enumerate(module.accumulator.weights):
                self._places.setdefault(id(weight), []).append((stage, i))
        self._sums = {stage: module.accumulator for stage, module in modules.items()}
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
        self._update = CompiledUpdate(self._apply_gradients)
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
        weights = self._own.buckets[stage, bucket]
        # What other stages add, of this rank or of others, is there only when `gather` is called.
        tied = self._own.ties.tied
        if not any(len(self._places.get(id(w), ())) > 1 or id(w) in tied for w in weights):
            self._start((stage, bucket), {}, counts)

    def gather(self, counts: bool) -> Arrived:
        """Brings together the gradients that have been summed up, also on other ranks."""
        collected = self._collected(self._sums)
        self._own.ties.hand_over(lambda weight: self._summed(weight, collected))
        arrived = self._own.ties.collect()
        for key in self._own.buckets:
            if key not in self._started:
                self._start(key, arrived, counts)
        return arrived

    def finish_reductions(self) -> list[Gradient]:
        """Waits for the gradients that are being added up over the replicas."""
        found: dict[int, Gradient] = {}
        for key, weights in self._own.buckets.items():
            found.update(zip(map(id, weights), self._reduction.finish(key), strict=True))
        return [found.get(id(weight)) for weight in self._weights]

    def apply(self, arrived: Arrived, reduced: list[Gradient]) -> None:
        """Updates the weights, and begins new sums."""
        self._applying = True  # from here on an error leaves weights half updated
        # Without replicas the sums are taken inside the compiled update, which saves a copy.
        sums: Any = reduced
        if not self._own.buckets:
            sums = self._collected(self._sums), [arrived.get(id(w), []) for w in self._weights]
        if self._together:  # all ranks must know how long the gradients are, and whether finite
            sums, numbers = self._measure(sums)
            totals = np.zeros(1 + len(self._trained))
            totals[np.append(True, self._trained)] = numbers
            self._own.table.ranks.allreduce(totals)
            self._update(sums, tf.constant(totals))
        else:
            self._update(sums)
        self._applying = False
        self._forget()
        for sums_of_stage in self._sums.values():
            sums_of_stage.reset()
        self._own.spread()  # updated shards, to the replicas that have the others
        self._own.ties.copies.publish()

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
        weights = self._own.buckets[key]
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
        terms = [tf.cast(_penalty(w), dtype) for w in self._weights if w.regularizer]
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
        if not self._own.buckets:
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
            penalty = _penalty(weight)
        seed = None if scale is None else tf.cast(scale, penalty.dtype)
        own = tape.gradient(penalty, weight.value, output_gradients=seed)
        if own is None or gradient is None:
            return gradient if own is None else own
        return tf.convert_to_tensor(gradient) + own


def _penalty(weight: Any) -> tf.Tensor:
    """What the regularizer of a weight adds to the loss, of any shape as in Keras."""
    return tf.reduce_sum(tf.convert_to_tensor(weight.regularizer(weight)))


def _compiled(function: Callable[..., Any]) -> Any:
    return tf.function(function, autograph=False, reduce_retracing=True)


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
        self._make_logs = _compiled(self._logs)

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

    def update(self, targets: Any, results: Sequence[tf.Tensor], signature: Hashable) -> None:
        """Updates the metrics with some samples; `targets` are these and their weights."""
        if self._metrics is None:
            return
        arguments = (targets, list(results))
        if signature not in self._compiled:
            self._compiled[signature] = CompiledFunction.like(
                self._update, arguments, any_rows=True
            )
        self._compiled[signature](*dense_tensors(arguments))

    def logs(self, loss: tf.Tensor, each: Sequence[tf.Tensor], rows: int) -> Mapping[str, Any]:
        """Updates the loss trackers with one batch; returns Keras' logs."""
        logs: Mapping[str, Any] = self._make_logs(loss, list(each), tf.constant(rows))
        return logs

    def _update(self, targets: Any, results: list[tf.Tensor]) -> None:
        y, weight = targets
        self._metrics.update_state(y, self._pack(results), weight)

    def _logs(self, loss: tf.Tensor, each: list[tf.Tensor], rows: tf.Tensor) -> Any:
        track_loss(self._model, loss, rows)
        compiled = compiled_loss(self._model)
        trackers = [] if compiled is None else compiled.metrics
        # As in Keras' own step, where the number of samples is not known: each batch counts once.
        for tracker, value in zip(trackers, each, strict=False):
            tracker.update_state(value)
        return keras.Model.get_metrics_result(self._model)


class Compilation:
    """Loss, metrics and optimizer of a compiled model; all ranks make it with their first batch."""

    def __init__(
        self,
        model: Any,
        placed: PlacedModel,
        batch: Batch,
        *,
        boundary: StageBoundary,
        modules: Mapping[int, StageModule],
        weights: RankWeights,
    ) -> None:
        extracted, last_rank = placed.extracted, placed.placement[-1]
        y, weight = (made_of(description, keras.KerasTensor) for description in batch.targets)
        outputs = symbolic_outputs(extracted)
        self.loss_per_sample = bool(build_metrics(model, y, outputs, weight))
        if self.loss_per_sample and placed.groups.num_replicas > 1:
            raise ConfigurationError(
                "Replicas add up their losses, and the compiled loss has a value for each sample "
                "instead of one for the batch. Use reduction='sum_over_batch_size' or 'sum'. "
                f"Received: reduction=None, num_replicas={placed.groups.num_replicas}"
            )
        self.coupling, kinds = loss_kinds(compiled_loss(model), extracted, y)
        given = y, outputs, weight
        constants = refuse_weights_reached(model, extracted, weights.table, last_rank, given)
        refuse_unlike(placed.groups, constants)
        self.metrics: BatchMetrics | None = None
        self.loss: BatchLoss | None = None
        ranks = placed.groups.pipeline
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
        on_all_ranks(placed.groups.world, "compute the penalties of its weights", self.penalty)

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
