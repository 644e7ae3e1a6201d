"""Weights that several ranks have, and values of weights that one rank reads from the others."""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Any, TypeAlias

import numpy as np
import tensorflow as tf

from tarantella_pp.errors import ReplicaError
from tarantella_pp.runtime.comm import tensor_buffers
from tarantella_pp.runtime.comm.buffers import aligned_memory, give_back
from tarantella_pp.runtime.comm.collective import digest, on_one_rank
from tarantella_pp.runtime.comm.communicator import Communicator, TensorSpec
from tarantella_pp.runtime.weights.gradient_reduction import DENSE, NOTHING, kind_of
from tarantella_pp.runtime.weights.slices import Gradient

_SIZES_TAG, _GRADIENTS_TAG, _VALUES_TAG = 7, 8, 9
_REQUEST_TAG, _VALUE_TAG = 12, 13
_INDICES = np.dtype(np.int64)
Array: TypeAlias = "np.ndarray[Any, Any]"


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


@dataclass
class Copies:
    """Values of variables that ranks have from one another, sent from memory into memory."""

    communicator: Communicator
    sent: Mapping[int, Sequence[Any]]  # the variables that each rank gets from this one
    received: Mapping[int, Sequence[Any]]  # those that this one gets from each rank
    _requests: dict[int, Any] = field(default_factory=dict, init=False)

    def publish(self) -> None:
        """Sends the values that this rank has updated; all ranks must call it."""
        label, ranks = "updated weights", self.communicator
        for rank in ranks.others:
            if variables := self.received.get(rank):
                specs = [_specs(variable, DENSE)[0] for variable in variables]
                self._requests[rank] = ranks.post_receive(specs, rank, _VALUES_TAG, label=label)
        for rank in ranks.others:
            if variables := self.sent.get(rank):
                values = list(map(tensor_buffers.buffer_of, variables))
                ranks.send(values, rank, _VALUES_TAG, label=label)

    def refresh(self) -> None:
        """Takes over the values that others have published; waits for them."""
        for rank, request in self._requests.items():
            for variable, value in zip(self.received[rank], request.wait(), strict=True):
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


# Reads a value: takes the rank that has it, its number, and its shape and dtype.
Read: TypeAlias = Callable[[int, int, TensorSpec], Array]


class ValueStream:
    """Hands values of all ranks to the one that writes a file, or reads them for something else.

        rank 3 writes   read             -> write   read             -> write ...   done
                           |            |              |            |                 |
        rank 0 serves      `-> look up -'              `-> look up -'                 `-> goes on

    So no rank has more than its own share of a model and one variable of others.
    """

    def __init__(self, ranks: Communicator, reader: int) -> None:
        self._ranks = ranks
        self._reader = reader
        self._kinds: list[Callable[[int], Any]] = []

    def add(self, variable_of: Callable[[int], Any]) -> Read:
        """Adds values of a kind, in the same order on all ranks."""
        kind = len(self._kinds)
        self._kinds.append(variable_of)

        def read(owner: int, number: int, spec: TensorSpec) -> Array:
            give_back(spec.nbytes)
            if owner == self._ranks.rank:
                return tensor_buffers.buffer_of(variable_of(number))
            label = f"value {number} of kind {kind}"
            self._ranks.send_json([kind, number], [owner], _REQUEST_TAG, label=label)
            return self._ranks.post_receive([spec], owner, _VALUE_TAG, label=label).wait()[0]

        return read

    def read_while(self, what: str, work: Callable[[], object]) -> None:
        """Lets the one rank work and read, while the others hand it values; all must call it."""

        def work_and_tell() -> None:
            try:
                work()
            finally:  # also if it has failed: the others serve until they hear that it is over
                self._ranks.send_json(None, self._ranks.others, _REQUEST_TAG, label="done")

        if self._ranks.rank != self._reader:
            label = "a request for a value"
            while request := self._ranks.receive_json(self._reader, _REQUEST_TAG, label=label):
                kind, number = request
                value = tensor_buffers.buffer_of(self._kinds[kind](number))
                self._ranks.send([value], self._reader, _VALUE_TAG, label=f"value {number}")
        on_one_rank(self._ranks, self._reader, what, work_and_tell)


def tensor_of(dataset: Any) -> tf.Tensor | None:
    """Reads a value of a file into memory that its variable takes over; else `None`."""
    dtype = np.dtype(dataset.dtype)
    if not dataset.shape or dtype.kind not in "fiu" or not dtype.isnative:
        return None
    size = dataset.size * dtype.itemsize
    give_back(size)  # what the value before it has replaced
    memory = aligned_memory(size).view(dtype).reshape(dataset.shape)
    dataset.read_direct(memory)
    return tensor_buffers.to_tensor(memory)
