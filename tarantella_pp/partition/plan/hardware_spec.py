"""The machine that a plan's step is simulated on, some known by name, and seconds of operations.

An operation takes as long as its arithmetic, or as its memory traffic, whichever is longer.
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

import os
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, ClassVar, Literal, get_args

import msgspec

from tarantella_pp.errors import ConfigurationError, PlanError
from tarantella_pp.partition.graph.json_record import JsonRecord
from tarantella_pp.partition.graph.layer_graph import LayerGraph, Node
from tarantella_pp.partition.graph.units import item_bytes

Positive = Annotated[float, msgspec.Meta(ge=1e-9)]
NotNegative = Annotated[float, msgspec.Meta(ge=0)]
LayerKind = Literal[
    "product", "convolution", "pointwise", "depthwise", "large_depthwise", "normalization",
    "function",
]  # fmt: skip
"""The fields of a machine that say how fast layers of a kind are."""


class PassSpeed(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How fast layers of one kind are in one direction.

    Attributes:
        flops_per_second: Floating point operations of the forward pass that are passed in a second.
        start_seconds: Seconds that a layer takes which has next to nothing to compute.
        weight_bandwidth: Bytes of weights per second that are laid out, or whose gradients are;
            `None` where that takes no time of its own.
    """

    flops_per_second: Positive
    start_seconds: NotNegative = 0.0
    weight_bandwidth: Positive | None = None


