"""What in a traced graph depends on what."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

import tensorflow as tf


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
