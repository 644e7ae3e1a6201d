"""How training with replicas was published to scale, beside what the simulator says.

    python benchmarks/planning/published_scaling.py

What hardware there was is assumed from data sheets, and nothing is fitted: see `PUBLISHED`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import cache, partial
from typing import NamedTuple

import keras

from tarantella_pp.models.deferred_init import only_shapes
from tarantella_pp.partition.extraction.keras_reader import extract
from tarantella_pp.partition.options import PlanOptions
from tarantella_pp.partition.plan.hardware_spec import CORE, HardwareSpec, machines
from tarantella_pp.partition.plan.plan_scaling import Scale
from tarantella_pp.partition.plan.plan_simulation import PlanSimulation
from tarantella_pp.partition.planner import Planner
from tarantella_pp.simulation.nodes import Nodes
from tests.zoo.published_models import resnet1001

P100 = HardwareSpec(9.5e12, 12e9, 2e-5, memory_bandwidth=0.8 * 732e9)
V100 = machines["v100"]
applications = keras.applications


class Published(NamedTuple):
    """A published speed-up of replicas, and the machine that is assumed."""

    name: str
    source: str
    build: Callable[[], keras.Model]
    replicas: int
    samples: int
    speed_up: float
    machine: HardwareSpec
    nodes: Nodes
    stages: int = 1
    micro_batches: int = 1


HOROVOD = Nodes(4, 25e9 / 8, 12e9)
"""P100s in hosts of four, on PCIe, with cards of 25 Gbit/s, TCP."""
TARANTELLA = Nodes(4, 100e9 / 8, 12e9)
"""V100s in hosts of four with cards of 100 Gbit/s."""
HYPAR_FLOW = Nodes(48, 100e9 / 8, 4.4e9)
"""Hosts of 48 ranks, one for each core, with cards of 100 Gbit/s."""
PUBLISHED = (
    Published("Inception V3", "Horovod", partial(applications.InceptionV3, weights=None),
              512, 64, 0.90 * 512, P100, HOROVOD),
    Published("ResNet-101", "Horovod", partial(applications.ResNet101, weights=None),
              512, 64, 0.90 * 512, P100, HOROVOD),
    Published("VGG-16", "Horovod", partial(applications.VGG16, weights=None),
              512, 64, 0.68 * 512, P100, HOROVOD),
    Published("ResNet-50", "Tarantella", partial(applications.ResNet50, weights=None),
              96, 64, 57.0, V100, TARANTELLA),
    Published("ResNet-1001", "HyPar-Flow", resnet1001, 128, 256, 110.0, CORE, HYPAR_FLOW, 48, 32),
    Published("ResNet-1001", "HyPar-Flow", resnet1001, 512, 256, 481.0, CORE, HYPAR_FLOW, 48, 32),
)  # fmt: skip


def efficiency(row: Published, scale: Scale) -> float:
    """How many times faster than one replica, for each replica."""
    planner = planner_of(row.build, row.machine)
    options = PlanOptions(
        num_stages=row.stages, batch_size=row.samples * row.replicas,
        num_micro_batches=row.micro_batches, num_replicas=row.replicas, schedule="gpipe",
        balance="flops", memory_limit=None,
    ).settled()  # fmt: skip
    plan = planner.plan(options)
    count = row.micro_batches
    simulation = PlanSimulation(plan, row.machine, "gpipe", count, scale).of_replicas(row.replicas)
    step = simulation.step()
    return step.pipeline_seconds / simulation.point(step, row.replicas).step_seconds


@cache
def planner_of(build: Callable[[], keras.Model], machine: HardwareSpec) -> Planner:
    """Reads a model, once."""
    with only_shapes():
        return Planner.of(extract(build()), "sgd", machine=machine)


def rows() -> Iterator[Sequence[str]]:
    """Yields published and simulated efficiencies."""
    yield (
        *("model", "with", "replicas", "published", "sums at the end", "sums overlapped"),
        *("overlapped, spread of 5 %",),
    )  # fmt: skip
    for row in PUBLISHED:
        scales = [
            Scale(row.nodes),
            Scale(row.nodes, overlap=True),
            Scale(row.nodes, overlap=True, spread=0.05),
        ]
        yield (
            row.name, row.source, f"{row.replicas} x {row.stages}" if row.stages > 1 else
            str(row.replicas), f"{row.speed_up / row.replicas:.0%}",
            *(f"{efficiency(row, scale):.0%}" for scale in scales),
        )  # fmt: skip


if __name__ == "__main__":
    for cells in rows():
        print("| " + " | ".join(cells) + " |", flush=True)
