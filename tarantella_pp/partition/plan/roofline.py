"""Seconds of operations: as long as their arithmetic, or as their memory traffic, takes.

Williams, Waterman and Patterson, "Roofline: an insightful visual performance model", CACM 52
(2009)::

    seconds                                     __/   arithmetic: FLOPs / FLOP/s
                       ______________________--       traffic: bytes / bandwidth
    of a micro-batch  /  weights, once  + activations of each sample

On a CPU weights are not under that roof but come first: a product of matrices lays them out anew
before it multiplies. So micro-batches of few samples are slow.

A machine may know how fast layers of a kind really are (`LayerSpeed`). Of such a layer::

    seconds = start + weights / their layout + the longer of arithmetic and traffic

with the steps of activation functions as arithmetic of their own, at the speed of functions; and so
of its gradients, whose speeds are others. Unless that was measured, they take twice as long.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

import msgspec

from tarantella_pp.partition.graph.layer_graph import LayerGraph, Node
from tarantella_pp.partition.plan.hardware_spec import HardwareSpec, LayerSpeed, PassSpeed

BOTH_GRADIENTS = 2.0
"""How many times as long as the forward pass the backward pass takes, if nothing else is known."""
LayerKind = Literal["product", "convolution", "pointwise", "depthwise", "normalization", "function"]
"""The fields of `HardwareSpec` that say how fast layers of a kind are."""
_KINDS: dict[str, LayerKind] = {
    **dict.fromkeys(("DepthwiseConv1D", "DepthwiseConv2D"), "depthwise"),
    "BatchNormalization": "normalization",
}
_PRODUCTS = ("Einsum", "Matmul", "Dot", "Attention", "AdditiveAttention")
"""Products of matrices without weights."""


class NodeWork(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """What the forward pass of an operation does; in files an array.

    Attributes:
        flops: Floating point operations, per sample.
        activation_bytes: Bytes of activations read and written, per sample.
        weight_bytes: Bytes of variables read, for each micro-batch anew.
        kind: What kind of layer it is; `None` in plans from before that was told.
        function_flops: How many of `flops` are steps of an activation function.
    """

    flops: float
    activation_bytes: float
    weight_bytes: float
    kind: LayerKind | None = None
    function_flops: float = 0.0


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
    moves = read + written + picked + node.residual_bytes
    return NodeWork(node.flops, moves, weights, _kind(graph, node), node.function_flops)


def _kind(graph: LayerGraph, node: Node) -> LayerKind:
    """Returns what an operation is most like."""
    if node.kind in _KINDS:
        return _KINDS[node.kind]
    weights = [graph.weights[w] for w in node.weights]
    if "Conv" in node.kind:
        window = max(weights, key=lambda weight: weight.bytes).shape[:-2] if weights else ()
        return "pointwise" if set(window) == {1} else "convolution"
    multiplies = node.flops and any(len(weight.shape) > 1 for weight in weights)
    return "product" if multiplies or node.kind in _PRODUCTS else "function"


def roofline_seconds(
    work: Sequence[NodeWork], samples: float, machine: HardwareSpec
) -> list[tuple[float, float]]:
    """Returns the seconds of each operation for one micro-batch, forward and backward.

    Args:
        work: What the operations do.
        samples: Samples of the micro-batch.
        machine: The machine.
    """
    speeds = machine.layers
    return [_seconds(one, samples, machine, speeds) for one in work]


def _seconds(
    work: NodeWork, samples: float, machine: HardwareSpec, speeds: Mapping[str, LayerSpeed]
) -> tuple[float, float]:
    """Seconds of one operation, forward and backward."""
    speed = speeds.get(work.kind or "")
    if speed is None:
        forward = _plain_seconds(work, samples, machine)
        return forward, BOTH_GRADIENTS * forward
    if not work.activation_bytes:  # nothing but another view of what is there
        return 0.0, 0.0
    steps = speeds.get("function", speed)
    return (
        _pass_seconds(work, samples, machine, speed.forward, steps.forward),
        _pass_seconds(work, samples, machine, speed.backward, steps.backward, BOTH_GRADIENTS),
    )


def _pass_seconds(
    work: NodeWork,
    samples: float,
    machine: HardwareSpec,
    speed: PassSpeed,
    steps: PassSpeed,
    times: float = 1.0,
) -> float:
    """Seconds of one direction of an operation, at the speeds of its kind and of functions.

    What was not measured of its kind takes so many times as long as forward.
    """
    arithmetic = work.flops - work.function_flops
    if work.kind == "function":
        arithmetic *= times / machine.flops_per_second
    else:
        arithmetic /= speed.flops_per_second
    arithmetic += work.function_flops / steps.flops_per_second
    first, traffic = speed.start_seconds, 0.0
    if speed.weight_bandwidth is not None:
        first += work.weight_bytes / speed.weight_bandwidth
    if machine.memory_bandwidth is not None:
        traffic = times * work.activation_bytes / machine.memory_bandwidth
    return first + samples * max(arithmetic, traffic)


def _plain_seconds(work: NodeWork, samples: float, machine: HardwareSpec) -> float:
    """Seconds of the forward pass of an operation of which only its arithmetic is known."""
    arithmetic = samples * work.flops / machine.flops_per_second
    if machine.memory_bandwidth is None:
        return arithmetic
    traffic, weights = samples * work.activation_bytes, work.weight_bytes
    if machine.weight_bandwidth is None:
        return max(arithmetic, (traffic + weights) / machine.memory_bandwidth)
    laid_out = weights / machine.weight_bandwidth
    return laid_out + max(arithmetic, traffic / machine.memory_bandwidth)
