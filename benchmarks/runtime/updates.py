"""How often updates of weights, sums and copies of gradients go through memory, on one core.

    python benchmarks/runtime/updates.py
    python benchmarks/runtime/updates.py --widths 256 2048 --megabytes 16

A pass is as many bytes read, or written, as the weights have, at the bandwidth that `machine.py`
would find (`memory_bandwidth` of a machine), which is measured in turn with the others. An
optimizer that read weights, gradients and slots once, and wrote weights and slots once, would need
3 passes without slots, 5 with one and 7 with two. Medians of seconds of the processor, which other
processes change least.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

os.environ.setdefault("KERAS_BACKEND", "tensorflow")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import keras
import numpy as np
import tensorflow as tf
from rich.console import Console
from rich.table import Table

from benchmarks.planning.machine import MOVED, memory_traffic

REPEATS = 9
OPTIMIZERS: dict[str, Callable[[], Any]] = {
    "SGD": lambda: keras.optimizers.SGD(1e-3),
    "SGD with momentum": lambda: keras.optimizers.SGD(1e-3, momentum=0.9),
    "Adam": lambda: keras.optimizers.Adam(1e-3),
    "AdamW": lambda: keras.optimizers.AdamW(1e-3),
}
Call = Callable[[], Any]


def update(make: Callable[[], Any], shapes: Sequence[tuple[int, ...]]) -> Call:
    """An optimizer's step, from sums of gradients."""
    optimizer = make()
    weights = [keras.Variable(tf.ones(shape)) for shape in shapes]
    sums = [tf.Variable(tf.fill(shape, 1e-3)) for shape in shapes]
    optimizer.build(weights)

    def step() -> None:
        optimizer.apply([tf.convert_to_tensor(one) for one in sums], weights)

    compiled: Call = tf.function(step, autograph=False).get_concrete_function()
    return compiled


def addition(shapes: Sequence[tuple[int, ...]]) -> Call:
    """What adds the gradients of a micro-batch to their sums."""
    sums = [tf.Variable(tf.ones(shape)) for shape in shapes]
    gradients = [tf.ones(shape) for shape in shapes]

    def add() -> None:
        for total, gradient in zip(sums, gradients, strict=True):
            total.assign_add(gradient)

    compiled: Call = tf.function(add, autograph=False).get_concrete_function()
    return compiled


def packing(shapes: Sequence[tuple[int, ...]]) -> Call:
    """What copies gradients one behind the other, into a bucket of replicas."""
    gradients = [np.ones(shape, np.float32) for shape in shapes]
    bucket = np.zeros(sum(one.size for one in gradients), np.float32)
    ends = np.cumsum([one.size for one in gradients]).tolist()

    def pack() -> None:
        for end, one in zip(ends, gradients, strict=True):
            bucket[end - one.size : end] = one.reshape(-1)

    return pack


def seconds_of(calls: dict[str, Call]) -> dict[str, float]:
    """The median time of each call, in turn with the others."""
    taken: dict[str, list[float]] = {name: [] for name in calls}
    for turn in range(REPEATS + 1):
        for name, call in calls.items():
            start = time.process_time()
            call()
            if turn:
                taken[name].append(time.process_time() - start)
    return {name: statistics.median(each) for name, each in taken.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--widths", nargs="+", type=int, default=[256, 1024])
    parser.add_argument("--megabytes", type=int, default=64)
    args = parser.parse_args()
    tf.config.threading.set_intra_op_parallelism_threads(1)
    tf.config.threading.set_inter_op_parallelism_threads(1)
    table = Table(title=f"{args.megabytes} MiB of square weights on one core: ms, passes")
    for head in ("width", "", "ms", "passes"):
        table.add_column(head, justify="right" if head else "left")
    for width in args.widths:
        shapes = [(width, width)] * max(1, (args.megabytes << 20) // (4 * width**2))
        calls = {
            "memory": memory_traffic(tf),
            "added to sums": addition(shapes),
            "packed": packing(shapes),
        }
        calls |= {name: update(make, shapes) for name, make in OPTIMIZERS.items()}
        seconds = seconds_of(calls)
        bandwidth = 2 * MOVED / seconds.pop("memory")
        size = 4 * width**2 * len(shapes)
        for name, taken in seconds.items():
            passes = taken * bandwidth / size
            table.add_row(str(width), name, f"{1e3 * taken:.2f}", f"{passes:.1f}")
        table.add_row(str(width), "memory, GB/s", f"{bandwidth / 1e9:.1f}", "")
    Console(width=100).print(table)


if __name__ == "__main__":
    main()