class LayerSpeed(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a rank does of layers of one kind, as layers of that kind were measured.

    Attributes:
        forward: Their forward pass.
        backward: Both gradients.
    """

    forward: PassSpeed
    backward: PassSpeed


class HardwareSpec(JsonRecord, frozen=True):
    """The ranks and what connects them.

    Attributes:
        flops_per_second: Floating point operations per second of a rank.
        bandwidth: Bytes per second of the link between two ranks, in each direction; `None` where
            messages take no time.
        latency: Seconds of each message more.
        action_seconds: Seconds that starting one computation takes.
        memory_bandwidth: Bytes per second at which a rank reads and writes its memory: an operation
            takes as long as its arithmetic, or as its activations and weights need to come and
            go, whichever is longer (roofline). `None` where only arithmetic is counted.
        weight_bandwidth: Bytes of weights per second that products of matrices lay out before they
            multiply, for each micro-batch anew; `None` where that takes no time of its own.
        split_factor: How many times as long the gradients of inputs and weights take apart as
            together.
        product: What it does of products of matrices in layers (dense, attention, recurrent), where
            that was measured; `None`: what the numbers above say. So are all that follow.
        convolution: Of convolutions.
        pointwise: Of convolutions of 1 x 1, which are products of matrices; `None`: as others.
        depthwise: Of depthwise convolutions.
        large_depthwise: Of those with windows above 3 x 3; `None`: as others.
        normalization: Of batch normalization, by batch statistics.
        function: Of activation functions, on their own or in layers; layers that only move data
            start like these.
    """

    noun: ClassVar[str] = "machine"

    flops_per_second: Positive = 1e12
    bandwidth: Positive | None = 10e9
    latency: NotNegative = 5e-6
    action_seconds: NotNegative = 0.0
    memory_bandwidth: Positive | None = None
    split_factor: Positive = 1.0
    weight_bandwidth: Positive | None = None
    product: LayerSpeed | None = None
    convolution: LayerSpeed | None = None
    pointwise: LayerSpeed | None = None
    depthwise: LayerSpeed | None = None
    large_depthwise: LayerSpeed | None = None
    normalization: LayerSpeed | None = None
    function: LayerSpeed | None = None

    @property
    def layers(self) -> dict[str, LayerSpeed]:
        """The kinds of layers that were measured."""
        given = {name: getattr(self, name) for name in get_args(LayerKind)}
        given["pointwise"] = self.pointwise or self.convolution
        given["large_depthwise"] = self.large_depthwise or self.depthwise
        return {name: speed for name, speed in given.items() if speed is not None}


CORE = HardwareSpec(
    flops_per_second=6e10,
    bandwidth=4.4e9,
    action_seconds=3e-4,
    memory_bandwidth=1e10,
    split_factor=1.2,
    weight_bandwidth=1e10,
)
"""One core of a CPU, as measured with the models of `benchmarks/`."""
_LAUNCH = 3e-4
"""Seconds that TensorFlow takes to start a stage's computation on a GPU, too."""


machines = {
    "core": CORE,
    "p40": HardwareSpec(11.76e12, 12e9, 1e-5, _LAUNCH, 346e9),
    "v100": HardwareSpec(15.7e12, 150e9, 5e-6, _LAUNCH, 900e9),
    "a100": HardwareSpec(156e12, 300e9, 5e-6, _LAUNCH, 2.039e12),
    "h100": HardwareSpec(495e12, 450e9, 5e-6, _LAUNCH, 3.35e12),
    "h200": HardwareSpec(495e12, 450e9, 5e-6, _LAUNCH, 4.8e12),
}
"""The machines that options name: a core of a CPU as measured, and GPUs by their data sheets.

Arithmetic counts products of float32 matrices as TensorFlow makes them, in TF32 from the A100 on;
links are PCIe 3 for a P40, else NVLink in one direction. No program reaches all of that:
`benchmarks/planning/machine.py` measures what one does.
"""


def machine_of(given: HardwareSpec | str | os.PathLike[str]) -> HardwareSpec:
    """Returns the machine that an option names."""
    if isinstance(given, HardwareSpec):
        return given
    if isinstance(given, str) and given.lower() in machines:
        return machines[given.lower()]
    if not isinstance(given, (str, os.PathLike)) or not Path(given).is_file():
        raise ConfigurationError(
            f"Expected a HardwareSpec, one of {', '.join(machines)}, or a file that "
            f"`HardwareSpec.save` wrote. Received: machine={str(given)!r}"
        )
    try:
        return HardwareSpec.load(given)
    except PlanError as error:
        raise ConfigurationError(str(error)) from None


BOTH_GRADIENTS = 2.0
"""How many times as long as the forward pass the backward pass takes, if nothing else is known."""
_LARGE_WINDOW = 3
"""Depthwise convolutions with larger windows have a kind of their own."""
_PRODUCTS = ("Einsum", "Matmul", "Dot", "Attention", "AdditiveAttention")
"""Products of matrices without weights."""
LOSS_STEPS = 15
"""Steps of a function that a loss takes for each entry of an output, about as a cross-entropy of
logits. Others take from a fifth of it (mean squared error) to twice as many."""


class NodeWork(msgspec.Struct, frozen=True, array_like=True):
    """What the forward pass of an operation does; in files an array, once of six entries.

    Attributes:
        flops: Floating point operations, per sample; of an output of the model with its loss.
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
    """Returns what each operation of a layer graph does."""
    losses = Counter[int]()
    for output in (graph.tensors[t] for t in graph.outputs):
        if output.has_gradient and output.producer is not None:
            entries = output.bytes_per_sample // item_bytes(output.dtype)
            losses[output.producer] += LOSS_STEPS * entries
    return tuple(_work(graph, node, losses[node.id]) for node in graph.nodes)


def _work(graph: LayerGraph, node: Node, loss: float) -> NodeWork:
    """Counts what one operation reads and writes; a view of another tensor is neither.

    The loss of what it makes counts as steps of an activation function.
    """
    outputs = [graph.tensors[t] for t in node.outputs]
    moved = [t for t in outputs if t.alias_of is None]
    if not moved:
        return NodeWork(node.flops + loss, 0.0, 0.0, "function" if loss else None, loss)
    written = sum(t.bytes_per_sample for t in moved)
    read = sum(graph.tensors[t].bytes_per_sample for t in node.inputs)
    weights = sum(graph.weights[w].bytes for w in node.weights) if node.flops else 0
    # Of a table only the rows that are picked are read: as much as is made of them.
    picked = written if node.weights and not node.flops else 0
    moves = read + written + picked + node.residual_bytes
    functions = node.function_flops + loss
    return NodeWork(node.flops + loss, moves, weights, _kind(graph, node), functions)


def _kind(graph: LayerGraph, node: Node) -> LayerKind:
    """Returns what an operation is most like."""
    weights = [graph.weights[w] for w in node.weights]
    if node.kind == "BatchNormalization":
        return "normalization"
    if "Conv" in node.kind and weights:
        if node.kind.startswith("Separable"):  # most of it
            return "pointwise"
        window = max(weights, key=lambda weight: weight.bytes).shape[:-2]
        if node.kind.startswith("Depthwise"):
            return "large_depthwise" if max(window, default=1) > _LARGE_WINDOW else "depthwise"
        return "pointwise" if set(window) == {1} else "convolution"
    multiplies = node.flops and any(len(weight.shape) > 1 for weight in weights)
    return "product" if multiplies or node.kind in _PRODUCTS else "function"


def roofline_seconds(
    work: Sequence[NodeWork], samples: float, machine: HardwareSpec
) -> list[tuple[float, float]]:
    """Returns the seconds of each operation for one micro-batch, forward and backward."""
    forward = _Pass(machine, {kind: speed.forward for kind, speed in machine.layers.items()}, 1.0)
    speeds = {kind: speed.backward for kind, speed in machine.layers.items()}
    backward = _Pass(machine, speeds, BOTH_GRADIENTS)
    return [(forward.seconds(one, samples), backward.seconds(one, samples)) for one in work]


class _Pass:
    """One direction of operations; what was not measured takes `times` as long as forward."""

    def __init__(
        self, machine: HardwareSpec, speeds: Mapping[str, PassSpeed], times: float
    ) -> None:
        self._speeds, self._times, self._bandwidth = speeds, times, machine.memory_bandwidth
        laid_out = machine.weight_bandwidth and machine.weight_bandwidth / times
        self._plain = PassSpeed(machine.flops_per_second / times, 0.0, laid_out)

    def seconds(self, work: NodeWork, samples: float) -> float:
        """Seconds of an operation, at the speeds of its kind and of functions."""
        if not (work.activation_bytes or work.flops):  # a view of another tensor
            return 0.0
        measured = self._speeds.get(work.kind or "")
        speed = measured or self._plain
        steps = self._speeds.get("function", speed)
        rest = self._plain if work.kind == "function" else speed
        first, moved = speed.start_seconds, samples * work.activation_bytes
        if speed.weight_bandwidth is not None:
            first += work.weight_bytes / speed.weight_bandwidth
        elif measured is None:
            moved += work.weight_bytes
        arithmetic = (work.flops - work.function_flops) / rest.flops_per_second
        arithmetic += work.function_flops / steps.flops_per_second
        traffic = 0.0 if self._bandwidth is None else self._times * moved / self._bandwidth
        return first + max(samples * arithmetic, traffic)
