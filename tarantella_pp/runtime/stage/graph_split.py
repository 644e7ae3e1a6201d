"""Cuts one traced graph of a stage into its forward, input-gradient and weight-gradient parts."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import networkx as nx
import tensorflow as tf

from tarantella_pp.errors import TarantellaError
from tarantella_pp.partition.graph.least_kept import FLOPS_PER_BYTE, least_kept
from tarantella_pp.partition.graph.traced_costs import operations_of
from tarantella_pp.runtime.stage import graph_functions

_READS = ("ReadVariableOp", "Placeholder", "ResourceGather", "ResourceGatherNd")
# Parts of the types of operations that take long; whatever a function calls counts as one.
_PRODUCTS = ("MatMul", "Conv", "Einsum", "While", "Call")
_WRITES = ("AssignVariableOp", "AssignAddVariableOp", "AssignSubVariableOp")
# Cheap enough to repeat in the backward pass when nothing but weights goes in.
_REPEATABLE = {
    *("Const", "Identity", "Cast", "Reshape", "ExpandDims", "Squeeze", "Shape", "Transpose"),
    *("StridedSlice", "Pack", "Prod", "ConcatV2", "Range", "Fill", "Sub", "Add", "AddV2", "Mul"),
}

# Whether something is so of an operation
Holds: TypeAlias = Callable[[tf.Operation], bool]


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
    # What a byte is worth that an operation would make again; see `least_kept`
    flops_per_byte: Callable[[tf.Operation], float] = lambda op: 0.0

    @functools.cached_property
    def extractor(self) -> graph_functions.SubgraphExtractor:
        """Makes parts of it callable."""
        extractor = graph_functions.SubgraphExtractor(self.function)
        extractor.share_constants(self.function.graph.get_operations())
        return extractor


@dataclass(frozen=True)
class GraphSplit:
    """The parts of a traced stage."""

    # inputs -> outputs + residuals; of a second cut, the residuals of the first -> residuals
    forward: Callable[..., list[tf.Tensor]]
    backward_input: Callable[..., list[tf.Tensor]]  # seeds + residuals -> input gradients + b_to_w
    backward_weight: Callable[..., list[tf.Tensor]]  # kept_for_w + b_to_w -> weight gradients
    # seeds + residuals -> input gradients + weight gradients
    backward: Callable[..., list[tf.Tensor]]
    kept_for_b: tuple[tf.Tensor, ...]  # residuals that the input-gradient pass alone needs
    kept_for_w: tuple[tf.Tensor, ...]  # residuals that the weight-gradient pass needs
    # What the weight-gradient pass needs of the input-gradient pass and its seeds
    b_to_w: tuple[tf.Tensor, ...]
    repeats: bool  # whether the backward pass repeats dear operations

    @property
    def residuals(self) -> tuple[tf.Tensor, ...]:
        """What the backward pass needs of the forward pass."""
        return self.kept_for_b + self.kept_for_w


def split_graph(trace: Trace, kept: Sequence[tf.Tensor] = ()) -> GraphSplit:
    """Cuts a traced stage in three: F, B and W; or R, B and W, where a first cut has `kept` some.

    Qi et al., "Zero Bubble Pipeline Parallelism", 2023. The backward parts repeat all that is not
    worth its memory at the trace's `flops_per_byte`; at infinity all, part by part (Chen et al.,
    "Training Deep Nets with Sublinear Memory Cost", 2016). Random numbers come out the same,
    because the state of their generators is kept.
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
    # R makes what the parts of the first cut repeat and is dear; its own B and W repeat the rest.
    sides = _Sides.of(trace)
    only_on_weights = _only_on_weights(trace)
    early, late, between, repeats = _kept(trace, sides, only_on_weights, kept)
    for tensor in (*early, *late, *between):
        if tensor.dtype == tf.resource:
            raise CutError(f"{tensor.op.type} '{tensor.op.name}' cannot be kept between passes")
    seeds, residuals = trace.seeds, (*early, *late)
    gradients = (*trace.input_gradients, *trace.weight_gradients)
    held = {tensor.ref() for tensor in residuals}

    def waits(weights_first: bool) -> dict[str, list[str]]:
        return _waits(sides, lambda t: t.ref() in held or only_on_weights(t.op), weights_first)

    carve = trace.extractor.extract
    # What the forward pass must run although nothing uses its result.
    effects = [op for op in sides.order if op not in sides.after and has_effect(op)]
    return GraphSplit(
        forward=(
            carve(kept, residuals)
            if kept
            else carve(trace.inputs, [*trace.outputs, *residuals], effects)
        ),
        backward_input=carve(
            [*seeds, *residuals], [*trace.input_gradients, *between], waits=waits(False)
        ),
        backward_weight=carve([*late, *between], trace.weight_gradients),
        backward=carve([*seeds, *residuals], gradients, waits=waits(True)),
        kept_for_b=early,
        kept_for_w=late,
        b_to_w=between,
        repeats=repeats,
    )


