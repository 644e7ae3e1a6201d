"""The compiled loss and its gradients, for a whole batch at once or micro-batch by micro-batch."""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from tarantella_pp.errors import UNCUT, UnsupportedModelError
from tarantella_pp.internals.training import SecondLoss, compiled_loss, reduction_of, sample_values
from tarantella_pp.partition.graph.keras_reader import ExtractedModel
from tarantella_pp.runtime.batch import Batch
from tarantella_pp.runtime.probes.parts import MEAN, ROWS, SUM
from tarantella_pp.runtime.stage.graph_functions import CompiledFunction, dense_tensors
from tarantella_pp.runtime.stage.model_outputs import pack_outputs
from tarantella_pp.runtime.stage.stage_boundary import BoundaryTensor, StageBoundary

_COMPILED_SIGNATURES = 16


class LossValue(NamedTuple):
    """A loss, or what some samples contribute to it."""

    total: tf.Tensor  # the loss, in Keras' default float type
    # The loss of each output that has one, before it is weighted; none if Keras does not track
    # them, as for a single loss
    each: Sequence[tf.Tensor]
    # Gradient of the total with respect to each output; empty if not asked for
    gradients: Mapping[BoundaryTensor, tf.Tensor]


class LossArguments(NamedTuple):
    """What a loss is computed from."""

    of_samples: bool  # whether it is what some samples contribute to the loss of their batch
    differentiate: bool  # whether gradients are asked for, too
    y: Any  # the targets
    results: list[Any]  # the model's outputs
    weights: Any  # sample weights of a batch; or the coefficients of samples, loss by loss
    scale: tf.Tensor | None  # gradients are multiplied with it, if given


