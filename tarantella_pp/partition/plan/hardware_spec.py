"""The machine that a plan's step is simulated on, and some that are known by name."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Literal, get_args

import msgspec

from tarantella_pp.errors import ConfigurationError, PlanError
from tarantella_pp.partition.graph.json_record import decoded, read

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


class HardwareSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
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

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes a JSON file, which `machine=` and `--machine` read."""
        text = msgspec.json.format(msgspec.json.encode(self), indent=1).decode()
        try:
            Path(path).write_text(f"{text}\n", encoding="utf-8")
        except OSError as error:
            raise ConfigurationError(
                f"Cannot write the machine '{path}': {error.strerror or error}. "
                "Name a file that can be written."
            ) from error


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


class Machines(dict[str, HardwareSpec]):
    """Machines by name, from the data sheets of GPUs, and a core of a CPU as it was measured.

    Arithmetic counts products of float32 matrices as TensorFlow makes them, in TF32 from the
    A100 on; links are PCIe 3 for a P40, else NVLink in one direction. No program reaches all of
    that: `benchmarks/planning/machine.py` measures what one does.
    """


machines = Machines(
    {
        "core": CORE,
        "p40": HardwareSpec(11.76e12, 12e9, 1e-5, _LAUNCH, 346e9),
        "v100": HardwareSpec(15.7e12, 150e9, 5e-6, _LAUNCH, 900e9),
        "a100": HardwareSpec(156e12, 300e9, 5e-6, _LAUNCH, 2.039e12),
        "h100": HardwareSpec(495e12, 450e9, 5e-6, _LAUNCH, 3.35e12),
        "h200": HardwareSpec(495e12, 450e9, 5e-6, _LAUNCH, 4.8e12),
    }
)
"""The machines that options name."""


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
        return decoded(read(given, "machine"), HardwareSpec)
    except (ValueError, PlanError) as error:
        raise ConfigurationError(f"{given} has no machine: {error}") from None