@dataclass(frozen=True)
class _Sides:
    """The operations of the backward pass."""

    # Place of each operation of the graph, after all that it is given
    order: Mapping[tf.Operation, int]
    after: set[tf.Operation]  # all operations that depend on the seeds
    b_ops: set[tf.Operation]  # what input gradients need
    w_ops: set[tf.Operation]  # what weight gradients need besides
    # What several gradients need: the others wait for the rest before it goes on
    shared: set[tf.Operation]

    @classmethod
    def of(cls, trace: Trace) -> _Sides:
        """Finds them; raises `CutError` if one has side effects."""
        operations = trace.function.graph.get_operations()
        after = graph_functions.dependents(trace.seeds, operations)
        b_ops = graph_functions.ancestors(trace.input_gradients) & after
        w_ops = (graph_functions.ancestors(trace.weight_gradients) & after) - b_ops
        for op in b_ops | w_ops:
            if has_effect(op):
                raise CutError(f"the backward pass has a side effect: {op.type} '{op.name}'")
        order = _topological(operations)
        reached = {g.op: 1 << place for place, g in enumerate(trace.weight_gradients)}
        for op in sorted(w_ops, key=order.__getitem__, reverse=True):
            readers = {reader for tensor in op.outputs for reader in tensor.consumers()}
            for reader in readers:
                reached[op] = reached.get(op, 0) | reached.get(reader, 0)
        shared = {op for op in w_ops if reached.get(op, 0).bit_count() > 1}
        return cls(order, after, b_ops, w_ops, b_ops | shared)


def _topological(operations: Sequence[tf.Operation]) -> dict[tf.Operation, int]:
    """The place of each operation after all that it is given.

    Loops are given, after they were made, the lists in which they keep what gradients need.
    """
    order: dict[tf.Operation, int] = {}
    for op in operations:
        todo = [op]
        while todo:
            later = [tensor.op for tensor in todo[-1].inputs if tensor.op not in order]
            todo += later
            if not later:
                order.setdefault(todo.pop(), len(order))
    return order


def _kept(
    trace: Trace, sides: _Sides, only_on_weights: Holds, first: Sequence[tf.Tensor]
) -> tuple[tuple[tf.Tensor, ...], tuple[tf.Tensor, ...], tuple[tf.Tensor, ...], bool]:
    """What is kept of a micro-batch, in three parts, and whether dear operations are repeated."""
    there = {tensor.ref() for tensor in first}
    dearest = FLOPS_PER_BYTE if there else math.inf

    def price(op: tf.Operation) -> float:
        return min(trace.flops_per_byte(op), dearest)

    gradients = [*trace.input_gradients, *trace.weight_gradients]
    read, _ = graph_functions.frontier(gradients, lambda t: t.op not in sides.after)
    kept, dear = _least(sides, read, only_on_weights, there, price)

    _, run_by_b = graph_functions.frontier(
        [*trace.input_gradients, *_quick(trace, sides)], lambda t: t.op not in sides.after
    )
    of_b = run_by_b | {seed.op for seed in trace.seeds}
    left = sides.after - of_b
    read_by_w, _ = graph_functions.frontier(trace.weight_gradients, lambda t: t.op not in left)
    older = [tensor for tensor in read_by_w if tensor.op not in of_b]
    # B repeats dear operations once, for both. It makes what W alone keeps, so W's cut begins with
    # what B is given.
    for_w, _ = _least(
        sides, older, only_on_weights, there, (lambda op: 0.0) if dear else price, kept
    )
    from_b = [tensor for tensor in read_by_w if tensor.op in of_b]
    # What both need waits for W, and B only looks at it.
    return (
        graph_functions.in_order([ref.deref() for ref in kept - for_w], sides.order),
        graph_functions.in_order([ref.deref() for ref in for_w & kept], sides.order),
        graph_functions.in_order([*from_b, *(ref.deref() for ref in for_w - kept)], sides.order),
        dear,
    )


def _least(
    sides: _Sides,
    read: Sequence[tf.Tensor],
    only_on_weights: Holds,
    there: set[Any],
    flops_per_byte: Callable[[tf.Operation], float],
    begin: Collection[Any] = (),
) -> tuple[set[Any], bool]:
    """References of the tensors to keep so that others can be read; whether dear ones run again.

    Nothing above `begin` is kept or made again.
    """

    def is_there(tensor: tf.Tensor) -> bool:
        return tensor.ref() in there or only_on_weights(tensor.op)

    needed = [tensor.ref() for tensor in read if not is_there(tensor)]
    used, above = graph_functions.frontier(read, lambda t: is_there(t) or t.ref() in begin)
    made_once = {tensor.op for tensor in used if tensor.ref() in begin} - above
    # Gradients ask late for what is known early, such as the shape of a tensor.
    late = min(map(sides.order.__getitem__, sides.after), default=len(sides.order))
    places: dict[tf.Operation, int] = {}
    for op in sorted(above | made_once, key=sides.order.__getitem__):
        given = [places[tensor.op] for tensor in op.inputs if tensor.op in places]
        places[op] = max(given) if given and sides.order[op] > late else sides.order[op]
    parts = [
        (one, flops_per_byte(op) if op in above else 0.0)
        for op in sorted(places, key=places.__getitem__)
        for one in operations_of(op, lambda t: t.ref(), only_on_weights)
    ]
    operations, prices = [one for one, _ in parts], [price for _, price in parts]
    found = least_kept(operations, needed, prices)
    used, _ = graph_functions.frontier(read, lambda t: t.ref() in found.values or is_there(t))
    handles = {ref for ref in needed if ref.deref().dtype == tf.resource}  # to be refused
    values = found.values | handles | {tensor.ref() for tensor in used if tensor.ref() in there}
    return values, any(prices[i] > FLOPS_PER_BYTE for i in found.again)


