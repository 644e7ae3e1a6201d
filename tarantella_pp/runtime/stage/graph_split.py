"""Cuts one traced graph of a stage into its forward, input-gradient and weight-gradient parts."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from tarantella_pp.errors import TarantellaError
from tarantella_pp.runtime.stage.graph_functions import (
    SubgraphExtractor,
    ancestors,
    dependents,
    frontier,
    in_order,
)

_READS = ("ReadVariableOp", "Placeholder", "ResourceGather", "ResourceGatherNd")
# Parts of the types of operations that take long; whatever a function calls counts as one.
_PRODUCTS = ("MatMul", "Conv", "Einsum", "While", "Call")


_WRITES = ("AssignVariableOp", "AssignAddVariableOp", "AssignSubVariableOp")
# Cheap enough to repeat in the backward pass when nothing but weights goes in.
_REPEATABLE = {
    *("Const", "Identity", "Cast", "Reshape", "ExpandDims", "Squeeze", "Shape", "Transpose"),
    *("StridedSlice", "Pack", "Prod", "ConcatV2", "Range", "Fill", "Sub", "Add", "AddV2", "Mul"),
}


class CutError(TarantellaError):
    """A traced graph that cannot be cut into forward and backward parts."""


@dataclass(frozen=True)
class Trace:
    """One micro-batch of a stage, forward and backward, as one TensorFlow graph."""

    function: Any  # the concrete function that holds the graph
    inputs: Sequence[tf.Tensor]  # placeholders of the stage's inputs
    seeds: Sequence[tf.Tensor]  # placeholders of the gradients that come in
    outputs: Sequence[tf.Tensor]  # what the forward pass hands on
    input_gradients: Sequence[tf.Tensor]  # gradients to hand back
    weight_gradients: Sequence[tf.Tensor]  # components of the gradients of the weights, flattened


@dataclass(frozen=True)
class GraphSplit:
    """The parts of a traced stage."""

    forward: Callable[..., list[tf.Tensor]]  # inputs -> outputs + residuals
    backward_input: Callable[..., list[tf.Tensor]]  # seeds + residuals -> input gradients + b_to_w
    backward_weight: Callable[..., list[tf.Tensor]]  # kept_for_w + b_to_w -> weight gradients
    # seeds + residuals -> input gradients + weight gradients
    backward: Callable[..., list[tf.Tensor]]
    kept_for_b: tuple[tf.Tensor, ...]  # residuals that the input-gradient pass alone needs
    kept_for_w: tuple[tf.Tensor, ...]  # residuals that the weight-gradient pass needs
    # What the weight-gradient pass needs of the input-gradient pass and its seeds
    b_to_w: tuple[tf.Tensor, ...]

    @property
    def residuals(self) -> tuple[tf.Tensor, ...]:
        """What the backward pass needs of the forward pass."""
        return self.kept_for_b + self.kept_for_w


def split_graph(trace: Trace, repeats: bool = False) -> GraphSplit:
    """Cuts a traced stage in three: F, B and W.

    Qi et al., "Zero Bubble Pipeline Parallelism", 2023. With `repeats` the backward parts repeat
    the forward pass from the stage's inputs, and nothing else is kept (Chen et al., "Training Deep
    Nets with Sublinear Memory Cost", 2016). Random numbers come out the same, because the state of
    their generators is kept.
    """
    #   inputs -> F -> outputs
    #             |
    #             +-- kept_for_b --> B --> input gradients      (B is given the seeds)
    #             |                  |
    #             |                b_to_w
    #             |                  v
    #             +-- kept_for_w --> W --> weight gradients
    #
    # `backward` is B and W in one, for schedules that do not part them: nothing is kept between.
    sides = _Sides.of(trace)
    early, late, between = _kept(trace, sides, repeats)
    for tensor in (*early, *late, *between):
        if tensor.dtype == tf.resource:
            raise CutError(f"{tensor.op.type} '{tensor.op.name}' cannot be kept between passes")
    seeds, residuals = trace.seeds, (*early, *late)
    gradients = (*trace.input_gradients, *trace.weight_gradients)
    carve = SubgraphExtractor(trace.function).extract
    # What the forward pass must run although nothing uses its result.
    effects = [op for op in sides.order if op not in sides.after and has_effect(op)]
    return GraphSplit(
        forward=carve(trace.inputs, [*trace.outputs, *residuals], effects),
        backward_input=carve([*seeds, *residuals], [*trace.input_gradients, *between]),
        backward_weight=carve([*late, *between], trace.weight_gradients),
        backward=carve([*seeds, *residuals], gradients, first=_weights_first(sides)),
        kept_for_b=early,
        kept_for_w=late,
        b_to_w=between,
    )


@dataclass(frozen=True)
class _Sides:
    """The operations of the backward pass."""

    # Place of each operation of the graph, after all that it is given
    order: Mapping[tf.Operation, int]
    after: set[tf.Operation]  # all operations that depend on the seeds
    b_ops: set[tf.Operation]  # what input gradients need
    w_ops: set[tf.Operation]  # what weight gradients need besides

    @classmethod
    def of(cls, trace: Trace) -> _Sides:
        """Finds them; raises `CutError` if one has side effects."""
        operations = trace.function.graph.get_operations()
        after = dependents(trace.seeds, operations)
        b_ops = ancestors(trace.input_gradients) & after
        w_ops = (ancestors(trace.weight_gradients) & after) - b_ops
        for op in b_ops | w_ops:
            if has_effect(op):
                raise CutError(f"the backward pass has a side effect: {op.type} '{op.name}'")
        return cls({op: place for place, op in enumerate(operations)}, after, b_ops, w_ops)


def _kept(
    trace: Trace, sides: _Sides, repeats: bool
) -> tuple[tuple[tf.Tensor, ...], tuple[tf.Tensor, ...], tuple[tf.Tensor, ...]]:
    """What is kept of a micro-batch: the three parts of `GraphSplit`."""
    only_on_weights = _only_on_weights(trace)
    is_made_again = _recomputable(trace, only_on_weights) if repeats else only_on_weights

    def is_residual(tensor: tf.Tensor) -> bool:
        return tensor.op not in sides.after and not is_made_again(tensor.op)

    residuals, _ = frontier([*trace.input_gradients, *trace.weight_gradients], is_residual)
    _, run_by_b = frontier([*trace.input_gradients, *_quick(trace, sides)], is_residual)
    of_b = {op for op in run_by_b if not only_on_weights(op)} | {seed.op for seed in trace.seeds}
    used_by_w, _ = frontier(trace.weight_gradients, lambda t: t.op in of_b or is_residual(t))
    late = in_order([t for t in used_by_w if t.op not in of_b], sides.order)
    # What both need waits for W, and B only looks at it.
    waits = {tensor.ref() for tensor in late}
    return (
        in_order([t for t in residuals if t.ref() not in waits], sides.order),
        late,
        in_order([t for t in used_by_w if t.op in of_b], sides.order),
    )


def _quick(trace: Trace, sides: _Sides) -> list[tf.Tensor]:
    """The weight gradients that do not follow from a product of the backward pass."""
    slow: set[tf.Operation] = set()
    # In the order of the graph: what an operation is given has been judged before it.
    for op in sorted(sides.w_ops, key=sides.order.__getitem__):
        if any(part in op.type for part in _PRODUCTS) or any(t.op in slow for t in op.inputs):
            slow.add(op)
    return [gradient for gradient in trace.weight_gradients if gradient.op in sides.w_ops - slow]


def _weights_first(sides: _Sides) -> dict[str, list[str]]:
    """Has weight gradients computed as soon as the gradient that they need is there.

    Left to itself TensorFlow may run ahead with the input gradients, and all that the weight
    gradients need is in memory until they are computed. What follows from the same gradient cannot
    be needed for them, so that nothing waits for itself.
    """
    b_ops, order = sides.b_ops, sides.order
    latest: dict[tf.Operation, tf.Operation] = {}
    first: dict[str, list[str]] = {}
    for op in sorted(sides.w_ops, key=order.__getitem__):
        above = [latest.get(t.op, t.op) for t in op.inputs if t.op in latest or t.op in b_ops]
        if above:
            latest[op] = max(above, key=order.__getitem__)
            for reader in {r for t in latest[op].outputs for r in t.consumers()} & b_ops:
                first.setdefault(reader.name, []).append(op.name)
    return first


def has_effect(op: tf.Operation) -> bool:
    """Whether an operation must run although nothing uses its result."""
    return op.op_def is not None and op.op_def.is_stateful and op.type not in _READS


def _only_on_weights(trace: Trace) -> Callable[[tf.Operation], bool]:
    """Tells whether an operation depends on constants and weights that F does not write alone."""
    operations = trace.function.graph.get_operations()
    written = {op.inputs[0].ref() for op in operations if op.type in _WRITES}
    fed = {tensor.op for tensor in trace.inputs}

    @functools.cache
    def depends(op: tf.Operation) -> bool:
        if op.type == "Placeholder":
            return op not in fed
        # B may run after the next F: a weight that F writes has another value by then.
        if op.type == "ReadVariableOp":
            return op.inputs[0].ref() not in written and depends(op.inputs[0].op)
        return op.type in _REPEATABLE and all(depends(tensor.op) for tensor in op.inputs)

    return depends


def _recomputable(
    trace: Trace, only_on_weights: Callable[[tf.Operation], bool]
) -> Callable[[tf.Operation], bool]:
    """Tells which operations give the same again once the stage's inputs are there."""
    fed = {tensor.op for tensor in trace.inputs}

    def pure(op: tf.Operation) -> bool:
        stateful = op.op_def is None or op.op_def.is_stateful
        return only_on_weights(op) or not (op in fed or stateful)

    return pure
