"""Two ranks with one thread each against one process with one thread, on the same micro-batches.

    tarantella -n 2 --threads 1 -- benchmarks/pipeline.py
    ... benchmarks/pipeline.py --models mlp cnn --micro-batches 4 8 --schedules 1f1b zb-h1

Both run in the same launch, in turn (A B A B ...): while one process trains alone, the other rank
sleeps. Printed are the medians, their ratio, and the schedule's bound on it.
"""

from __future__ import annotations

import argparse
import itertools
import os
import statistics
import time
from collections.abc import Callable
from unittest import mock

os.environ.setdefault("KERAS_BACKEND", "tensorflow")

import keras
from models import BUILDERS, ROWS, data_for
from rich.console import Console
from rich.table import Table

import tarantella_pp as tnt
from tarantella_pp import pipeline_model
from tarantella_pp.feeding import BatchIterator
from tarantella_pp.runtime.communicator import Communicator, world
from tarantella_pp.runtime.schedule import speed_up_bound


def make_step(
    name: str, stages: int, micro_batches: int, schedule: str | None, alone: bool
) -> Callable[[], None]:
    """Compiles a pipeline and returns a function that trains one batch."""
    keras.utils.set_random_seed(0)
    ranks = Communicator() if alone else world()
    with mock.patch.object(pipeline_model, "world", return_value=ranks):
        model = tnt.PipelineModel(
            BUILDERS[name](), stages, micro_batches, schedule, balance="flops"
        )
    model.compile(
        keras.optimizers.SGD(1e-3, momentum=0.9),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    )
    model.make_train_function()
    x, y = data_for(name, ROWS[name] * micro_batches)
    batch = (keras.ops.convert_to_tensor(x), keras.ops.convert_to_tensor(y))
    batches = BatchIterator(model._pipeline.feed.batches(itertools.repeat(batch)))
    return lambda: model.train_function(batches)


def seconds(step: Callable[[], None], steps: int) -> list[float]:
    times = []
    for _ in range(steps):
        start = time.perf_counter()
        step()
        times.append(time.perf_counter() - start)
    return times


def compare(name: str, micro_batches: int, schedules: list[str], rounds: int) -> list[list[str]]:
    """Times one process and every schedule in turn; returns table rows on the last rank."""
    ranks = world()
    last = ranks.rank == ranks.size - 1
    alone = make_step(name, 1, micro_batches, None, alone=True) if last else None
    pipelines = {s: make_step(name, ranks.size, micro_batches, s, alone=False) for s in schedules}
    serial: list[float] = []
    parallel: dict[str, list[float]] = {schedule: [] for schedule in schedules}
    for turn in range(rounds + 1):
        steps = 4 if turn else 3
        ranks.barrier()
        own = seconds(alone, steps) if alone is not None else []
        ranks.barrier()
        serial += own if turn else []
        for schedule, step in pipelines.items():
            found = seconds(step, steps)
            ranks.barrier()
            parallel[schedule] += found if turn else []
    if alone is None:
        return []
    one = statistics.median(serial)
    rows = []
    for schedule, times in parallel.items():
        ratio = one / statistics.median(times)
        bound = float(speed_up_bound(schedule, ranks.size, micro_batches))
        rows.append(
            [
                name, str(micro_batches), schedule, f"{1e3 * one:.1f}",
                f"{1e3 * statistics.median(times):.1f}", f"{ratio:.2f}", f"{bound:.2f}",
                f"{ratio / bound:.2f}",
            ]
        )  # fmt: skip
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="+", default=["mlp", "cnn", "transformer"])
    parser.add_argument("--micro-batches", nargs="+", type=int, default=[8])
    parser.add_argument("--schedules", nargs="+", default=["gpipe", "1f1b"])
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    table = Table(title=f"{world().size} ranks, one thread each, against one process")
    heads = ("model", "m", "schedule", "1 process ms", "pipeline ms", "speed-up", "bound", "ratio")
    for head in heads:
        table.add_column(head, justify="left" if head in ("model", "schedule") else "right")
    for name in args.models:
        for micro_batches in args.micro_batches:
            for row in compare(name, micro_batches, args.schedules, args.rounds):
                table.add_row(*row)
    if tnt.is_master_rank():
        Console().print(table)


if __name__ == "__main__":
    main()
