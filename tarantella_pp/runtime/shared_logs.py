"""Logs and metrics of a step: put together on the rank of the last stage, known to all."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tarantella_pp.errors import ConfigurationError
from tarantella_pp.internals.functional import layer_metrics
from tarantella_pp.partition.graph.keras_reader import ExtractedModel
from tarantella_pp.runtime.batch_step import BatchStep
from tarantella_pp.runtime.comm.communicator import Communicator, TensorSpec
from tarantella_pp.runtime.comm.process_groups import ProcessGroups
from tarantella_pp.runtime.comm.tensor_buffers import to_buffer, to_tensor
from tarantella_pp.runtime.weights.remote_variables import OF_METRICS, StepCounter, make_remote
from tarantella_pp.runtime.weights.shared_weights import broadcast_variable

_LOSS_TAG, _LOGS_TAG = 4, 5
_FLOAT = np.dtype(np.float64)

Array = np.ndarray[Any, Any]
# Name, shape and dtype of a value in the logs.
Form = list[Any]


class LogExchange:
    """Small messages to and from the rank where losses, metrics and predictions are born."""

    def __init__(self, communicator: Communicator, source: int) -> None:
        self._communicator = communicator
        self._source = source
        self._forms: dict[str, list[Form]] = {}

    @property
    def is_source(self) -> bool:
        """Whether this rank has the last stage."""
        return self._communicator.rank == self._source

    def report(self, loss: tf.Tensor, metrics: Array) -> None:
        """Tells the rank of the last stage what this rank adds to the logs of the batch."""
        if not self.is_source:
            values = np.concatenate([[float(loss)], metrics], dtype=_FLOAT)
            self._communicator.send([values], self._source, _LOSS_TAG, label="added losses")

    def reports(self, sizes: Callable[[int], int]) -> tuple[float, dict[int, Array]]:
        """What the other ranks reported, on the rank of the last stage."""
        requests = {
            rank: self._communicator.post_receive(
                [TensorSpec((1 + sizes(rank),), _FLOAT)], rank, _LOSS_TAG, label="added losses"
            )
            for rank in self._others()
        }
        values = {rank: request.wait()[0] for rank, request in requests.items()}
        return sum(float(v[0]) for v in values.values()), {r: v[1:] for r, v in values.items()}

    def share_logs(self, kind: str, logs: Mapping[str, Any]) -> dict[str, Any]:
        """Gives every rank the logs of a step."""
        found = {name: np.asarray(value) for name, value in _flatten(logs).items()}
        forms = [[name, list(value.shape), value.dtype.name] for name, value in found.items()]
        # Names and shapes travel once; after that a step costs one message of numbers.
        if kind not in self._forms:
            self._forms[kind] = self._communicator.broadcast_json(forms, self._source)
        known = self._forms[kind]
        if not self.is_source:
            spec = [TensorSpec((sum(_size(form) for form in known),), _FLOAT)]
            request = self._communicator.post_receive(spec, self._source, _LOGS_TAG, label="logs")
            return _unpacked(request.wait()[0], known)
        if forms != known:
            raise ConfigurationError(
                "The result of a metric must have the same shape in every step. "
                f"Received: {_difference(known, forms)}"
            )
        values = np.concatenate([np.zeros(0), *(v.ravel() for v in found.values())], dtype=_FLOAT)
        for rank in self._others():
            self._communicator.send([values], rank, _LOGS_TAG, label="logs")
        return _unpacked(values, known)

    def forget_names(self) -> None:
        """Makes the next logs carry their names and shapes again, after `compile()`."""
        self._forms.clear()

    def share_tensors(self, tensors: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """Gives every rank the tensors of the rank of the last stage."""
        specs = [[list(tensor.shape), tensor.dtype.name] for tensor in tensors]
        specs = self._communicator.broadcast_json(specs, self._source)
        if self.is_source:
            for tensor in tensors:
                self._communicator.broadcast(to_buffer(tensor), self._source)
            return list(tensors)
        received = []
        for shape, dtype in specs:
            array = np.empty(shape, tf.as_dtype(dtype).as_numpy_dtype)
            self._communicator.broadcast(array, self._source)
            received.append(to_tensor(array))
        return received

    def _others(self) -> list[int]:
        return [rank for rank in range(self._communicator.size) if rank != self._source]


def _flatten(logs: Mapping[str, Any]) -> dict[str, Any]:
    """Takes results that are dicts apart, as Keras does."""
    flat: dict[str, Any] = {}
    for name, value in sorted(logs.items()):
        flat.update(_flatten(value) if isinstance(value, Mapping) else {name: value})
    return flat


def _size(form: Form) -> int:
    return math.prod(form[1])


def _unpacked(values: Array, forms: Sequence[Form]) -> dict[str, Any]:
    ends = np.cumsum([_size(form) for form in forms])
    parts = np.split(values, ends[:-1]) if len(forms) else []
    return {
        name: part.reshape(shape).astype(dtype) if shape else float(part[0])
        for (name, shape, dtype), part in zip(forms, parts, strict=True)
    }


def _difference(known: Sequence[Form], found: Sequence[Form]) -> str:
    before = {name: shape for name, shape, _ in known}
    now = {name: shape for name, shape, _ in found}
    changed = sorted(n for n in {*before, *now} if before.get(n) != now.get(n))
    return ", ".join(f"{n} of shape {before.get(n)}, then {now.get(n)}" for n in changed)


class SharedLogs:
    """What the ranks of a pipeline know of its losses and metrics."""

    def __init__(
        self,
        model: Any,
        extracted: ExtractedModel,
        assignment: Sequence[int],
        placement: Sequence[int],
        groups: ProcessGroups,
    ) -> None:
        self.messages = LogExchange(groups.pipeline, placement[-1])
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
        """Tells the rank of the last stage what this one adds; see `LogExchange.report`."""
        states = (np.ravel(variable.numpy()) for variable in self._of_layers[self._ranks.rank])
        self.messages.report(added, np.concatenate([np.zeros(0), *states]))

    def share(self, kind: str, step: BatchStep) -> dict[str, Any]:
        """Gives every rank the logs of a step; all must call it."""
        if self.reports_late:
            self.report(step.added)
        self.metrics_change()
        logs: Mapping[str, Any] = {}
        if self.messages.is_source:
            losses, metrics = self.messages.reports(lambda rank: sum(self._sizes(rank)))
            for rank, numbers in metrics.items():
                values = np.split(numbers, np.cumsum(self._sizes(rank)))
                for variable, value in zip(self._of_layers[rank], values, strict=False):
                    variable.assign(value.reshape(variable.shape))
            logs = step.logs(losses)
        return self.messages.share_logs(kind, logs)

    def predicted(self) -> None:
        """Notes that layers may have updated metrics in a step without logs."""
        if self._owners:
            self.metrics_change()

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

    def _sizes(self, rank: int) -> list[int]:
        """How many numbers each variable of the metrics of a rank's layers holds."""
        return [math.prod(variable.shape) for variable in self._of_layers[rank]]
