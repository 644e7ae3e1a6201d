"""Messages between stages: one for each link, micro-batch and direction."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from tarantella_pp.partition.graph import LayerGraph
from tarantella_pp.runtime.channel import Receipt
from tarantella_pp.runtime.communicator import Communicator, TensorSpec
from tarantella_pp.runtime.layout import Link, Port
from tarantella_pp.runtime.message import numpy_dtype
from tarantella_pp.runtime.schedule import Transfer

if TYPE_CHECKING:
    import tensorflow as tf

_FIRST_TAG = 1024
_MICRO_BATCH_TAGS = 64
_AHEAD = 2


class Conversion(NamedTuple):
    """How the tensors of a message become arrays and arrays become tensors.

    Attributes:
        to_buffer: Returns an array for sending, of the dtype given: on the tensor's own memory,
            where it has that dtype already.
        to_tensor: Returns a tensor of the dtype given, likewise on the memory of an array that
            was received.
    """

    to_buffer: Callable[[Any, np.dtype[Any]], NDArray[Any]]
    to_tensor: Callable[[NDArray[Any], np.dtype[Any]], Any]

    @classmethod
    def of_tensorflow(cls) -> Conversion:
        """Returns that of TensorFlow's eager tensors."""
        from tarantella_pp.runtime import buffers

        return cls(buffers.to_buffer_of, buffers.to_tensor_of)


class Exchange:
    """Sends and receives what crosses the cuts, for one rank.

    Receives are posted ahead of the computation that needs them; sends are never waited for.
    Where a dimension other than the batch is not known from the model, a message with the shapes
    goes first.

    Args:
        communicator: The ranks of the pipeline.
        graph: The layer graph, for dtypes and shapes.
        links: All links of the pipeline, in an order that all ranks share.
        placement: Rank of each stage.
        conversion: Makes arrays of tensors and back. Default: that of TensorFlow.
        wire_dtype: The type in which wider floating point numbers travel; `None` for their own.
    """

    def __init__(
        self,
        communicator: Communicator,
        graph: LayerGraph,
        links: Sequence[Link],
        placement: Sequence[int],
        conversion: Conversion | None = None,
        wire_dtype: str | None = None,
    ) -> None:
        self._conversion = conversion or Conversion.of_tensorflow()
        self._communicator = communicator
        self._graph = graph
        self._links = {(link.source, link.target): link for link in links}
        self._numbers = {pair: number for number, pair in enumerate(self._links)}
        self._placement = placement
        self._wire_dtype = None if wire_dtype is None else numpy_dtype(wire_dtype)
        self._rows: Mapping[int, int] = {}
        self._expected: list[Transfer] = []
        self._posted: dict[Transfer, Receipt] = {}

    def begin(self, program: Sequence[Any], rows: Mapping[int, int]) -> None:
        """Posts the first receives of a step.

        Args:
            program: This rank's actions.
            rows: Number of samples of each micro-batch.
        """
        self._rows = rows
        receives = (a for a in program if isinstance(a, Transfer) and a.operation == "R")
        self._expected = list(reversed([a for a in receives if not self._is_dynamic(a)]))
        self._posted.clear()
        for _ in range(_AHEAD):
            self._post_next()

    def send(self, action: Transfer, values: Sequence[tf.Tensor]) -> None:
        """Hands a message over and returns at once.

        Args:
            action: The send.
            values: One tensor for each port of the message.
        """
        target, tag, label = self._placement[action.target], self._tag(action), _label(action)
        arrays = [
            self._conversion.to_buffer(value, self._on_wire(port))
            for value, port in zip(values, self._ports(action), strict=True)
        ]
        if self._is_dynamic(action):
            sizes = np.array([size for a in arrays for size in a.shape], np.int64)
            self._communicator.send([sizes], target, tag, label=f"shapes of {label}")
        self._communicator.send(arrays, target, tag, label=label)

    def expect(self, action: Transfer) -> None:
        """Posts a receive, at the place in the program where it must be posted at the latest.

        Args:
            action: The receive.
        """
        while action in self._expected:
            self._post_next()

    def receive(self, action: Transfer) -> list[tf.Tensor]:
        """Waits for a message.

        Args:
            action: The receive, which `expect` has seen.

        Returns:
            One tensor for each port of the message.
        """
        receipt = self._posted.pop(action, None)
        if receipt is None:
            receipt = self._post_dynamic(action)
        arrays = receipt.wait()
        self._post_next()
        return [
            self._conversion.to_tensor(array, self._dtype(port))
            for array, port in zip(arrays, self._ports(action), strict=True)
        ]

    def _post_next(self) -> None:
        if self._expected:
            action = self._expected.pop()
            rows = self._rows[action.micro_batch]
            specs = [
                self._spec(port, (rows, *self._shape(port)[1:])) for port in self._ports(action)
            ]
            self._posted[action] = self._post(action, specs)

    def _post_dynamic(self, action: Transfer) -> Receipt:
        ports = self._ports(action)
        ranks = [len(self._shape(port)) for port in ports]
        shapes = [TensorSpec((sum(ranks),), np.dtype(np.int64))]
        sizes = self._post(action, shapes, "shapes of ").wait()[0].tolist()
        specs = []
        for port, rank in zip(ports, ranks, strict=True):
            specs.append(self._spec(port, tuple(sizes[:rank])))
            sizes = sizes[rank:]
        return self._post(action, specs)

    def _post(self, action: Transfer, specs: Sequence[TensorSpec], what: str = "") -> Receipt:
        source, tag = self._placement[action.source], self._tag(action)
        return self._communicator.post_receive(specs, source, tag, label=what + _label(action))

    def _spec(self, port: Port, shape: tuple[Any, ...]) -> TensorSpec:
        return TensorSpec(shape, self._on_wire(port))

    def _dtype(self, port: Port) -> np.dtype[Any]:
        return numpy_dtype("bool" if port.mask else self._graph.tensors[port.tensor].dtype)

    def _on_wire(self, port: Port) -> np.dtype[Any]:
        """The type in which a tensor travels."""
        own, wire = self._dtype(port), self._wire_dtype
        narrows = wire is not None and own.kind == "f" and own.itemsize > wire.itemsize
        return wire if narrows else own  # type: ignore[return-value]  # mypy forgets `narrows`

    def _shape(self, port: Port) -> tuple[int | None, ...]:
        tensor = self._graph.tensors[port.tensor]
        return (tensor.mask_shape or ()) if port.mask else tensor.shape

    def _is_dynamic(self, action: Transfer) -> bool:
        return any(None in self._shape(port)[1:] for port in self._ports(action))

    def _ports(self, action: Transfer) -> tuple[Port, ...]:
        if action.direction == "F":
            return self._links[action.source, action.target].ports
        return self._links[action.target, action.source].gradients

    def _tag(self, action: Transfer) -> int:
        forward = action.direction == "F"
        pair = (action.source, action.target) if forward else (action.target, action.source)
        channel = 2 * self._numbers[pair] + forward
        return _FIRST_TAG + channel * _MICRO_BATCH_TAGS + action.micro_batch % _MICRO_BATCH_TAGS


def _label(action: Transfer) -> str:
    what = "activations" if action.direction == "F" else "gradients"
    return f"{what} {action.source}>{action.target}, micro-batch {action.micro_batch}"
