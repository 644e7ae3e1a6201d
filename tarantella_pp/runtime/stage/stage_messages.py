"""Messages between stages: one for each edge, micro-batch and direction."""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from tarantella_pp.errors import CommunicationError, UnsupportedModelError
from tarantella_pp.partition.graph.layer_graph import LayerGraph
from tarantella_pp.runtime.comm.collectives import dtype_on_wire
from tarantella_pp.runtime.comm.communicator import Communicator, TensorSpec
from tarantella_pp.runtime.comm.messages import RecvRequest, SendRequest
from tarantella_pp.runtime.stage.stage_boundary import BoundaryTensor, StageEdge, shape_and_dtype
from tarantella_pp.schedule import Link, Transfer

if TYPE_CHECKING:
    import tensorflow as tf

_FIRST_TAG = 1024
_AHEAD = 2


@dataclass(frozen=True, slots=True)
class _MessageFormat:
    """What there is to know of a message before it is sent, found once for each."""

    tag: int  # tag of its MPI messages
    label: str  # what it is, for people
    tensors: tuple[BoundaryTensor, ...]  # what it holds
    dtypes: tuple[np.dtype[Any], ...]  # the dtype of each tensor
    on_wire: tuple[np.dtype[Any], ...]  # the dtype in which each travels
    narrows: bool  # whether these differ
    is_dynamic: bool  # whether its shapes are not known from the model


