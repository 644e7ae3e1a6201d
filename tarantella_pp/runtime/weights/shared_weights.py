"""Weights that several ranks have: in stages of one pipeline, or in its replicas."""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping, Sequence
from itertools import zip_longest
from typing import Any

import numpy as np
import tensorflow as tf

from tarantella_pp.errors import ReplicaError
from tarantella_pp.runtime.comm import tensor_buffers
from tarantella_pp.runtime.comm.collective import digest
from tarantella_pp.runtime.comm.collectives import next_first
from tarantella_pp.runtime.comm.communicator import Communicator, TensorSpec
from tarantella_pp.runtime.weights.gradient_reduction import DENSE, NOTHING, kind_of
from tarantella_pp.runtime.weights.slices import Gradient

_SIZES_TAG, _GRADIENTS_TAG, _VALUES_TAG = 7, 8, 9
_INDICES = np.dtype(np.int64)


class TiedWeights:
    """One rank's copies of weights that others train, and others' copies of what it trains.

    Once a step, gradients summed over the micro-batches go to the rank of the first stage that
    uses the weight. That rank trains it and sends the new value back before the step ends.
    """

    def __init__(
        self, weights: Sequence[tuple[Any, tuple[int, ...]]], communicator: Communicator
    ) -> None:
        self._communicator = communicator
        self._lenders: dict[int, list[Any]] = {}
        self._borrowers: dict[int, list[Any]] = {}
        for variable, (first, *others) in weights:
            if communicator.rank in others:
                self._lenders.setdefault(first, []).append(variable)
            for rank in others if communicator.rank == first else ():
                self._borrowers.setdefault(rank, []).append(variable)
        self.tied = {id(variable) for variable, _ in weights}  # all that several ranks have
        self.exist = bool(self._lenders or self._borrowers)  # whether this rank has any of them
        self.copies = Copies(communicator, self._borrowers, self._lenders)

    def hand_over(self, gradient_of: Callable[[Any], Gradient]) -> None:
        """Sends the gradients of weights that other ranks train."""
        for rank, variables in self._lenders.items():
            gradients = [gradient_of(variable) for variable in variables]
            # How many rows of an embedding have gradients is known only to who computed them, so
            # sizes go ahead.
            sizes = [kind_of(gradient) for gradient in gradients]
            tensors = [
                tensor_buffers.to_buffer(t) for gradient in gradients for t in _parts(gradient)
            ]
            self._communicator.send_json(sizes, [rank], _SIZES_TAG, label="sizes of gradients")
            self._communicator.send(tensors, rank, _GRADIENTS_TAG, label="tied gradients")

    def collect(self) -> dict[int, list[Gradient]]:
        """Receives the gradients of weights that this rank trains."""
        received: dict[int, list[Gradient]] = {}
        for rank, variables in self._borrowers.items():
            sizes = self._communicator.receive_json(rank, _SIZES_TAG, label="sizes of gradients")
            pairs = list(zip(variables, sizes, strict=True))
            specs = [spec for variable, rows in pairs for spec in _specs(variable, rows)]
            request = self._communicator.post_receive(
                specs, rank, _GRADIENTS_TAG, label="tied gradients"
            )
            left = iter(request.wait())
            for variable, rows in pairs:
                tensors = [tensor_buffers.to_tensor(next(left)) for _ in _specs(variable, rows)]
                gradient = tensors[0] if tensors else None
                if len(tensors) > 1:
                    gradient = tf.IndexedSlices(*tensors, tf.constant(list(variable.shape)))
                received.setdefault(id(variable), []).append(gradient)
        return received


def _parts(gradient: Gradient) -> list[tf.Tensor]:
    if gradient is None:
        return []
    if isinstance(gradient, tf.IndexedSlices):
        return [gradient.values, tf.cast(gradient.indices, tf.int64)]
    return [gradient]


def _specs(variable: Any, rows: int) -> list[TensorSpec]:
    """The arrays that a gradient with some number of rows is sent as."""
    shape, dtype = tuple(variable.shape), tensor_buffers.variable_dtype(variable)
    if rows == NOTHING:
        return []
    if rows == DENSE:
        return [TensorSpec(shape, dtype)]
    # Rows, then their indices: optimizers treat slices one by one, so they are not made dense.
    return [TensorSpec((rows, *shape[1:]), dtype), TensorSpec((rows,), _INDICES)]


def broadcast_variable(variable: Any, root: int, ranks: Communicator) -> None:
    """Gives all ranks the value that a variable has on one of them; all of them must call it."""
    if ranks.size == 1:
        return
    if ranks.rank == root:
        value = tensor_buffers.value_of(variable)
    else:  # where it may not be read
        value = np.empty(tuple(variable.shape), tensor_buffers.variable_dtype(variable))
    ranks.broadcast(value, root)
    if ranks.rank != root:
        variable.assign(value)


class Copies:
    """Values of variables that ranks have from one another, sent from memory into memory."""

    def __init__(
        self,
        communicator: Communicator,
        sent: Mapping[int, Sequence[Any]],
        received: Mapping[int, Sequence[Any]],
    ) -> None:
        self._communicator = communicator
        self._sent, self._received = sent, received
        self._requests: dict[int, Any] = {}

    def publish(self) -> None:
        """Sends the values that this rank has updated; all ranks must call it."""
        label, ranks = "updated weights", self._communicator
        others = next_first(ranks)
        for rank in others:
            if variables := self._received.get(rank):
                specs = [_specs(variable, DENSE)[0] for variable in variables]
                self._requests[rank] = ranks.post_receive(specs, rank, _VALUES_TAG, label=label)
        for rank in others:
            if variables := self._sent.get(rank):
                values = list(map(tensor_buffers.buffer_of, variables))
                ranks.send(values, rank, _VALUES_TAG, label=label)

    def refresh(self) -> None:
        """Takes over the values that others have published; waits for them."""
        for rank, request in self._requests.items():
            for variable, value in zip(self._received[rank], request.wait(), strict=True):
                variable.assign(tensor_buffers.to_tensor(value))
        self._requests.clear()


def check_alike(
    variables: Sequence[Any], communicator: Communicator, known: Container[int] | None = None
) -> None:
    """Compares hashes of variables that ranks know, bit for bit; all of them must call this."""
    if communicator.size == 1:
        return
    own = [
        digest([tensor_buffers.buffer_of(variable)]) if known is None or i in known else ""
        for i, variable in enumerate(variables)
    ]
    everyones = communicator.allgather_json(own)
    found = [*zip_longest(*everyones)]
    different = [i for i, digests in enumerate(found) if len({*digests} - {""}) > 1]
    if not different:
        return
    first = different[0]
    hashes = zip(communicator.world_ranks, found[first], strict=True)
    values = ", ".join(f"{value or 'nothing'} on rank {rank}" for rank, value in hashes)
    variable = variables[first] if first < len(variables) else None
    name = f"number {first}" if variable is None else repr(getattr(variable, "path", variable.name))
    raise ReplicaError(
        f"Variable {name} is not the same on all ranks. Received: hashes {values}. "
        f"{len(different)} of {len(found)} variables differ. Replicas stay equal as long as all of "
        "them begin with the same values and make the same steps: look for a callback, a layer or "
        "a script that writes weights on some ranks only, or with random numbers of its own."
    )
