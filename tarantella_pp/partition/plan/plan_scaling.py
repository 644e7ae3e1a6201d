"""What a step comes to on a number of ranks, and what is assumed of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tarantella_pp.partition.plan.plan import Plan
from tarantella_pp.simulation.nodes import Nodes


@dataclass(frozen=True, slots=True)
class Scale:
    """What is assumed of many ranks.

    Attributes:
        nodes: The hosts of the ranks. Default: each rank has a host of its own.
        strong: Whether replicas share the plan's batch. Otherwise each has a share as large as
            planned, and the batch grows.
        overlap: Whether the sum of gradients begins in the last pass backward, as soon as those of
            its layers are there. Otherwise at the end of a stage's last pass, as here.
        spread: Standard deviation of a rank's computing seconds from step to step, as a share.
    """

    nodes: Nodes | None = None
    strong: bool = False
    overlap: bool = False
    spread: float = 0.0


@dataclass(frozen=True, slots=True)
class ScalePoint:
    """A plan's step on a number of ranks.

    Attributes:
        num_ranks: Number of ranks.
        num_replicas: Number of pipelines side by side.
        step_seconds: Seconds of a step, gradients summed over replicas.
        exposed_seconds: Seconds of these that wait for the sums alone.
        straggling_seconds: Seconds of these that wait for slower ranks.
        samples: Samples of a step.
        speed_up: How many times more samples per second than one rank alone.
        played: Whether the pipeline was played event by event; otherwise from closed forms.
    """

    num_ranks: int
    num_replicas: int
    step_seconds: float
    exposed_seconds: float
    straggling_seconds: float
    samples: int
    speed_up: float
    played: bool

    @property
    def samples_per_second(self) -> float:
        """Samples of a step by its seconds."""
        return self.samples / self.step_seconds if self.step_seconds else 0.0

    @property
    def efficiency(self) -> float:
        """Speed-up by the number of ranks."""
        return self.speed_up / self.num_ranks


def left_at_buckets(plan: Plan, seconds: Sequence[float]) -> list[list[float]]:
    """Returns how much of a stage's pass backward is left when each bucket's gradients are there.

    Buckets are filled from the last layer on, so a bucket is full once the layers that come last
    have as many bytes of weights as it and those before it.
    """
    found = []
    for stage, cost in enumerate(plan.stages):
        layers = [
            (work.weight_bytes, second)
            for work, second, own in zip(plan.work, seconds, plan.assignment, strict=True)
            if own == stage
        ]
        found.append(_left(layers, cost.reduced_bytes))
    return found


def _left(layers: Sequence[tuple[float, float]], buckets: Sequence[float]) -> list[float]:
    """Returns what is left at the buckets of one stage, from weights and seconds of its layers."""
    weights, whole = (sum(layer[part] for layer in layers) for part in (0, 1))
    found, passed = [], 0.0
    behind = 0.0  # bytes of the layers whose gradients are there
    rest = list(layers)
    full = 0.0
    for size in buckets:
        full += size * weights / sum(buckets)
        while rest and behind < full * (1 - 1e-9):
            own, seconds = rest.pop()
            behind, passed = behind + own, passed + seconds
        found.append(max(0.0, 1 - passed / whole) if whole and weights else 0.0)
    return found
