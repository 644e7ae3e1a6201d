"""Metrics that layers update when they are called, exact over micro-batches and over ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tarantella_pp.errors import UnsupportedModelError
from tarantella_pp.internals.functional import layer_metrics
from tarantella_pp.partition.graph.keras_reader import ExtractedModel
from tarantella_pp.runtime.probes.metric_probe import PARTS, same
from tarantella_pp.runtime.probes.parts import some_rows
from tarantella_pp.runtime.probes.probe_trace import samples_back, samples_first
from tarantella_pp.runtime.stage.stage_module import StageModule

Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class _Owned:
    """A variable of a metric of a layer."""

    variable: Any
    metric: str
    layer: str


class StageMetrics:
    """The metrics of one stage's layers.

    A call with a batch adds to a variable of a metric either a sum over samples, then calls with
    its parts add up to the same, or a mean over them or a constant, such as a count of batches.
    Then what a part adds counts by its share of the batch. Which it is, is tried. What replicas
    add is added up, so it must not depend on what was there before, as a maximum does.
    """

    def __init__(self, module: StageModule, num_replicas: int = 1) -> None:
        self._module = module
        self._num_replicas = num_replicas
        self._axes = module.boundary.axes_of(tensor.tensor for tensor in module.boundary.inputs)
        metrics = [owned for call in module.layer.calls for owned in _metrics_of(call.operation)]
        self._owned = list({id(owned.variable): owned for owned in metrics}.values())

    def find_means(self, inputs: Sequence[tf.Tensor], training: bool) -> list[Any]:
        """Tries which variables move by the share of a micro-batch; changes nothing.

        In inference mode, where nothing is random, unless nothing moves there.
        """
        if not self._owned:
            return []
        first = zip(samples_first(inputs, self._axes), self._axes, strict=True)
        rows = [x if axis is None else some_rows(x, sum(PARTS)) for x, axis in first]
        try:
            moved, means = self._try(rows, training=False)
            if training:
                means += self._try(rows, training=True, but=moved)[1]
        except tf.errors.InvalidArgumentError as error:  # rows that are no samples, for example
            names = ", ".join(dict.fromkeys(owned.layer for owned in self._owned))
            raise UnsupportedModelError(
                f"Whether the metrics of layers {names} may be updated by micro-batches cannot be "
                f"tried with other numbers of samples: {error.message}. Use num_micro_batches=1."
            ) from error
        return means

    def _try(
        self, rows: Sequence[tf.Tensor], training: bool, but: Sequence[_Owned] = ()
    ) -> tuple[list[_Owned], list[Any]]:
        """Returns what moves, but for some, and the variables among it that are means."""
        skipped = {id(owned) for owned in but}
        before = [np.asarray(owned.variable.numpy()) for owned in self._owned]
        start = self._after(rows, before, training)
        whole = self._after(rows, start, training)
        sums, means = start, start
        parts = [
            [x] * len(PARTS) if axis is None else tf.split(x, PARTS)
            for x, axis in zip(rows, self._axes, strict=True)
        ]
        for *piece, size in zip(*parts, PARTS, strict=True):
            sums = self._after(piece, sums, training)
            share = size / sum(PARTS)
            after = self._after(piece, means, training)
            means = [
                (old + share * (new - old)).astype(old.dtype)
                for old, new in zip(means, after, strict=True)
            ]
        moved, variables = [], []
        for owned, first, old, new, summed, mean in zip(
            self._owned, before, start, whole, sums, means, strict=True
        ):
            if id(owned) in skipped:
                continue
            self._require_steady(owned, first, old, new)
            if np.array_equal(old, new):
                continue
            moved.append(owned)
            if same(new, summed):
                continue
            if not same(new, mean):
                raise UnsupportedModelError(
                    f"Layer '{owned.layer}' updates its metric '{owned.metric}' with something "
                    "that is neither a sum nor a mean over samples, so that micro-batches would "
                    "change it. Use num_micro_batches=1, or give the metric one value for each "
                    "sample."
                )
            variables.append(owned.variable)
        return moved, variables

    def _require_steady(self, owned: _Owned, *states: Array) -> None:
        """Refuses, with replicas, what the same samples do not change by as much once more."""
        before, once, twice = states
        if self._num_replicas > 1 and not same(twice, once + (once - before)):
            raise UnsupportedModelError(
                f"How layer '{owned.layer}' changes its metric '{owned.metric}' depends on what it "
                f"was, so that the num_replicas={self._num_replicas} replicas cannot add up what "
                "each has measured. Use num_replicas=1, or pass it to `compile(metrics=...)`."
            )

    def _after(
        self, inputs: Sequence[tf.Tensor], state: Sequence[Array], training: bool
    ) -> list[Array]:
        """The metrics after a forward pass that begins with some state of them."""
        variables = [owned.variable for owned in self._owned]
        known = [
            (v, tf.convert_to_tensor(s, v.dtype)) for v, s in zip(variables, state, strict=True)
        ]
        with keras.StatelessScope(state_mapping=known) as scope:
            self._module.layer(samples_back(inputs, self._axes), training=training)
            return [np.asarray(scope.get_current_value(variable)) for variable in variables]


class LayerMetrics:
    """Which rank has the metrics of which layers, and their way to the rank of the logs."""

    def __init__(
        self, extracted: ExtractedModel, assignment: Sequence[int], placement: Sequence[int]
    ) -> None:
        self._of_rank: dict[int, list[Any]] = {rank: [] for rank in placement}
        self._owner: dict[int, int] = {}
        for call, stage in zip(extracted.calls, assignment, strict=True):
            for owned in _metrics_of(call.operation):
                if id(owned.variable) not in self._owner:
                    self._owner[id(owned.variable)] = placement[stage]
                    self._of_rank[placement[stage]].append(owned.variable)

    @property
    def exist(self) -> bool:
        """Whether layers have metrics."""
        return bool(self._owner)

    def owner(self, variable: Any) -> int | None:
        """The rank that updates a variable of a metric; `None` if no layer does."""
        return self._owner.get(id(variable))

    def size(self, rank: int) -> int:
        """How many numbers the metrics of a rank's layers hold."""
        return sum(int(np.prod(variable.shape)) for variable in self._of_rank[rank])

    def state(self, rank: int) -> Array:
        """Returns these numbers, on that rank."""
        parts = [np.ravel(variable.numpy()) for variable in self._of_rank[rank]]
        return np.concatenate([np.zeros(0), *parts])

    def take(self, states: Mapping[int, Array]) -> None:
        """Takes over the numbers of other ranks."""
        for rank, numbers in states.items():
            left = numbers
            for variable in self._of_rank[rank]:
                count = int(np.prod(variable.shape))
                variable.assign(left[:count].reshape(variable.shape))
                left = left[count:]


def _metrics_of(operation: Any) -> list[_Owned]:
    return [
        _Owned(variable, metric.name, operation.name)
        for metric in layer_metrics(operation)
        for variable in metric.variables
    ]