def _quick(trace: Trace, sides: _Sides) -> list[tf.Tensor]:
    """The weight gradients that do not follow from a product of the backward pass."""
    slow: set[tf.Operation] = set()
    # In the order of the graph: what an operation is given has been judged before it.
    for op in sorted(sides.w_ops, key=sides.order.__getitem__):
        if any(part in op.type for part in _PRODUCTS) or any(t.op in slow for t in op.inputs):
            slow.add(op)
    return [gradient for gradient in trace.weight_gradients if gradient.op in sides.w_ops - slow]


def _waits(
    sides: _Sides, is_there: Callable[[tf.Tensor], bool], weights_first: bool
) -> dict[str, list[str]]:
    """The operations of a backward part that others wait for, by the names of these.

    Weight gradients are computed as soon as the gradient that they need is there, and operations
    are repeated only when the backward pass has come to what needs them. Left to itself TensorFlow
    may run ahead with the input gradients and all repeated operations, and fill the memory.

        dz --> dW    (uses the repeated x)     x waits for dz
           +-> dx    waits for dW
    """
    backward = sides.b_ops | sides.w_ops if weights_first else sides.b_ops
    first = _weights_first(sides) if weights_first else {}
    order = nx.DiGraph()
    for op in backward:
        order.add_edges_from((t.op, op) for t in op.inputs if t.op in backward)
        order.add_edges_from((other, op) for other in first.get(op, ()))
        order.add_node(op)
    sorted_ops = nx.lexicographical_topological_sort(order, key=sides.order.__getitem__)
    place = {op: i for i, op in enumerate(sorted_ops)}
    user = dict(place)  # the place where an operation, or what follows from it, is first used
    waits = {op.name: [other.name for other in others] for op, others in first.items()}
    reached = list(place)
    read = (t for op in place for t in op.inputs if t.op not in sides.after)
    _, again = graph_functions.frontier(read, is_there)
    for op in sorted(again, key=sides.order.__getitem__, reverse=True):
        user[op] = min(user[r] for t in op.outputs for r in t.consumers() if r in user)
        above = [t.op for t in reached[user[op]].inputs if t.op in place]
        if above:
            waits.setdefault(op.name, []).append(max(above, key=place.__getitem__).name)
    return waits


def _weights_first(sides: _Sides) -> dict[tf.Operation, list[tf.Operation]]:
    """The weight gradients that operations which several gradients need wait for.

    What follows from the same gradient cannot be needed for them, so nothing waits for itself.
    """
    shared, order = sides.shared, sides.order
    latest: dict[tf.Operation, tf.Operation] = {}
    first: dict[tf.Operation, list[tf.Operation]] = {}
    for op in sorted(sides.w_ops - shared, key=order.__getitem__):
        above = [latest.get(t.op, t.op) for t in op.inputs if t.op in latest or t.op in shared]
        if above:
            latest[op] = max(above, key=order.__getitem__)
            for reader in {r for t in latest[op].outputs for r in t.consumers()} & shared:
                first.setdefault(reader, []).append(op)
    return first


def has_effect(op: tf.Operation) -> bool:
    """Whether an operation must run although nothing uses its result."""
    return op.op_def is not None and op.op_def.is_stateful and op.type not in _READS


def _only_on_weights(trace: Trace) -> Holds:
    """Tells whether an operation depends on constants and weights that F does not write alone."""
    operations = trace.function.graph.get_operations()
    written = {op.inputs[0].ref() for op in operations if op.type in _WRITES}
    fed, constants = {tensor.op for tensor in trace.inputs}, trace.extractor.constants

    @functools.cache
    def depends(op: tf.Operation) -> bool:
        if op.type == "Placeholder":
            return op not in fed
        # B may run after the next F: a weight that F writes has another value by then.
        if op.type == "ReadVariableOp":
            return op.inputs[0].ref() not in written and depends(op.inputs[0].op)
        simple = op.type in _REPEATABLE
        return op.name in constants or (simple and all(depends(tensor.op) for tensor in op.inputs))

    return depends
