"""Whether a layer graph fits together."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from typing import TYPE_CHECKING

from tarantella_pp.errors import GraphError

if TYPE_CHECKING:
    from tarantella_pp.partition.graph.layer_graph import LayerGraph


def check_ids(graph: LayerGraph) -> None:
    """Checks that ids are positions, and names unique."""
    for field in ("nodes", "tensors", "weights"):
        for position, item in enumerate(getattr(graph, field)):
            if item.id != position:
                raise GraphError(
                    f"Ids must be positions. Received: {field}[{position}].id={item.id}"
                )
    for name, times in Counter(node.name for node in graph.nodes).most_common(1):
        if times > 1:
            raise GraphError(f"Node names must be unique. Received: {name!r} {times} times")
    for tensor in graph.tensors:
        if tensor.alias_of is not None and not 0 <= tensor.alias_of < tensor.id:
            raise GraphError(
                f"Tensor {tensor.name!r} can share memory only with an earlier tensor, "
                f"0..{tensor.id - 1}. Received: alias_of={tensor.alias_of}"
            )
    _check_range("inputs", graph.inputs, len(graph.tensors))
    _check_range("outputs", graph.outputs, len(graph.tensors))
    for node in graph.nodes:
        _check_range(f"inputs of node {node.name!r}", node.inputs, len(graph.tensors))
        _check_range(f"outputs of node {node.name!r}", node.outputs, len(graph.tensors))
        _check_range(f"weights of node {node.name!r}", node.weights, len(graph.weights))
        if not set(node.keeps) <= {*node.inputs, *node.outputs}:
            raise GraphError(
                f"Node {node.name!r} can keep only its own inputs and outputs. "
                f"Received: keeps={node.keeps}"
            )


def _check_range(what: str, ids: Iterable[int], count: int) -> None:
    for i in ids:
        if not 0 <= i < count:
            raise GraphError(f"The {what} must lie in 0..{count - 1}. Received: {i}")


def check_edges(graph: LayerGraph) -> None:
    """Checks that nodes and tensors agree on who makes and who reads what."""
    producer: dict[int, int] = {}
    consumers: dict[int, list[int]] = {tensor.id: [] for tensor in graph.tensors}
    for node in graph.nodes:
        for t in dict.fromkeys(node.inputs):
            if t not in producer and t not in graph.inputs:
                raise GraphError(
                    f"Nodes must be in topological order without a cycle: node {node.name!r} reads "
                    f"tensor {graph.tensors[t].name!r}, which no earlier node makes."
                )
            consumers[t].append(node.id)
        for t in node.outputs:
            if t in producer or t in graph.inputs:
                raise GraphError(f"Tensor {graph.tensors[t].name!r} is made twice.")
            producer[t] = node.id
    for tensor in graph.tensors:
        if tensor.producer != producer.get(tensor.id):
            raise GraphError(
                f"Tensor {tensor.name!r} must name the node that makes it, "
                f"{producer.get(tensor.id)}. Received: producer={tensor.producer}"
            )
        if list(tensor.consumers) != consumers[tensor.id]:
            raise GraphError(
                f"Tensor {tensor.name!r} must name the nodes that read it, {consumers[tensor.id]}. "
                f"Received: consumers={list(tensor.consumers)}"
            )
        if tensor.producer is None and tensor.id not in graph.inputs:
            raise GraphError(f"Nothing makes tensor {tensor.name!r}, and it is no input.")


def check_numbers(graph: LayerGraph) -> None:
    """Checks that costs and sizes are finite and not negative."""
    fields = {
        "nodes": ("parameters", "constants", "flops", "function_flops", "residual_bytes"),
        "tensors": ("bytes_per_sample",),
        "weights": ("bytes",),
    }
    for kind, names in fields.items():
        for item in getattr(graph, kind):
            for name in names:
                value = getattr(item, name)
                if not (math.isfinite(value) and value >= 0):
                    raise GraphError(
                        f"{kind}[{item.id}].{name} ({item.name!r}) must be finite and "
                        f"not negative. Received: {value}"
                    )
