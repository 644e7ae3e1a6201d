"""The machine that a plan's step is simulated on, and some that are known by name."""

from __future__ import annotations

import math
import os
from pathlib import Path

import msgspec

from tarantella_pp.errors import ConfigurationError, PlanError
from tarantella_pp.partition.graph.json_record import decoded, read


class PassSpeed(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How fast layers of one kind are in one direction.

    Attributes:
        flops_per_second: Floating point operations of the forward pass that are passed in a second.
        start_seconds: Seconds that a layer takes which has next to nothing to compute.
        weight_bandwidth: Bytes of weights per second that are laid out, or whose gradients are;
            `None` where that takes no time of its own.
    """

    flops_per_second: float
    start_seconds: float = 0.0
    weight_bandwidth: float | None = None


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
        split_factor: How many times as long as both gradients together take those of inputs and
            weights apart.
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

    flops_per_second: float = 1e12
    bandwidth: float | None = 10e9
    latency: float = 5e-6
    action_seconds: float = 0.0
    memory_bandwidth: float | None = None
    split_factor: float = 1.0
    weight_bandwidth: float | None = None
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
        given = {name: getattr(self, name) for name in LAYER_KINDS}
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


LAYER_KINDS = (
    "product", "convolution", "pointwise", "depthwise", "large_depthwise", "normalization",
    "function",
)  # fmt: skip
"""The fields of a machine that are a `LayerSpeed`."""
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

    Arithmetic is that of products of float32 matrices as TensorFlow makes them, in TF32 from the
    A100 on; links are PCIe 3 for a P40, else NVLink in one direction. No program reaches all of
    that: `benchmarks/planning/machine.py` measures what one does.
    """


_MAY_BE_NOTHING = ("latency", "action_seconds", "start_seconds")
LEAST = 1e-9
"""The least that speeds and factors of a machine may be."""

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
        found = decoded(read(given, "machine"), HardwareSpec)
    except (ValueError, PlanError) as error:
        raise ConfigurationError(f"{given} has no machine: {error}") from None
    parts: dict[str, HardwareSpec | PassSpeed] = {"": found}
    for kind, speed in found.layers.items():
        parts |= {f"{kind}.forward": speed.forward, f"{kind}.backward": speed.backward}
    for where, part in parts.items():
        for name, value in msgspec.structs.asdict(part).items():
            if value is None or isinstance(value, LayerSpeed):
                continue
            least = 0.0 if name in _MAY_BE_NOTHING else LEAST
            if not least <= value < math.inf:
                full = f"{where}.{name}".lstrip(".")
                raise ConfigurationError(
                    f"{given} has no machine: expected {full} of at least {least:g}. "
                    f"Received: {value}"
                )
    return found
