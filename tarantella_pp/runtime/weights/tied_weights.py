"""Weights that stages on several ranks use: gradients go to where they are trained, values back."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tarantella_pp.runtime.comm.communicator import Communicator, TensorSpec
from tarantella_pp.runtime.comm.tensor_buffers import to_buffer, to_tensor, variable_dtype
from tarantella_pp.runtime.weights.gradient_reduction import DENSE, NOTHING, Gradient, kind_of

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
        self._tied = {id(variable) for variable, _ in weights}

    @property
    def exist(self) -> bool:
        """Whether this rank has any weights that others have, too."""
        return bool(self._lenders or self._borrowers)

    def is_tied(self, variable: Any) -> bool:
        """Returns whether several ranks have a variable."""
        return id(variable) in self._tied

    def hand_over(self, gradient_of: Callable[[Any], Gradient]) -> None:
        """Sends the gradients of weights that other ranks train."""
        for rank, variables in self._lenders.items():
            gradients = [gradient_of(variable) for variable in variables]
            sizes = np.array([kind_of(gradient) for gradient in gradients], _INDICES)
            tensors = [to_buffer(t) for gradient in gradients for t in _parts(gradient)]
            self._communicator.send([sizes], rank, _SIZES_TAG, label="sizes of tied gradients")
            if tensors:
                self._communicator.send(tensors, rank, _GRADIENTS_TAG, label="tied gradients")

    def collect(self) -> dict[int, list[Gradient]]:
        """Receives the gradients of weights that this rank trains."""
        received: dict[int, list[Gradient]] = {}
        for rank, variables in self._borrowers.items():
            spec = [TensorSpec((len(variables),), _INDICES)]
            sizes = self._wait(spec, rank, _SIZES_TAG, "sizes of tied gradients")[0].tolist()
            pairs = list(zip(variables, sizes, strict=True))
            specs = [spec for variable, rows in pairs for spec in _specs(variable, rows)]
            arrays = self._wait(specs, rank, _GRADIENTS_TAG, "tied gradients") if specs else []
            left = iter(arrays)
            for variable, rows in pairs:
                tensors = [to_tensor(next(left)) for _ in _specs(variable, rows)]
                received.setdefault(id(variable), []).append(_gradient(variable, tensors))
        return received

    def publish(self) -> None:
        """Sends the values of weights that this rank has just trained to the others."""
        for rank, variables in self._borrowers.items():
            values = [to_buffer(tf.convert_to_tensor(variable.value)) for variable in variables]
            self._communicator.send(values, rank, _VALUES_TAG, label="tied weights")

    def refresh(self) -> None:
        """Takes over the values of weights that other ranks have trained; waits for them."""
        for rank, variables in self._lenders.items():
            specs = [_specs(variable, DENSE)[0] for variable in variables]
            values = self._wait(specs, rank, _VALUES_TAG, "tied weights")
            for variable, value in zip(variables, values, strict=True):
                variable.assign(to_tensor(value))

    def _wait(self, specs: Sequence[TensorSpec], rank: int, tag: int, label: str) -> list[Any]:
        return list(self._communicator.post_receive(specs, rank, tag, label=label).wait())


def total(gradients: Sequence[Gradient]) -> Gradient:
    """Adds up gradients of one weight, as TensorFlow does for several operations."""
    present = [gradient for gradient in gradients if gradient is not None]
    if len(present) < 2:
        return present[0] if present else None
    if all(isinstance(gradient, tf.IndexedSlices) for gradient in present):
        values = tf.concat([gradient.values for gradient in present], 0)
        indices = tf.concat([tf.cast(gradient.indices, tf.int64) for gradient in present], 0)
        return tf.IndexedSlices(values, indices, present[0].dense_shape)
    return tf.add_n([tf.convert_to_tensor(gradient) for gradient in present])


def _parts(gradient: Gradient) -> list[tf.Tensor]:
    if gradient is None:
        return []
    if isinstance(gradient, tf.IndexedSlices):
        return [gradient.values, tf.cast(gradient.indices, tf.int64)]
    return [gradient]


def _specs(variable: Any, rows: int) -> list[TensorSpec]:
    """The arrays that a gradient with some number of rows is sent as."""
    shape, dtype = tuple(variable.shape), variable_dtype(variable)
    if rows == NOTHING:
        return []
    if rows == DENSE:
        return [TensorSpec(shape, dtype)]
    return [TensorSpec((rows, *shape[1:]), dtype), TensorSpec((rows,), _INDICES)]


def _gradient(variable: Any, tensors: Sequence[tf.Tensor]) -> Gradient:
    if len(tensors) < 2:
        return tensors[0] if tensors else None
    return tf.IndexedSlices(tensors[0], tensors[1], tf.constant(list(variable.shape)))
