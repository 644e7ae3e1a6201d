"""What the runtime itself costs: microseconds for each computation of a micro-batch.

    python benchmarks/runtime/overhead.py
    tarantella -n 2 --threads 1 -- benchmarks/runtime/overhead.py

First with empty stages, which hand on what they get: the loop over the actions and the messages
are all that is left. Then with the smallest of Keras layers: calls into TensorFlow, loss, metrics
and optimizer come on top. Two numbers of micro-batches tell what a step costs whatever its length.
Wall clock is what the slowest rank took, with all waits for messages; processor time is that of
the busiest rank.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable

from rich.console import Console
from rich.table import Table

from benchmarks.runtime.stubs import Seconds, StubPipeline
from tarantella_pp.runtime.comm.communicator import Communicator, world
from tarantella_pp.schedule import make_schedule

STAGES = 2
FEW, MANY = 4, 32
GOAL = 300


def empty_stages(schedule: str, micro_batches: int) -> Callable[[], object]:
    """Returns a step of a pipeline without layers."""
    return StubPipeline(schedule, STAGES, micro_batches, Seconds(), world()).step


def keras_stages(schedule: str, micro_batches: int) -> Callable[[], object]:
    """Returns a training step of a model of two layers with one weight each."""
    os.environ.setdefault("KERAS_BACKEND", "tensorflow")
    import itertools

    import keras

    import tarantella_pp as tnt

    inputs = keras.Input((1,))
    x = keras.layers.Dense(1, use_bias=False)(inputs)
    outputs = keras.layers.Dense(1, use_bias=False)(x)
    model = tnt.PipelineModel(
        keras.Model(inputs, outputs), STAGES, micro_batches, schedule, balance="flops"
    )
    model.compile("sgd", "mse")
    model.make_train_function()
    batch = (keras.ops.ones((micro_batches, 1)), keras.ops.ones((micro_batches, 1)))
    batches = model._engine.feed.batches(itertools.repeat(batch))
    return lambda: model.train_function(batches)


def seconds_of(step: Callable[[], object], ranks: Communicator, steps: int) -> tuple[float, float]:
    """Returns the seconds of a step by the clock and of the processor, medians, largest rank."""
    walls, processors = [], []
    for turn in range(3 + steps):
        ranks.barrier()
        wall, processor = time.perf_counter(), time.process_time()
        step()
        if turn >= 3:
            processors.append(time.process_time() - processor)
            walls.append(time.perf_counter() - wall)
    found = ranks.allgather_json([statistics.median(walls), statistics.median(processors)])
    return max(wall for wall, _ in found), max(processor for _, processor in found)


def measure(
    make: Callable[[str, int], Callable[[], object]], schedule: str, steps: int
) -> list[str]:
    """Times a schedule with few and many micro-batches; returns table cells."""
    ranks = world()
    few, many = (seconds_of(make(schedule, m), ranks, steps) for m in (FEW, MANY))
    plain = make_schedule(schedule, STAGES, 1, ranks.size)
    actions = max(map(len, plain.actions))
    cells = []
    for short, long in zip(few, many, strict=True):
        each = (long - short) / (MANY - FEW) / actions
        cells += [f"{1e6 * each:.0f}", f"{1e6 * (short - FEW * actions * each):.0f}"]
    return [str(actions), *cells]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--schedules", nargs="+", default=["gpipe", "1f1b", "zb-h1"])
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--empty-only", action="store_true", help="leave TensorFlow out")
    args = parser.parse_args()
    ranks = world()
    table = Table(
        title=f"{STAGES} stages on {ranks.size} rank(s): microseconds; {GOAL} at most are wanted"
    )
    heads = (
        "stages", "schedule", "computations", "clock: each", "clock: step", "processor: each",
        "processor: step",
    )  # fmt: skip
    for head in heads:
        table.add_column(head, justify="left" if head in ("stages", "schedule") else "right")
    kinds = {"empty": empty_stages} | ({} if args.empty_only else {"Keras": keras_stages})
    for kind, make in kinds.items():
        for schedule in args.schedules:
            table.add_row(kind, schedule, *measure(make, schedule, args.steps))
    if ranks.rank == ranks.size - 1:
        Console(width=110).print(table)


if __name__ == "__main__":
    main()
