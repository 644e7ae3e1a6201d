"""Seconds of operations: as long as their arithmetic, or as their memory traffic, takes.

Williams, Waterman and Patterson, "Roofline: an insightful visual performance model", CACM 52
(2009)::

    seconds                                     __/   arithmetic: FLOPs / FLOP/s
                       ______________________--       traffic: bytes / bandwidth
    of a micro-batch  /  weights, once  + activations of each sample

On a CPU weights are not under that roof but come first: a product of matrices lays them out anew
before it multiplies. So micro-batches of few samples are slow.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from tarantella_pp.partition.graph.layer_graph import LayerGraph, Node
from tarantella_pp.partition.plan.hardware_spec import HardwareSpec


class NodeWork(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """What the forward pass of an operation does; in files an array of three numbers.

    Attributes:
        flops: Floating point operations, per sample.
        activation_bytes: Bytes of activations read and written, per sample.
        weight_bytes: Bytes of variables read, for each micro-batch anew.
    """

    flops: float
    activation_bytes: float
    weight_bytes: float


def node_work(graph: LayerGraph) -> tuple[NodeWork, ...]:
    """Returns what each operation of a layer graph does.

    Args:
        graph: The layer graph.
    """
    return tuple(_work(graph, node) for node in graph.nodes)


def _work(graph: LayerGraph, node: Node) -> NodeWork:
    """Counts what one operation reads and writes; what is only looked at otherwise is neither.

    A table of which rows are picked is read as far as it is written, so weights without arithmetic
    count as what they make.
    """
    outputs = [graph.tensors[t] for t in node.outputs]
    moved = [t for t in outputs if t.alias_of is None]
    if not moved:
        return NodeWork(node.flops, 0.0, 0.0)
    written = sum(t.bytes_per_sample for t in moved)
    read = sum(graph.tensors[t].bytes_per_sample for t in node.inputs)
    weights = sum(graph.weights[w].bytes for w in node.weights) if node.flops else 0
    picked = written if node.weights and not node.flops else 0
    return NodeWork(node.flops, read + written + picked + node.residual_bytes, weights)


def roofline_seconds(
    work: Sequence[NodeWork], samples: float, machine: HardwareSpec
) -> list[float]:
    """Returns the seconds of the forward pass of each operation for one micro-batch.

    Args:
        work: What the operations do.
        samples: Samples of the micro-batch.
        machine: The machine.
    """
    speed, memory = machine.flops_per_second, machine.memory_bandwidth
    if memory is None:
        return [samples * one.flops / speed for one in work]
    beside, first = 1 / memory, 0.0
    if machine.weight_bandwidth is not None:
        beside, first = 0.0, 1 / machine.weight_bandwidth
    return [
        first * one.weight_bytes
        + max(
            samples * one.flops / speed,
            samples * one.activation_bytes / memory + beside * one.weight_bytes,
        )
        for one in work
    ]
