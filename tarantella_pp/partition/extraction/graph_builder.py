"""From the draft of a model to its layer graph: sizes, gradients and costs filled in."""

from __future__ import annotations

import math
from typing import Any

import msgspec

from tarantella_pp.keras_internals.functional import trained_variables
from tarantella_pp.partition.extraction.call_shapes import SizedTensor, sized_call
from tarantella_pp.partition.extraction.calls import Call, GraphBuilder
from tarantella_pp.partition.extraction.flops import forward_flops, function_flops
from tarantella_pp.partition.extraction.saved_activations import saved_activations
from tarantella_pp.partition.graph.layer_graph import (
    LayerGraph,
    Node,
    Tensor,
    Weight,
)
from tarantella_pp.partition.graph.units import item_bytes, sample_shape

#: Operations whose result is a view of what they are given.
_ALIASES = {
    *("Reshape", "Flatten", "Squeeze", "ExpandDims", "Ravel", "Identity", "StopGradient"),
    "ActivityRegularization",
}


def graph_of(
    draft: GraphBuilder,
    variables: tuple[Any, ...],
    *,
    inputs: tuple[int, ...],
    outputs: tuple[int, ...],
    assumed_size: int,
) -> LayerGraph:
    """Makes the layer graph of a draft."""
    trained = {id(v) for call in draft.calls for v in trained_variables(call.operation)}
    weights = tuple(_weight(i, v, id(v) not in trained) for i, v in enumerate(variables))
    weight_ids = {id(variable): i for i, variable in enumerate(variables)}
    uses = [tuple(weight_ids[id(v)] for v in call.variables) for call in draft.calls]
    sized = _sized_tensors(draft, _gradients(draft, weights, uses), assumed_size)
    rows = [max(1, tensor.rows_per_sample or 1) for tensor in draft.tensors]
    nodes = tuple(
        _node(i, call, sized, tuple(weights[w] for w in used), rows)
        for i, (call, used) in enumerate(zip(draft.calls, uses, strict=True))
    )
    unknown = any(sample_shape(t.shape, 1) != sample_shape(t.shape, 2) for t in draft.tensors)
    return LayerGraph(
        nodes=nodes,
        tensors=_tensors(draft, nodes, sized, rows),
        inputs=inputs,
        outputs=outputs,
        weights=weights,
        assumed_size=assumed_size if unknown else None,
    )


def _tensors(
    draft: GraphBuilder, nodes: tuple[Node, ...], sized: list[SizedTensor], rows: list[int]
) -> tuple[Tensor, ...]:
    producers = {t: node.id for node in nodes for t in node.outputs}
    consumers: list[list[int]] = [[] for _ in draft.tensors]
    aliases: dict[int, int] = {}
    for node in nodes:
        for t in node.inputs:
            consumers[t].append(node.id)
        if node.kind in _ALIASES and len(node.inputs) == len(node.outputs) == 1:
            aliases[node.outputs[0]] = node.inputs[0]
    kept = {t for node in nodes for t in node.keeps}
    return tuple(
        msgspec.structs.replace(
            tensor,
            producer=producers.get(t),
            consumers=tuple(consumers[t]),
            bytes_per_sample=sized[t].bytes * rows[t],
            has_gradient=sized[t].has_gradient,
            kept=t in kept,
            alias_of=aliases.get(t),
        )
        for t, tensor in enumerate(draft.tensors)
    )


def _sized_tensors(
    draft: GraphBuilder, gradients: list[bool], assumed_size: int
) -> list[SizedTensor]:
    return [
        SizedTensor(
            id=t,
            shape=sample_shape(tensor.shape, assumed_size),
            itemsize=item_bytes(tensor.dtype),
            has_gradient=gradients[t],
        )
        for t, tensor in enumerate(draft.tensors)
    ]


def _node(
    i: int, call: Call, sized: list[SizedTensor], weights: tuple[Weight, ...], rows: list[int]
) -> Node:
    described = sized_call(
        call.operation,
        call.arguments,
        {key: sized[t] for key, t in call.bindings.items()},
        tuple(sized[t] for t in call.outputs),
        tuple(weight.shape for weight in weights if weight.trainable),
    )
    flops, flops_source = forward_flops(described)
    kept = saved_activations(described)
    times = max((rows[t] for t in (*call.inputs, *call.outputs)), default=1)
    return Node(
        id=i,
        name=call.name,
        kind=type(call.operation).__name__,
        inputs=call.inputs,
        outputs=call.outputs,
        weights=tuple(weight.id for weight in weights),
        parameters=sum(weight.bytes for weight in weights if weight.trainable),
        constants=sum(weight.bytes for weight in weights if not weight.trainable),
        flops=flops * times,
        function_flops=function_flops(described) * times,
        flops_source=flops_source,
        keeps=kept.tensors,
        residual_bytes=kept.bytes * times,
        residual_source=kept.source,
    )


def _weight(i: int, variable: Any, stateful: bool) -> Weight:
    shape = tuple(int(size) for size in variable.shape)
    return Weight(
        id=i,
        name=variable.path,
        shape=shape,
        dtype=variable.dtype,
        trainable=bool(variable.trainable),
        bytes=math.prod(shape) * item_bytes(variable.dtype),
        stateful=stateful,
    )


def _gradients(
    draft: GraphBuilder, weights: tuple[Weight, ...], uses: list[tuple[int, ...]]
) -> list[bool]:
    """Returns for each tensor whether the backward pass sends a gradient over it."""
    flows = [False] * len(draft.tensors)
    for call, used in zip(draft.calls, uses, strict=True):
        upstream = any(weights[w].trainable for w in used) or any(flows[t] for t in call.inputs)
        if upstream and type(call.operation).__name__ != "StopGradient":
            for t in call.outputs:
                flows[t] = "float" in draft.tensors[t].dtype
    return flows
