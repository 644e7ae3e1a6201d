"""Logs, metrics and outputs of a step: made on the rank of the last stage, known to all."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tarantella_pp.internals.functional import layer_metrics
from tarantella_pp.partition.graph.keras_reader import ExtractedModel
from tarantella_pp.runtime.batch_step import BatchStep
from tarantella_pp.runtime.comm.process_groups import ProcessGroups
from tarantella_pp.runtime.comm.tensor_buffers import to_buffer, to_tensor
from tarantella_pp.runtime.weights.remote_variables import OF_METRICS, StepCounter, make_remote
from tarantella_pp.runtime.weights.shared_weights import broadcast_variable

_LOSS_TAG, _LOGS_TAG = 4, 5


class SharedLogs:
    """What the ranks of a pipeline know of its losses, metrics and outputs."""

    def __init__(
        self,
        model: Any,
        extracted: ExtractedModel,
        assignment: Sequence[int],
        placement: Sequence[int],
        groups: ProcessGroups,
    ) -> None:
        self._model = model
        self._ranks = groups.pipeline
        self._last = placement[-1]
        self._clock = StepCounter(OF_METRICS)
        self._differ = False
        self._owners: dict[int, int] = {}
        # The variables of metrics that layers update when they are called, by rank.
        self._of_layers: dict[int, list[Any]] = {rank: [] for rank in placement}
        for call, stage in zip(extracted.calls, assignment, strict=True):
            for variable in (v for m in layer_metrics(call.operation) for v in m.variables):
                if id(variable) not in self._owners:
                    self._owners[id(variable)] = placement[stage]
                    self._of_layers[placement[stage]].append(variable)
        # What layers have measured is known only once replicas have added it up.
        self.reports_late = bool(self._owners) and groups.num_replicas > 1

    def report(self, added: tf.Tensor) -> None:
        """Tells the rank of the last stage what this one adds to loss and metrics of the batch."""
        if self._ranks.rank != self._last:
            states = [_numbers(variable.numpy()) for variable in self._of_layers[self._ranks.rank]]
            report = [float(added), states]
            self._ranks.send_json(report, [self._last], _LOSS_TAG, label="added losses")

    def share(self, step: BatchStep) -> dict[str, Any]:
        """Gives every rank the logs of a step; all must call it."""
        if self.reports_late:
            self.report(step.added)
        self.metrics_change()
        if self._ranks.rank == self._last:
            logs = {name: _plain(value) for name, value in _flatten(step.logs(self._reported()))}
            self._ranks.send_json(logs, self._ranks.others, _LOGS_TAG, label="logs")
        else:
            logs = self._ranks.receive_json(self._last, _LOGS_TAG, label="logs")
        return {
            name: value if isinstance(value, float) else np.array(value[1]).astype(value[0])
            for name, value in logs.items()
        }

    def share_outputs(self, step: BatchStep) -> list[tf.Tensor]:
        """Gives every rank the outputs of the model; all must call it."""
        if self._owners:  # layers may have updated metrics
            self.metrics_change()
        tensors = step.whole_results() if self._ranks.rank == self._last else []
        specs = [[list(tensor.shape), tensor.dtype.name] for tensor in tensors]
        received = []
        for i, (shape, dtype) in enumerate(self._ranks.broadcast_json(specs, self._last)):
            empty = np.empty(shape, tf.as_dtype(dtype).as_numpy_dtype)
            received.append(to_buffer(tensors[i]) if tensors else empty)
            self._ranks.broadcast(received[-1], self._last)
        return tensors or list(map(to_tensor, received))

    def metrics_change(self) -> None:
        """Notes that metrics are updated, on the ranks that have them."""
        self._differ = True
        self._clock.advance()

    def share_metrics(self) -> None:
        """Gives every rank the state of all metrics, if they have changed; all must call it."""
        if not self._differ:
            return
        for variable, owner in self.metric_variables():
            broadcast_variable(variable, owner, self._ranks)
        self._differ = False

    def guard_metrics(self) -> None:
        """Has metrics refuse to be read where they are out of date."""
        for variable, owner in self.metric_variables():
            if owner != self._ranks.rank:
                make_remote(variable, self._clock)

    def metric_variables(self) -> Iterator[tuple[Any, int]]:
        """The variables of all metrics by now, each with the rank that updates it."""
        for metric in self._model.metrics:
            for variable in metric.variables:
                yield variable, self._owners.get(id(variable), self._last)

    def _reported(self) -> float:
        """Takes over metrics that other ranks have reported; returns the sum of their losses."""
        total = 0.0
        for rank in self._ranks.others:
            loss, states = self._ranks.receive_json(rank, _LOSS_TAG, label="added losses")
            total += loss
            for variable, state in zip(self._of_layers[rank], states, strict=True):
                variable.assign(np.reshape(state, variable.shape))
        return total


def _flatten(logs: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Takes results that are dicts apart, as Keras does."""
    for name, value in sorted(logs.items()):
        if isinstance(value, Mapping):
            yield from _flatten(value)
        else:
            yield name, value


def _plain(value: Any) -> float | list[Any]:
    """A number; or an array as its dtype and its numbers."""
    array = np.asarray(value)
    return [array.dtype.name, _numbers(array)] if array.shape else float(array)


def _numbers(array: Any) -> Any:
    return np.asarray(array, np.float64).tolist()
