"""What in a traced graph depends on what, and what the backward pass may repeat."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING

import tensorflow as tf

if TYPE_CHECKING:
    from tarantella_pp.runtime.tf_graph.graph_split import Trace


def dependents(seeds: Iterable[tf.Tensor], operations: Iterable[tf.Operation]) -> set[tf.Operation]:
    """Returns all operations that depend on some tensors."""
    after = {seed.op for seed in seeds}
    for op in operations:
        if any(t.op in after for t in op.inputs) or any(c in after for c in op.control_inputs):
            after.add(op)
    return after


def ancestors(tensors: Iterable[tf.Tensor]) -> set[tf.Operation]:
    """Returns all operations that some tensors depend on, or that have to run before them."""
    seen: set[tf.Operation] = set()
    todo = [tensor.op for tensor in tensors]
    while todo:
        op = todo.pop()
        if op not in seen:
            seen.add(op)
            todo += [tensor.op for tensor in op.inputs] + list(op.control_inputs)
    return seen


def frontier(
    wanted: Iterable[tf.Tensor], is_given: Callable[[tf.Tensor], bool]
) -> tuple[list[tf.Tensor], set[tf.Operation]]:
    """Returns what some tensors are computed from."""
    given: list[tf.Tensor] = []
    run: set[tf.Operation] = set()
    todo = list(wanted)
    while todo:
        tensor = todo.pop()
        if is_given(tensor):
            given.append(tensor)
        elif tensor.op not in run:
            run.add(tensor.op)
            todo += tensor.op.inputs
    return given, run


def in_order(
    tensors: Iterable[tf.Tensor], order: Mapping[tf.Operation, int]
) -> tuple[tf.Tensor, ...]:
    """Returns each tensor once, in the order in which they were made."""
    unique = {tensor.ref(): tensor for tensor in tensors}.values()
    return tuple(sorted(unique, key=lambda t: (order[t.op], t.value_index)))


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
