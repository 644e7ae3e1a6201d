"""The script that `tarantella doctor` runs on two ranks: messages to and fro, and what a rank does.

Writes `{"latency_us": ..., "bandwidth_gb_per_s": ...}` to the file it is given; with a second
argument, `compute`, also what `HardwareSpec` says of a rank.
"""

from __future__ import annotations

import json
import pathlib
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from tarantella_pp.runtime.comm.communicator import (
    Communicator,
    TensorSpec,
    world,
)

SMALL, LARGE = 8, 4 << 20
"""Bytes of the messages: one for the latency, one of the size of an activation."""
ENOUGH = 0.02
"""Seconds of a matrix product whose start does not count."""
MOST = 8192
"""Rows of the largest matrix."""
MOVED = 32 << 20
"""Bytes of the tensor that is read and written: more than caches of a core hold."""


def main() -> None:
    """Measures, and has rank 0 write the result."""
    group = world()
    latency = _seconds_per_message(group, SMALL, repeats=200)
    seconds = _seconds_per_message(group, LARGE, repeats=20)
    result = {"latency_us": latency * 1e6, "bandwidth_gb_per_s": LARGE / seconds / 1e9}
    if sys.argv[2:] == ["compute"]:
        result |= _of_rank(group)
    if group.rank == 0:
        pathlib.Path(sys.argv[1]).write_text(json.dumps(result), encoding="utf-8")


def _seconds_per_message(group: Communicator, size: int, repeats: int) -> float:
    """Returns the fastest of some ways there and back, halved."""
    data, spec, other = np.ones(size, np.uint8), TensorSpec((size,), "uint8"), 1 - group.rank
    times = []
    for _ in range(repeats):
        group.barrier()
        start = time.perf_counter()
        request = group.post_receive([spec], other, tag=0)
        if group.rank == 0:
            group.send([data], other, tag=0)
        request.wait()
        if group.rank == 1:
            group.send([data], other, tag=0)
        times.append((time.perf_counter() - start) / 2)
    group.flush()
    return min(times)


def _of_rank(group: Communicator) -> dict[str, float]:
    """Returns what a rank does while the other does it, too; of a GPU that they share, alone."""
    import tensorflow as tf

    on_gpu = bool(tf.config.list_physical_devices("GPU"))
    found = {}
    group.barrier()
    if group.rank == 0 or not on_gpu:
        found = {
            "flops_per_second": _flops_per_second(tf),
            "memory_bandwidth": _memory_bandwidth(tf),
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
        multiply = tf.function(lambda: tf.matmul(matrix, matrix)[0, 0])  # noqa: B023
        seconds = _median(multiply)
    return 2.0 * rows**3 / seconds


def _memory_bandwidth(tf: Any) -> float:
    """Measures an activation function, which reads a tensor and writes another."""
    tensor = tf.ones((MOVED // 4,))
    return 2 * MOVED / _median(tf.function(lambda: tf.nn.relu(tensor)[0]))


def _start_seconds(tf: Any) -> float:
    """Measures a stage that has next to nothing to compute."""
    weights = tf.Variable(tf.ones((8, 8)))

    @tf.function
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
    main()
