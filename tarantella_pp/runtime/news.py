"""What the ranks of a pipeline tell each other beside activations: losses, logs, predictions."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tarantella_pp.runtime.buffers import to_buffer, to_tensor
from tarantella_pp.runtime.communicator import Communicator, TensorSpec
from tarantella_pp.runtime.receipt import Receipt

_LOSS_TAG, _LOGS_TAG = 4, 5
_FLOAT = np.dtype(np.float64)


class LateFloat:
    """A number that is still on its way; `float()` waits for it.

    Args:
        message: Waits for the message that it comes in.
        place: Its place there.
    """

    def __init__(self, message: Callable[[], Sequence[float]], place: int) -> None:
        self._message = message
        self._place = place

    def __float__(self) -> float:
        return float(self._message()[self._place])

    def __repr__(self) -> str:
        return repr(float(self))


class News:
    """Small messages to and from the rank where losses, metrics and predictions are born.

    Args:
        communicator: The ranks of the pipeline.
        source: The rank of the last stage.
    """

    def __init__(self, communicator: Communicator, source: int) -> None:
        self._communicator = communicator
        self._source = source
        self._names: dict[str, list[str]] = {}
        self._late: list[Receipt] = []

    @property
    def is_source(self) -> bool:
        """Whether this rank has the last stage."""
        return self._communicator.rank == self._source

    def report_loss(self, loss: tf.Tensor) -> None:
        """Tells the rank of the last stage what this rank adds to the loss of the batch.

        Args:
            loss: Regularizers, and the losses that layers of this rank added.
        """
        if not self.is_source:
            value = np.array([float(loss)], _FLOAT)
            self._communicator.send([value], self._source, _LOSS_TAG, label="added losses")

    def reported_losses(self) -> float:
        """The sum of what the other ranks reported, on the rank of the last stage."""
        spec = [TensorSpec((1,), _FLOAT)]
        receipts = [
            self._communicator.post_receive(spec, rank, _LOSS_TAG, label="added losses")
            for rank in self._others()
        ]
        return sum(float(receipt.wait()[0][0]) for receipt in receipts)

    def send_logs(self, kind: str, logs: Mapping[str, Any]) -> dict[str, float]:
        """Sends the logs of a step to the other ranks, from the rank of the last stage.

        Args:
            kind: What step they are of; logs of one kind always have the same names.
            logs: The logs.

        Returns:
            The logs.
        """
        flat = {name: float(value) for name, value in _flatten(logs).items()}
        names = self._names_of(kind, list(flat))
        values = np.array([flat[name] for name in names], _FLOAT)
        for rank in self._others():
            self._communicator.send([values], rank, _LOGS_TAG, label="logs")
        return flat

    def expect_logs(self, kind: str) -> dict[str, LateFloat]:
        """Receives the logs of a step, without waiting for them.

        The first stage is a step ahead of the last one's logs, and must not stop for them.

        Args:
            kind: What step they are of.

        Returns:
            Values that wait when somebody looks at them.
        """
        names = self._names_of(kind, [])
        spec = [TensorSpec((len(names),), _FLOAT)]
        receipt = self._communicator.post_receive(spec, self._source, _LOGS_TAG, label="logs")
        self._late = [late for late in self._late if not late.ready()] + [receipt]
        message = functools.cache(lambda: receipt.wait()[0].tolist())
        return {name: LateFloat(message, place) for place, name in enumerate(names)}

    def _names_of(self, kind: str, names: list[str]) -> list[str]:
        if kind not in self._names:
            self._names[kind] = self._communicator.broadcast_json(names, self._source)
        return self._names[kind]

    def forget_names(self) -> None:
        """Makes the next logs carry their names again, after `compile()`."""
        self._names.clear()

    def share_tensors(self, tensors: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """Gives every rank the tensors of the rank of the last stage.

        Args:
            tensors: The tensors there; ignored elsewhere.

        Returns:
            The tensors, on every rank.
        """
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
    flat: dict[str, Any] = {}
    for name, value in logs.items():
        flat.update(_flatten(value) if isinstance(value, Mapping) else {name: value})
    return flat