class StageMessages:
    """Sends and receives what crosses the cuts, for one rank.

    Receives are posted ahead of the computation that needs them; sends are waited
    for where a stage is ahead of another by more than `begin` allows.
    Where a shape does not follow from the number of samples - another dimension is not known from
    the model, or the first one does not count samples, or a run gave another one - a message with
    the shapes goes first.
    """

    def __init__(
        self,
        communicator: Communicator,
        graph: LayerGraph,
        edges: Sequence[StageEdge],
        placement: Sequence[int],
        sent_as: str | None = None,
        conversion: Any = None,
    ) -> None:
        if conversion is None:
            from tarantella_pp.runtime.comm import tensor_buffers as conversion
        # Makes tensors arrays and arrays tensors. Stages without TensorFlow bring their own.
        self._conversion = conversion
        self.communicator = communicator
        self._graph = graph
        self._edges = {(edge.source, edge.target): edge for edge in edges}
        self._numbers = {pair: number for number, pair in enumerate(self._edges)}
        self._placement = placement
        self._sent_as = sent_as
        self._made: dict[BoundaryTensor, str] = {}  # dtypes, where it is known what runs give
        self._unlike: set[BoundaryTensor] = set()  # tensors that had another shape than the model's
        self._format = functools.cache(self._find_format)
        self._specs: dict[tuple[int, int], list[TensorSpec]] = {}
        self._sizes: Sequence[int] = ()
        self._expected: list[Transfer] = []
        # Messages whose shapes come first are only noted.
        self._posted: dict[Transfer, RecvRequest | None] = {}
        self._window: int | None = None
        self._sent: dict[Link, deque[SendRequest]] = {}

    def learn(self, made: Mapping[BoundaryTensor, tuple[str, Sequence[int]]], rows: int) -> None:
        """Takes note of what stages give of samples; sender and receiver must do so alike."""
        for tensor, (dtype, shape) in made.items():
            self._made[tensor] = dtype
            if tuple(shape) != (rows, *self._shape(tensor)[1:]):
                self._unlike.add(tensor)
        self._format.cache_clear()
        self._specs.clear()

    def begin(
        self, receives: Sequence[Transfer], sizes: Sequence[int], window: int | None = None
    ) -> None:
        """Posts the first receives of a step, with micro-batches of these sizes."""
        self._sizes = sizes
        self._window = window
        self._sent.clear()
        self._expected = [*reversed(receives)]  # popped from the end
        self._posted.clear()
        self._post_ahead()

    def send(self, action: Transfer, values: Sequence[tf.Tensor]) -> None:
        """Hands a message over; returns at once where the window of its link allows."""
        target, form = self._placement[action.target], self._format(action)
        if form.narrows:
            values = list(map(self._conversion.cast, values, form.on_wire))
        arrays = [self._conversion.to_buffer(value) for value in values]
        if form.is_dynamic:
            shapes, label = [list(array.shape) for array in arrays], f"shapes of {form.label}"
            self.communicator.send_json(shapes, [target], form.tag, label=label)
        else:
            self._refuse_other(action, arrays)
        sending = self.communicator.send(arrays, target, form.tag, label=form.label)
        self._post_ahead()
        # Messages with shapes are not waited for: the receiver posts the second one late.
        if self._window is not None and action.direction == "F" and not form.is_dynamic:
            waiting = self._sent.setdefault((action.source, action.target), deque())
            waiting.append(sending)
            if len(waiting) > self._window:
                waiting.popleft().wait()

    def expect(self, action: Transfer) -> None:
        """Posts a receive, at the place in the program where it must be posted at the latest."""
        while action not in self._posted:
            self._post_next()

    def receive(self, action: Transfer) -> list[tf.Tensor]:
        """Waits for a message."""
        self._post_ahead()
        request = self._posted.pop(action) or self._post_dynamic(action)
        # The next receive is posted after a send, when no other stage waits for this one.
        arrays = request.wait()
        values = [self._conversion.to_tensor(array) for array in arrays]
        form = self._format(action)
        return list(map(self._conversion.cast, values, form.dtypes)) if form.narrows else values

    def _post_ahead(self) -> None:
        while self._expected and len(self._posted) < _AHEAD:
            self._post_next()

    def _post_next(self) -> None:
        action = self._expected.pop()
        is_dynamic = self._format(action).is_dynamic
        self._posted[action] = None if is_dynamic else self._post(action, self._specs_of(action))

    def _specs_of(self, action: Transfer) -> list[TensorSpec]:
        """What a message holds whose shapes are known before."""
        rows, form = self._sizes[action.micro_batch], self._format(action)
        if (form.tag, rows) not in self._specs:
            shapes = [(rows, *self._shape(tensor)[1:]) for tensor in form.tensors]
            self._specs[form.tag, rows] = list(map(TensorSpec, shapes, form.on_wire))
        return self._specs[form.tag, rows]

    def _refuse_other(self, action: Transfer, arrays: Sequence[Any]) -> None:
        """Refuses shapes that the receiver does not expect: it would read the bytes as its own."""
        for array, spec in zip(arrays, self._specs_of(action), strict=True):
            if array.shape != spec.shape:
                raise UnsupportedModelError(
                    f"Stage {action.source} gave a tensor of shape {array.shape} where it gave "
                    f"{spec.shape} when it was tried out. Declare dimensions that change from step "
                    "to step as None, in compute_output_shape()."
                )

    def _post_dynamic(self, action: Transfer) -> RecvRequest:
        source, form = self._placement[action.source], self._format(action)
        # The receiver waits here, before it can make room for the tensors themselves.
        label = f"shapes of {form.label}"
        shapes = self.communicator.receive_json(source, form.tag, label=label)
        return self._post(action, list(map(TensorSpec, map(tuple, shapes), form.on_wire)))

    def _post(self, action: Transfer, specs: Sequence[TensorSpec]) -> RecvRequest:
        source, form = self._placement[action.source], self._format(action)
        return self.communicator.post_receive(specs, source, form.tag, label=form.label)

    def _find_format(self, action: Transfer) -> _MessageFormat:
        forward = action.direction == "F"
        pair = (action.source, action.target) if forward else (action.target, action.source)
        tensors = self._edges[pair].tensors if forward else self._edges[pair].gradients
        channel = 2 * self._numbers[pair] + forward
        # MPI matches equal tags in the order of sending, and a stage may run micro-batches in
        # another order than the stage before: so no two messages of a step have the same tag.
        tag = _FIRST_TAG + channel + 2 * len(self._edges) * action.micro_batch
        if tag > self.communicator.largest_tag:
            raise CommunicationError(
                f"Messages of this MPI have tags up to {self.communicator.largest_tag}, too few "
                f"for micro-batch {action.micro_batch}. Take a smaller num_micro_batches."
            )
        label = f"{'activations' if forward else 'gradients'} {action.source}>{action.target}"
        label += f", micro-batch {action.micro_batch}"
        said = [shape_and_dtype(self._graph, tensor)[1] for tensor in tensors]
        made = map(self._made.get, tensors, said)
        dtypes = tuple(map(np.dtype, made))
        on_wire = tuple(dtype_on_wire(dtype, self._sent_as) for dtype in dtypes)
        is_dynamic = any(map(self._is_dynamic, tensors))
        return _MessageFormat(tag, label, tensors, dtypes, on_wire, dtypes != on_wire, is_dynamic)

    def _is_dynamic(self, tensor: BoundaryTensor) -> bool:
        described, shape = self._graph.tensors[tensor.tensor], self._shape(tensor)
        by_samples = described.rows_per_sample == 1 and shape[:1] == described.shape[:1]
        return not by_samples or None in shape[1:] or tensor in self._unlike

    def _shape(self, tensor: BoundaryTensor) -> tuple[Any, ...]:
        return shape_and_dtype(self._graph, tensor)[0]
