"""Loss and metrics on the rank of the last stage, as Keras computes them in one process."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import keras
import tensorflow as tf

from tarantella_pp.partition.extraction import ExtractedModel
from tarantella_pp.runtime.compiled import Compiled, dense_tensors
from tarantella_pp.runtime.feed import Batch
from tarantella_pp.runtime.keras_training import compiled_losses, is_keras_loss, second_loss
from tarantella_pp.runtime.layout import Port
from tarantella_pp.runtime.metric_updates import MetricUpdates
from tarantella_pp.runtime.outputs import pack_outputs

_COMPILED_SIGNATURES = 8
_MEANS = ("sum_over_batch_size", "mean")


class Scoring:
    """The compiled loss and metrics of a model, applied to the outputs of a pipeline.

    Gradients come from the loss of each micro-batch, weighted by its share of the batch, where
    that sums up to the loss of the batch; otherwise from the loss of the whole batch.

    Args:
        model: The compiled model, its metrics built.
        extracted: The model's graph.
        results: The model's outputs with their masks, as the last stage gives them.

    Attributes:
        metrics: Updates the metrics.
        reached: The output tensors that the loss depends on; known once gradients were computed.
    """

    def __init__(self, model: Any, extracted: ExtractedModel, results: Sequence[Port]) -> None:
        self._model = model
        self._extracted = extracted
        self._results = tuple(results)
        self._loss = second_loss(model)
        self.metrics = MetricUpdates(model._compile_metrics, self._pack)
        self.reached: set[int] = set()
        self._sources = [
            i
            for i, port in enumerate(self._results)
            if not port.mask and extracted.graph.tensors[port.tensor].has_gradient
        ]
        self._differentiate = tf.function(self._gradients, autograph=False, reduce_retracing=True)
        self._compiled: dict[Hashable, Compiled] = {}
        self._finish = tf.function(self._update, autograph=False, reduce_retracing=True)

    @property
    def keeps_outputs(self) -> bool:
        """Whether the logs of losses need the outputs of the whole batch."""
        return len(self._extracted.graph.outputs) > 1

    def why_whole(self, batch: Batch) -> str | None:
        """Finds out why the metrics need all outputs of a batch at once; `None` if they do not.

        Args:
            batch: A batch with its targets; of batches of one structure the first decides.
        """
        return self.metrics.why_whole(batch, [self._spec(port) for port in self._results])

    def gradients(
        self,
        y: Any,
        results: Sequence[tf.Tensor],
        sample_weight: Any,
        factor: tf.Tensor,
        signature: Hashable,
    ) -> tuple[tf.Tensor, dict[Port, tf.Tensor]]:
        """Loss of some samples, and its gradient.

        Args:
            y: Their targets.
            results: The model's outputs with their masks.
            sample_weight: Their weights, or `None`.
            factor: Scalar to multiply the loss with.
            signature: Names the structure, shapes and dtypes of the arguments.

        Returns:
            The scaled loss, and its gradient with respect to each output.
        """
        arguments = (y, list(results), sample_weight, factor)
        if signature not in self._compiled and len(self._compiled) < _COMPILED_SIGNATURES:
            self._compiled[signature] = Compiled.like(self._gradients, arguments)
        if signature in self._compiled:
            loss, *found = self._compiled[signature](*dense_tensors(arguments))
        else:
            loss, found = self._differentiate(*arguments)
        ports = [self._results[i] for i in self._sources]
        return loss, dict(zip(ports, found, strict=True))

    def finish(
        self,
        y: Any,
        results: Sequence[tf.Tensor],
        sample_weight: Any,
        loss: tf.Tensor,
        rows: int,
    ) -> Mapping[str, Any]:
        """Updates the loss tracker with one batch, and the metrics with what is left of it.

        Args:
            y: Targets of the batch.
            results: The model's outputs with their masks; empty where they were let go.
            sample_weight: Weights of the samples, or `None`.
            loss: What adds to the loss of the outputs, or with it if `results` is empty.
            rows: Number of samples.

        Returns:
            Keras' logs.
        """
        self.metrics.finish()
        arguments = (y, list(results), sample_weight, loss, tf.constant(rows))
        logs: Mapping[str, Any] = self._finish(*arguments)
        return logs

    def _gradients(
        self, y: Any, results: list[tf.Tensor], sample_weight: Any, factor: tf.Tensor
    ) -> tuple[tf.Tensor, list[tf.Tensor]]:
        sources = [results[i] for i in self._sources]
        if self._loss is None:
            return tf.zeros((), factor.dtype), [tf.zeros_like(source) for source in sources]
        with tf.GradientTape(watch_accessed_variables=False) as tape:
            tape.watch(sources)
            loss = self._loss(y, self._pack(results), sample_weight)
            scaled = loss * tf.cast(factor, loss.dtype)
        found = tape.gradient(scaled, sources)
        pairs = list(zip(self._sources, found, strict=True))
        self.reached = {self._results[i].tensor for i, gradient in pairs if gradient is not None}
        gradients = [
            tf.zeros_like(s) if g is None else g for s, g in zip(sources, found, strict=True)
        ]
        return tf.cast(scaled, factor.dtype), gradients

    def _update(
        self,
        y: Any,
        results: list[tf.Tensor],
        sample_weight: Any,
        loss: tf.Tensor,
        rows: tf.Tensor,
    ) -> Mapping[str, Any]:
        model = self._model
        if results and model._compile_loss is not None:
            y_pred = self._pack([_any_rows(result) for result in results])
            loss += tf.cast(model._compile_loss(y, y_pred, sample_weight), loss.dtype)
        model._loss_tracker.update_state(loss, sample_weight=rows)
        logs: Mapping[str, Any] = keras.Model.get_metrics_result(model)
        return logs

    def _spec(self, port: Port) -> tf.TensorSpec:
        tensor = self._extracted.graph.tensors[port.tensor]
        if port.mask:
            return tf.TensorSpec(tensor.mask_shape, tf.bool)
        return tf.TensorSpec(tensor.shape, tensor.dtype)

    def _pack(self, results: Sequence[tf.Tensor]) -> Any:
        return pack_outputs(self._extracted, dict(zip(self._results, results, strict=True)))


def loss_coupling(model: Any, results: Sequence[Port], weighted: bool) -> str | None:
    """Why the loss of a batch is not the mean of the losses of its micro-batches.

    Args:
        model: The compiled model, its losses built.
        results: The model's outputs with their masks.
        weighted: Whether there are sample weights.

    Returns:
        The reason, or `None` if it is.
    """
    if any(port.mask for port in results):
        return "the model's output carries a mask, and its loss counts unmasked entries only"
    for loss in compiled_losses(model):
        if not is_keras_loss(loss):
            return f"loss '{loss.name}' may look at several samples at once"
        by_weight = loss.reduction == "mean_with_sample_weight"
        if loss.reduction not in _MEANS and not (by_weight and not weighted):
            return f"loss '{loss.name}' has reduction={loss.reduction!r}"
    return None


def _any_rows(tensor: tf.Tensor) -> tf.Tensor:
    """Forgets the static number of rows, as in Keras' own step, whose loss trackers look at it."""
    return tf.compat.v1.placeholder_with_default(tensor, [None, *tensor.shape[1:]])
