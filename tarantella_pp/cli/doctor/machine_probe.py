"""What `tarantella doctor` runs on ranks: messages between pairs of them, and what a rank does.

    python -m tarantella_pp.cli.doctor.machine_probe 0,2,3 [compute]

Measures the link between each two of the ranks it is given, one pair after the other. The last rank
of the job writes a line of JSON for each pair, `{"pair": [0, 2], "latency_us": ...,
"bandwidth_gb_per_s": ...}`; with `compute` also `{"rank": {...}}`, what `HardwareSpec` says of a
rank, of the slowest one.
"""

from __future__ import annotations

import functools
import itertools
import json
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from tarantella_pp.cli.doctor.ping_pong import measure_link
from tarantella_pp.runtime.comm.communicator import Communicator, world

ENOUGH = 0.02
"""Seconds of a matrix product whose start does not count."""
MOST = 8192
"""Rows of the largest matrix."""
FEW, WIDE = 32, 2048
"""Rows of a small micro-batch, and those of the weights that it is multiplied with."""
MOVED = 32 << 20
"""Bytes of the tensor that is read and written: more than caches of a core hold."""


def main(ranks: str, *options: str) -> None:
    """Measures."""
    group = world()
    for pair in itertools.combinations(map(int, ranks.split(",")), 2):
        group.barrier()
        found = {}
        if group.rank in pair:
            found = measure_link(group, sum(pair) - group.rank)
        _tell(group, {"pair": pair, **group.allgather_json(found)[pair[0]]})
    if options:
        _tell(group, {"rank": _slowest([of for of in group.allgather_json(_of_rank(group)) if of])})


def _tell(group: Communicator, found: dict[str, Any]) -> None:
    """Writes what was found, at once: what comes next may never end."""
    if group.rank == group.size - 1:
        sys.stdout.write(f"{json.dumps(found)}\n")
        sys.stdout.flush()


def _slowest(ranks: list[dict[str, float]]) -> dict[str, float]:
    """Returns the worst of each."""
    worst = {
        "flops_per_second": min,
        "memory_bandwidth": min,
        "layout_seconds_per_byte": max,
        "action_seconds": max,
        "on_gpu": min,
    }
    return {name: which(rank[name] for rank in ranks) for name, which in worst.items()}


def _of_rank(group: Communicator) -> dict[str, float]:
    """Returns what a rank does while the other does it, too; of a GPU that they share, alone."""
    import tensorflow as tf

    on_gpu = bool(tf.config.list_physical_devices("GPU"))
    found = {}
    group.barrier()
    if group.rank == 0 or not on_gpu:
        speed = _flops_per_second(tf)
        found = {
            "flops_per_second": speed,
            "memory_bandwidth": _memory_bandwidth(tf),
            "layout_seconds_per_byte": 0.0 if on_gpu else _layout_seconds(tf, speed),
            "action_seconds": _start_seconds(tf),
            "on_gpu": float(on_gpu),
        }
    group.barrier()
    return found


def _flops_per_second(tf: Any) -> float:
    """Measures a product of float32 matrices."""
    rows, seconds = 256, 0.0
    while seconds < ENOUGH and rows < MOST:
        rows *= 2
        matrix = tf.ones((rows, rows))
        multiply = tf.function(lambda: tf.matmul(matrix, matrix)[0, 0], autograph=False)  # noqa: B023
        seconds = _median(multiply)
    return 2.0 * rows**3 / seconds


def _memory_bandwidth(tf: Any) -> float:
    """Measures an activation function, which reads a tensor and writes another."""
    tensor = tf.ones((MOVED // 4,))
    return 2 * MOVED / _median(tf.function(lambda: tf.nn.relu(tensor)[0], autograph=False))


def _layout_seconds(tf: Any, flops_per_second: float) -> float:
    """Measures how much longer products of few rows take than their arithmetic, for a byte."""
    weights, few = tf.ones((WIDE, WIDE)), tf.ones((FEW, WIDE))

    @tf.function(autograph=False)
    def product(back: bool) -> Any:
        return tf.matmul(few, weights, transpose_b=back)[0, 0]

    seconds = [_median(functools.partial(product, back)) for back in (False, True)]
    arithmetic = 2.0 * FEW * WIDE**2 / flops_per_second
    return max(0.0, float(np.mean(seconds)) - arithmetic) / (4 * WIDE**2)


def _start_seconds(tf: Any) -> float:
    """Measures a stage that has next to nothing to compute."""
    weights = tf.Variable(tf.ones((8, 8)))

    @tf.function(autograph=False)
    def stage() -> Any:
        with tf.GradientTape() as tape:
            x = tf.ones((8, 8))
            for _ in range(4):
                x = tf.nn.relu(tf.matmul(x, weights))
        return tape.gradient(x, weights)

    return _median(stage)


def _median(call: Callable[[], Any], repeats: int = 15) -> float:
    """Returns the median seconds of a call, of which the first are not counted."""
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        call().numpy()
        times.append(time.perf_counter() - start)
    return float(np.median(times[repeats // 3 :]))


if __name__ == "__main__":
    main(*sys.argv[1:])
