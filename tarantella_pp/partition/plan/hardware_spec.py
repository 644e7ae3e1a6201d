"""The machine that a plan's step is simulated on."""

from __future__ import annotations

import msgspec


class HardwareSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The ranks and what connects them.

    Attributes:
        flops_per_second: Floating point operations per second of a rank.
        bandwidth: Bytes per second of the link between two ranks, in each direction; `None` where
            messages take no time.
        latency: Seconds of each message more.
        action_seconds: Seconds that starting one computation takes.
        memory_bandwidth: Bytes per second at which weights are read and gradients added up, for
            each micro-batch anew; `None` where that is not counted.
        split_factor: How many times as long as both gradients together take those of inputs and
            weights apart.
    """

    flops_per_second: float = 1e12
    bandwidth: float | None = 10e9
    latency: float = 5e-6
    action_seconds: float = 0.0
    memory_bandwidth: float | None = None
    split_factor: float = 1.0
