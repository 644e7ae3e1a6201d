"""Measures the machine: what a rank computes while all others do so, too, and the slowest link.

    tarantella -n 2 -- benchmarks/planning/machine.py machine.json

The file is for `tarantella plan make --machine machine.json`: products, memory and the layout of
weights; as many ranks as are started do them at once.

A rank that trains does so for hours, and so do the others. So probes run on all ranks at once, in
turn, for a while, and their medians count: what is quicker for a moment, or alone, is not kept up.

Where ranks share cores, the clock says little of a probe: either another rank has run meanwhile, or
not. There the time of the processor counts, as often as there are ranks for each core.
"""

from __future__ import annotations

import argparse
import os
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from tarantella_pp.partition.plan.hardware_spec import CORE, HardwareSpec
from tarantella_pp.runtime.comm.communicator import Communicator, world
from tarantella_pp.runtime.comm.machine import measure_link

SECONDS, TIMES = 4.0, 5
"""How long probes run, and how often each, at the least."""
REPEATED = 8
"""How many stacks of small layers follow each other, so that the start of the first is little."""
ENOUGH, MOST = 0.02, 8192
"""Seconds of a matrix product whose start does not count, and rows of the largest matrix."""
MOVED = 32 << 20
"""Bytes of the tensor that is read and written: more than caches of a core hold."""
SAMPLES = 4
"""Samples of a micro-batch that layers are measured with."""
Call = Callable[[], Any]
Shape = tuple[int, ...]


def _products(layers: Any, width: int) -> list[Any]:
    """Those of a transformer's block."""
    return [layers.Dense(4 * width), layers.Dense(width)]


SHAPES = {"large": (128, 256), "small": (1, 16), "wide": (8, 1024)}
"""Of a sample: `"large"`, with which arithmetic takes most of the time, `"small"`, with next to
nothing to compute, and `"wide"`, with which weights take most of it."""


@dataclass(frozen=True, slots=True)
class Stack:
    """Layers, compiled.

    Attributes:
        model: The layers.
        forward: Runs them forward.
        flops: Floating point operations of the forward pass.
        weight_bytes: Bytes of weights that are read.
    """

    model: Any
    forward: Call
    flops: float
    weight_bytes: float

    @classmethod
    def of(cls, size: str) -> Stack:
        """Builds dense layers for samples of a size."""
        import keras
        import tensorflow as tf

        from tarantella_pp.partition.graph.keras_reader import extract
        from tarantella_pp.partition.plan.hardware_spec import node_work

        shape = SHAPES[size]
        stacks = range(REPEATED if size == "small" else 1)
        layers = [one for _ in stacks for one in _products(keras.layers, shape[-1])]
        model = keras.Sequential([keras.Input(shape), *layers])
        x = tf.random.normal((SAMPLES, *shape))

        @tf.function(autograph=False)
        def forward() -> Any:
            return model(x, training=True)

        graph = extract(model).graph
        return cls(
            model=model,
            forward=forward.get_concrete_function(),
            flops=SAMPLES * sum(node.flops for node in graph.nodes),
            weight_bytes=sum(work.weight_bytes for work in node_work(graph)),
        )


class ComputeProbes:
    """Probes, compiled once."""

    def __init__(self, group: Communicator) -> None:
        import tensorflow as tf

        self._group = group
        self._on_gpu = bool(tf.config.list_physical_devices("GPU"))
        self._measures = group.rank == 0 or not self._on_gpu
        place = [socket.gethostname(), *sorted(os.sched_getaffinity(0))]
        self._share_cores(ranks_per_core(group.allgather_json(place), group.rank))
        self._rows, product = _product(tf)
        self._calls: dict[str, Call] = {
            "nothing": tf.function(lambda: tf.constant(0.0), autograph=False),
            "memory": memory_traffic(tf),
            "stage": _stage(tf),
            "product": product,
        }
        self._stacks = {} if self._on_gpu else {size: Stack.of(size) for size in SHAPES}
        self._calls |= {size: of.forward for size, of in self._stacks.items()}
        self._round()  # the first calls are slow

    def _share_cores(self, ranks: float) -> None:
        """Chooses the clock, for so many ranks of each core."""
        self._sharing = 1.0 if self._on_gpu else max(1.0, ranks)
        self._clock = time.perf_counter if self._sharing == 1.0 else time.process_time

    def measure(self, seconds: float = SECONDS) -> dict[str, Any]:
        """Measures on all ranks at once."""
        return self.found_in(self.rounds(seconds, TIMES))

    def rounds(self, seconds: float, least: int) -> list[list[float]]:
        """Returns what each call takes, one after the other, again and again on all ranks at once.

        So none finds in caches what it left there, and where a machine is slow for a while, all
        are.
        """
        self._group.barrier()
        end, found = time.perf_counter() + seconds, list[list[float]]()
        while len(found) < least or time.perf_counter() < end:
            found.append(self._round())
        return found

    def _round(self) -> list[float]:
        """Where next to nothing is computed, the code is to be there: it is called twice."""
        taken = []
        for name, call in self._calls.items() if self._measures else ():
            if "small" in name or name == "nothing":
                call()
            begin = self._clock()
            found = call()
            if self._on_gpu:
                found.numpy()
            taken.append(self._sharing * (self._clock() - begin))
        return taken

    def found_in(self, rounds: Sequence[Sequence[float]]) -> dict[str, Any]:
        """Returns what the slowest rank does, by the medians of its rounds; all ranks call it."""
        found: dict[str, Any] = {}
        if self._measures:
            medians = np.median(rounds, axis=0).tolist()
            taken = dict(zip(self._calls, medians, strict=True))
            found = {
                "seconds": sum(medians),
                "flops_per_second": 2.0 * self._rows**3 / taken["product"],
                "memory_bandwidth": 2.0 * MOVED / taken["memory"],
                "action_seconds": taken["stage"],
                "on_gpu": float(self._on_gpu),
                "weight_bandwidth": weight_bandwidth(self._stacks, taken),
            }
        return slowest([of for of in self._group.allgather_json(found) if of])


