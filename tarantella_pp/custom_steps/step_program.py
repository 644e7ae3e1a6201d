"""A traced step, cut where weights are updated, and compiled part by part.

    def train_step(data):                 one graph, in the order in which it was made
        ...                               part 0
        optimizer.apply(gradients)   -->  ------------- gradients of all replicas, update
        ...                               part 1: reads the new weights

TensorFlow makes operations in the order in which the step is written. So all that was made before
an update runs before it, and all else after it, as if the step were run line by line. What later
parts need of earlier ones is handed on.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import tensorflow as tf

from tarantella_pp.custom_steps.step_trace import StepTrace
from tarantella_pp.errors import UnsupportedModelError
from tarantella_pp.runtime.modules.graph_functions import (
    CompiledFunction,
    SubgraphExtractor,
    frontier,
)
from tarantella_pp.runtime.modules.graph_split import has_effect


@dataclass(frozen=True)
class _Part:
    """What runs between two updates."""

    call: CompiledFunction  # the compiled part
    needs: list[tf.Tensor]  # what it is given, of the batch and of earlier parts
    gives: list[tf.Tensor]  # what it returns


class StepProgram:
    """Runs a step as it is written, with updates that are made outside of its graph."""

    def __init__(self, trace: StepTrace) -> None:
        self._trace = trace
        operations = trace.graph.get_operations()
        self._places = {op: place for place, op in enumerate(operations)}
        self._bounds = [update.place for update in trace.updates]
        self._carve = SubgraphExtractor(trace.function).extract
        count = len(self._bounds) + 1
        wanted: list[list[tf.Tensor]] = [list(update.tensors) for update in trace.updates]
        wanted.append(trace.outputs)
        self._parts: list[_Part] = []
        for number in reversed(range(count)):
            self._parts.insert(0, self._part(number, wanted))

    def run(
        self, tensors: Sequence[tf.Tensor], update: Callable[[int, list[tf.Tensor]], None]
    ) -> list[tf.Tensor]:
        """Runs the step."""
        known = {t.ref(): value for t, value in zip(self._trace.inputs, tensors, strict=True)}
        for number, part in enumerate(self._parts):
            values = part.call(*(known[tensor.ref()] for tensor in part.needs))
            known |= {t.ref(): value for t, value in zip(part.gives, values, strict=True)}
            if number < len(self._bounds):
                wanted = self._trace.updates[number].tensors
                update(number, [known[tensor.ref()] for tensor in wanted])
        return [known[tensor.ref()] for tensor in self._trace.outputs]

    def _part(self, number: int, wanted: list[list[tf.Tensor]]) -> _Part:
        """Carves a part out; what it needs of earlier ones is added to what they are to give."""
        gives = list({tensor.ref(): tensor for tensor in wanted[number]}.values())
        effects = [op for op in self._places if self._number(op) == number and has_effect(op)]
        sources = [tensor for op in effects for tensor in op.inputs]
        given, _ = frontier([*gives, *sources], lambda tensor: self._is_given(tensor, number))
        needs = list({tensor.ref(): tensor for tensor in given}.values())
        for tensor in needs:
            if tensor.dtype == tf.resource:
                raise UnsupportedModelError(
                    f"The step makes a resource ('{tensor.op.name}') before it applies gradients "
                    "and uses it afterwards. Make it in the model's __init__."
                )
            if tensor.op.type != "Placeholder":
                wanted[self._number(tensor.op)].append(tensor)
        carved = self._carve(needs, gives, effects)
        specs = [tf.TensorSpec(tensor.shape, tensor.dtype) for tensor in needs]
        return _Part(CompiledFunction(lambda *values: carved(*values), specs), needs, gives)

    def _number(self, op: tf.Operation) -> int:
        return bisect_right(self._bounds, self._places[op])

    def _is_given(self, tensor: tf.Tensor, number: int) -> bool:
        """Whether a part gets a tensor, instead of computing it: constants and variables it has."""
        if tensor.op.type == "Placeholder":
            return any(tensor is given for given in self._trace.inputs)
        return tensor.op.type != "Const" and self._number(tensor.op) < number