class BatchLoss:
    """The compiled loss of a model, applied to the outputs of a pipeline.

    A loss of Keras has a value for each sample, or each pixel or word of it, and a reduction that
    multiplies each value with a coefficient and adds them up. The coefficients follow from sample
    weights, masked targets and sizes of the *whole* batch, which are known before any output is.
    So the loss of a batch is the sum of what its micro-batches contribute, whatever the reduction.
    """

    def __init__(
        self, model: Any, extracted: ExtractedModel, boundary: StageBoundary, kinds: Sequence[str]
    ) -> None:
        self._kinds = kinds
        self._results = boundary.model_outputs
        self._pack = functools.partial(pack_outputs, extracted, boundary)
        self._sources = [
            i
            for i, tensor in enumerate(self._results)
            if not tensor.mask and extracted.graph.tensors[tensor.tensor].has_gradient
        ]
        first = compiled_loss(model)
        self._tracks_each = first is not None and bool(first.metrics)
        self._whole = None if first is None else SecondLoss(first, self._noted)
        self._measure: Any = None if first is None else SecondLoss(first, self._measured)
        self._add_up = None if first is None else SecondLoss(first, self._contribution)
        self._found: list[tf.Tensor] = []
        self._each: list[tf.Tensor] = []
        self._given: Iterator[tuple[str, tf.Tensor]] = iter(())
        self._compiled: dict[Hashable, CompiledFunction] = {}
        self._functions: dict[Hashable, Callable[..., Any]] = {}
        # The output tensors that the loss depends on; known once gradients were computed.
        self.reached: set[int] = set()

    def value(self, arguments: LossArguments, signature: Hashable) -> LossValue:
        """The loss, compiled for these shapes, or for any once there were too many."""
        kind, given = arguments[:2], arguments[2:]
        results = tuple((tensor.shape, tensor.dtype) for tensor in arguments.results)
        key = (*kind, signature, results)
        compiled = self._compiled.get(key)
        run = functools.partial(self._valued, *kind)
        if compiled is None and len(self._compiled) < _COMPILED_SIGNATURES:
            compiled = self._compiled[key] = CompiledFunction.like(run, given)
        if compiled is not None:
            total, *rest = compiled(*dense_tensors(given))
        else:
            if kind not in self._functions:
                self._functions[kind] = tf.function(run, autograph=False, reduce_retracing=True)
            total, *rest = self._functions[kind](*given)
        tensors = [self._results[i] for i in self._sources] if arguments.differentiate else []
        gradients = rest[len(rest) - len(tensors) :]
        each = rest[: len(rest) - len(tensors)]
        return LossValue(total, each, dict(zip(tensors, gradients, strict=True)))

    def coefficients(self, batch: Batch, outputs: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """What the values of the samples of a batch are multiplied with."""
        if self._measure is None:
            return []
        given = (batch.y, batch.sample_weight)
        shapes = tuple((batch.rows, *tensor.shape[1:]) for tensor in outputs)
        dtypes = tuple(tensor.dtype for tensor in outputs)
        measure = functools.partial(self._coefficients, shapes, dtypes)
        key = (batch.signature, shapes)
        if key not in self._compiled:
            self._compiled[key] = CompiledFunction.like(measure, given)
        return self._compiled[key](*dense_tensors(given))

    def _valued(self, *arguments: Any) -> list[tf.Tensor]:
        """The loss, the loss of each output, and the gradients, multiplied, if they are needed."""
        of_samples, differentiate, y, results, weights, scale = LossArguments(*arguments)
        loss = self._add_up if of_samples else self._whole
        if of_samples:
            self._given = iter(zip(self._kinds, weights, strict=True))
        sources = [results[i] for i in self._sources] if differentiate else []
        if loss is None:
            return [tf.zeros((), keras.config.floatx()), *map(tf.zeros_like, sources)]
        self._each = []
        with tf.GradientTape(watch_accessed_variables=False) as tape:
            tape.watch(sources)
            value = loss(y, self._pack(results), None if of_samples else weights)
        values = [tf.cast(value, keras.config.floatx()), *(self._each if self._tracks_each else ())]
        if not differentiate:
            return values
        seed = None if scale is None else tf.fill(tf.shape(value), tf.cast(scale, value.dtype))
        found = tape.gradient(value, sources, output_gradients=seed)
        pairs = list(zip(self._sources, found, strict=True))
        self.reached = {self._results[i].tensor for i, gradient in pairs if gradient is not None}
        zeros = map(tf.zeros_like, sources)
        gradients = [z if g is None else g for z, g in zip(zeros, found, strict=True)]
        return [*values, *gradients]

    def _noted(self, loss: Any, y: Any, y_pred: Any, sample_weight: Any) -> tf.Tensor:
        """Stands for one loss: notes its value."""
        self._each.append(loss(y, y_pred, sample_weight))
        return self._each[-1]

    def _coefficients(
        self, shapes: Sequence[Any], dtypes: Sequence[tf.DType], y: Any, sample_weight: Any
    ) -> list[tf.Tensor]:
        self._found = []
        outputs = [tf.zeros(shape, dtype) for shape, dtype in zip(shapes, dtypes, strict=True)]
        self._measure(y, self._pack(outputs), sample_weight)
        return self._found

    def _measured(self, loss: Any, y: Any, y_pred: Any, sample_weight: Any) -> tf.Tensor:
        """Stands for one loss: notes its coefficients; a mean over samples is spread over them."""
        values, mask = sample_values(loss, y, y_pred)
        rows, kind = tf.nest.flatten(y_pred)[0].shape[0], self._kinds[len(self._found)]
        _check(loss, values, kind, rows)
        zeros = tf.zeros_like(values)
        # A reduction is linear in the values: its gradient at zero is what each counts.
        with tf.GradientTape() as tape:
            tape.watch(zeros)
            reduced = reduction_of(loss, zeros, sample_weight, mask)
        coefficient = tape.gradient(reduced, zeros)
        if kind != ROWS:
            coefficient = tf.fill([rows], coefficient / (rows if kind == MEAN else 1))
        self._found.append(coefficient)
        return reduced

    def _contribution(self, loss: Any, y: Any, y_pred: Any, _: Any) -> tf.Tensor:
        """Stands for one loss: what some samples contribute to it."""
        values, _ = sample_values(loss, y, y_pred)
        kind, coefficients = next(self._given)
        _check(loss, values, kind, None, coefficients.shape[1:])
        if kind == SUM:  # it has been added up over the samples
            coefficients = coefficients[0]
        self._each.append(tf.reduce_sum(values * coefficients))
        return self._each[-1]


def _check(
    loss: Any, values: tf.Tensor, kind: str, rows: int | None, sizes: Sequence[int | None] = ()
) -> None:
    """Refuses targets that Keras spreads over other samples, as (8, 1, 3) over (8, 3)."""
    rank = values.shape.rank
    expected = [rows, *(sizes or values.shape[1:])] if rank else []
    if bool(rank) != (kind == ROWS) or not values.shape.is_compatible_with(expected):
        raise UnsupportedModelError(
            f"Loss '{loss.name}' has values of the shape {tuple(values.shape)}, which is not one "
            "row for each sample: the shape of the targets does not fit the outputs' shape. "
            f"{UNCUT}, or reshape the targets."
        )
