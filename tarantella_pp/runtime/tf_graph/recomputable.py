"""Operations of the forward pass that the backward pass may repeat, so that they are not kept."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import tensorflow as tf

if TYPE_CHECKING:
    from tarantella_pp.runtime.tf_graph.graph_split import Trace

_WRITES = ("AssignVariableOp", "AssignAddVariableOp", "AssignSubVariableOp")
# Cheap enough to repeat in the backward pass when nothing but weights goes in.
_REPEATABLE = {
    *("Const", "Identity", "Cast", "Reshape", "ExpandDims", "Squeeze", "Shape", "Transpose"),
    *("StridedSlice", "Pack", "Prod", "ConcatV2", "Range", "Fill", "Sub", "Add", "AddV2", "Mul"),
}


class DependsOnlyOnWeights:
    """Whether an operation depends on nothing but constants and weights that F does not write."""

    def __init__(self, trace: Trace) -> None:
        operations = trace.function.graph.get_operations()
        self._written = {op.inputs[0].ref() for op in operations if op.type in _WRITES}
        self._fed = {tensor.op for tensor in trace.inputs}
        self._known: dict[tf.Operation, bool] = {}

    def __call__(self, op: tf.Operation) -> bool:
        """Tells it of an operation."""
        if op not in self._known:
            self._known[op] = self._decide(op)
        return self._known[op]

    def _decide(self, op: tf.Operation) -> bool:
        if op.type == "Placeholder":
            return op not in self._fed
        if op.type == "ReadVariableOp":
            return op.inputs[0].ref() not in self._written and self(op.inputs[0].op)
        return op.type in _REPEATABLE and all(self(tensor.op) for tensor in op.inputs)


def is_recomputable(
    trace: Trace, depends_only_on_weights: DependsOnlyOnWeights
) -> Callable[[tf.Operation], bool]:
    """Tells which operations give the same again once the stage's inputs are there."""
    fed = {tensor.op for tensor in trace.inputs}

    def pure(op: tf.Operation) -> bool:
        stateful = op.op_def is None or op.op_def.is_stateful
        return depends_only_on_weights(op) or not (op in fed or stateful)

    return pure