def ranks_per_core(places: Sequence[Sequence[Any]], rank: int) -> float:
    """Returns the ranks of a host for each of the cores that they run on."""
    there = [cores for host, *cores in places if host == places[rank][0]]
    return len(there) / len({core for cores in there for core in cores})


def weight_bandwidth(stacks: Mapping[str, Stack], taken: Mapping[str, float]) -> float | None:
    """Returns the bytes of weights per second that dense layers lay out; `None` on a GPU."""
    if not stacks:
        return None
    seconds = {size: taken[size] - taken["nothing"] for size in stacks}
    start = max(0.0, seconds["small"]) / len(stacks["small"].model.layers)
    large, wide = stacks["large"], stacks["wide"]
    left = [seconds[size] - start * len(stacks[size].model.layers) for size in ("large", "wide")]
    rows = [[one.flops, one.weight_bytes] for one in (large, wide)]
    byte = float(np.linalg.solve(rows, left)[1])
    return 1 / byte if byte > 0 else None


def _product(tf: Any) -> tuple[int, Any]:
    """Returns a product of float32 matrices that takes long enough, and their rows."""
    rows, seconds = 256, 0.0
    while seconds < ENOUGH and rows < MOST:
        rows *= 2
        matrix = tf.ones((rows, rows))
        multiply = tf.function(lambda: tf.matmul(matrix, matrix)[0, 0], autograph=False)  # noqa: B023
        multiply().numpy()
        begin = time.perf_counter()
        multiply().numpy()
        seconds = time.perf_counter() - begin
    return rows, multiply


def memory_traffic(tf: Any) -> Any:
    """Returns what reads and writes `MOVED` bytes."""
    tensor = tf.ones((MOVED // 4,))
    return tf.function(lambda: tf.nn.relu(tensor)[0], autograph=False)


def _stage(tf: Any) -> Any:
    """Returns a stage that has next to nothing to compute."""
    weights = tf.Variable(tf.ones((8, 8)))

    @tf.function(autograph=False)
    def stage() -> Any:
        with tf.GradientTape() as tape:
            x = tf.ones((8, 8))
            for _ in range(4):
                x = tf.nn.relu(tf.matmul(x, weights))
        return tape.gradient(x, weights)

    return stage


def slowest(ranks: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Returns what the rank found that took the longest for all of its probes.

    The worst of each number would be one that no rank has: each is a little too large somewhere.
    """
    found = dict(max(ranks, key=lambda one: one["seconds"]))
    del found["seconds"]
    return found


def link_of(group: Communicator) -> tuple[float, float]:
    """Returns the bandwidth and the latency of the slowest link."""
    return measure_link(group) if group.size > 1 else (CORE.bandwidth, CORE.latency)


def machine_of(rank: Mapping[str, Any], link: tuple[float, float]) -> HardwareSpec:
    """Returns the machine that was measured."""
    return HardwareSpec(
        flops_per_second=rank["flops_per_second"],
        bandwidth=link[0],
        latency=link[1],
        action_seconds=rank["action_seconds"],
        memory_bandwidth=rank["memory_bandwidth"],
        split_factor=1.0 if rank["on_gpu"] else CORE.split_factor,
        weight_bandwidth=rank["weight_bandwidth"],
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("file")
    file = parser.parse_args().file
    machine = machine_of(ComputeProbes(world()).measure(), link_of(world()))
    if world().rank == world().size - 1:  # the launcher shows what the last rank prints
        machine.save(file)
        print(f"Wrote {file}: {machine.flops_per_second / 1e9:.4g} GFLOP/s of a rank, "
              f"links of {machine.bandwidth / 1e9:.3g} GB/s.")  # fmt: skip


if __name__ == "__main__":
    main()
