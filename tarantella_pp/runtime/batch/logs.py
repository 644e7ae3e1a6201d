"""What the ranks of a pipeline tell each other beside activations: losses, logs, predictions."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tarantella_pp.errors import ConfigurationError
from tarantella_pp.runtime.comm.communicator import Communicator, TensorSpec
from tarantella_pp.runtime.comm.tensor_buffers import to_buffer, to_tensor

_LOSS_TAG, _LOGS_TAG = 4, 5
_FLOAT = np.dtype(np.float64)

Array = np.ndarray[Any, Any]
Form = list[Any]
"""Name, shape and dtype of a value in the logs."""


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
