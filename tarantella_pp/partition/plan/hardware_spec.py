"""The machine that a plan's step is simulated on, some known by name, and seconds of operations.

An operation takes as long as its arithmetic, or as its memory traffic, whichever is longer.
Williams, Waterman and Patterson, "Roofline: an insightful visual performance model", CACM 52
(2009)::

    seconds                                     __/   arithmetic: FLOPs / FLOP/s
                       ______________________--       traffic: bytes / bandwidth
    of a micro-batch  /  weights, once  + activations of each sample

On a CPU weights are not under that roof but come first: a product of matrices lays them out anew
before it multiplies. So micro-batches of few samples are slow. Both gradients take twice as long.
"""

from __future__ import annotations

import math
import os
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, ClassVar

import msgspec

from tarantella_pp.errors import ConfigurationError, PlanError
from tarantella_pp.partition.graph.json_record import JsonRecord
from tarantella_pp.partition.graph.layer_graph import LayerGraph, Node
from tarantella_pp.partition.graph.units import MOST, item_bytes

Positive = Annotated[float, msgspec.Meta(ge=1e-9, le=MOST)]
NotNegative = Annotated[float, msgspec.Meta(ge=0, le=MOST)]


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
        product, convolution, pointwise, depthwise, large_depthwise, normalization, function: In
            files of before; nothing is made of them.
    """

    noun: ClassVar[str] = "machine"

    flops_per_second: Positive = 1e12
    bandwidth: Positive | None = 10e9
    latency: NotNegative = 5e-6
    action_seconds: NotNegative = 0.0
    memory_bandwidth: Positive | None = None
    split_factor: Positive = 1.0
    weight_bandwidth: Positive | None = None
    product: Any = None
    convolution: Any = None
    pointwise: Any = None
    depthwise: Any = None
    large_depthwise: Any = None
    normalization: Any = None
    function: Any = None


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
LOSS_STEPS = 15
"""FLOPs of a loss for each entry of an output, about as of a cross-entropy of logits. Others take
from a fifth of it (mean squared error) to twice as many."""


class NodeWork(msgspec.Struct, frozen=True, array_like=True):
    """What an operation does; in files an array, once of more entries.

    Attributes:
        flops: Floating point operations, per sample; of an output of the model with its loss.
        activation_bytes: Bytes of activations read and written, per sample.
        weight_bytes: Bytes of variables read, for each micro-batch anew.
        needed: Shares of its gradients that are needed: of inputs, none where nothing up to it is
            trained, and of weights, as many as are trained. In older files no numbers: all of both.
    """

    flops: float
    activation_bytes: float
    weight_bytes: float
    needed: tuple[float, float] | str | None = (1.0, 1.0)

    @property
    def gradients(self) -> tuple[float, float]:
        """How long gradients of inputs and of weights take, by the forward pass."""
        back, weights = self.needed if isinstance(self.needed, tuple) else (1.0, 1.0)
        return back * BOTH_GRADIENTS / 2, weights * BOTH_GRADIENTS / 2


def node_work(graph: LayerGraph) -> tuple[NodeWork, ...]:
    """Returns what each operation of a layer graph does."""
    losses = Counter[int]()
    for output in (graph.tensors[t] for t in graph.outputs):
        if output.has_gradient and output.producer is not None:
            entries = output.bytes_per_sample // item_bytes(output.dtype)
            losses[output.producer] += LOSS_STEPS * entries
    return tuple(_work(graph, node, losses[node.id]) for node in graph.nodes)


def _work(graph: LayerGraph, node: Node, loss: float) -> NodeWork:
    """Counts what one operation reads and writes; a view of another tensor is neither."""
    outputs = [graph.tensors[t] for t in node.outputs]
    moved = [t for t in outputs if t.alias_of is None]
    needed = _needed(graph, node)
    if not moved:
        return NodeWork(node.flops + loss, 0.0, 0.0, needed)
    written = sum(t.bytes_per_sample for t in moved)
    read = sum(graph.tensors[t].bytes_per_sample for t in node.inputs)
    own = [graph.weights[w] for w in node.weights]
    # Of a table only the rows that are picked are read, as much as is made of them: what reads all
    # of its weights computes with each.
    reads_all = node.flops >= sum(math.prod(weight.shape) for weight in own)
    weights = sum(weight.bytes for weight in own) if reads_all else 0
    moves = read + written + written * (not reads_all) + node.residual_bytes
    return NodeWork(node.flops + loss, moves, weights, needed)


def _needed(graph: LayerGraph, node: Node) -> tuple[float, float]:
    """Returns the shares of an operation's gradients, of inputs and of weights, that are needed."""
    # What is trained first counts as if something before it were, too.
    if not any(graph.tensors[t].has_gradient for t in node.outputs):
        return 0.0, 0.0
    weights = [graph.weights[w] for w in node.weights if not graph.weights[w].stateful]
    trained = sum(math.prod(weight.shape) for weight in weights if weight.trainable)
    every = sum(math.prod(weight.shape) for weight in weights)
    return 1.0, trained / every if every else 1.0


def roofline_seconds(
    work: Sequence[NodeWork], samples: float, machine: HardwareSpec
) -> list[tuple[float, float, float]]:
    """Returns the seconds of each operation: forward, gradients of inputs, gradients of weights."""
    found = []
    for one in work:
        first, moved = 0.0, samples * one.activation_bytes
        if machine.weight_bandwidth is not None:
            first = one.weight_bytes / machine.weight_bandwidth
        else:
            moved += one.weight_bytes
        traffic = 0.0 if machine.memory_bandwidth is None else moved / machine.memory_bandwidth
        forward = first + max(samples * one.flops / machine.flops_per_second, traffic)
        if not (one.activation_bytes or one.flops):  # a view of another tensor
            forward = 0.0
        back, weights = one.gradients
        found.append((forward, back * forward, weights * forward))
    return found
