"""Two ranks with one thread each against one process with one thread, on the same micro-batches.

    tarantella -n 2 --threads 1 -- benchmarks/training/pipeline.py
    ... benchmarks/training/pipeline.py --models mlp cnn --micro-batches 4 8 --schedules 1f1b zb-h1
    ... benchmarks/training/pipeline.py --times 4
    ... benchmarks/training/pipeline.py --recompute none least --balance flops

Both run in the same launch, in turn (A B A B ...): while one process trains alone, the other rank
sleeps. Stages are balanced by measured time, unless told otherwise. Printed are the medians, their
ratio, and the schedule's bound on it for equal stages. Both have a metric, as most models; they
call the step function that `fit` calls, and not `fit` itself, so that they can take turns every few
steps and one step can be recorded apart. What `fit`, metrics and callbacks cost is in `fit.py`.

The bound is lost in two ways: stages are not equal, and computations take longer when they are cut
in two or run beside others; that is one. The other is the runtime, whose messages and loop cost
time. "Runtime" is what it leaves: the step that the recorded computations would make if everything
between them were free, over the recorded step. The last columns compare recorded steps with the
simulator's prediction from what computations and messages cost.

With `--recompute`, pipelines that recompute in these ways train in turn instead, with the memory of
each of their stages as planned.
"""

from __future__ import annotations

import argparse
import itertools
import os
import statistics
import time
from unittest import mock

os.environ.setdefault("KERAS_BACKEND", "tensorflow")

import keras
from rich.console import Console
from rich.table import Table

import tarantella_pp as tnt
from benchmarks.measured_costs import measured_costs
from benchmarks.sized_models import BUILDERS, ROWS, data_for
from tarantella_pp.models import pipeline_model
from tarantella_pp.runtime.comm.communicator import Communicator, world
from tarantella_pp.runtime.comm.machine import clock_offset
from tarantella_pp.runtime.executor import Recorder, gather_steps
from tarantella_pp.schedule import TRAINING_NAMES, V_SHAPED, Costs, Schedule, lower, simulate
from tests.helpers.closed_forms import bubble_fraction

STAGES_PER_RANK = dict.fromkeys(("interleaved", *V_SHAPED), 2)


class Trainer:
    """A pipeline that trains the same batch again and again.

    Args:
        name: Name of the model.
        stages: Number of stages.
        micro_batches: Number of micro-batches.
        schedule: Name of the schedule.
        ranks: The ranks of the pipeline.
        balance: What the stages are balanced by.
        times: Size of a micro-batch, as a multiple of the usual one.
        recompute: Which micro-batches are repeated.
    """

    def __init__(
        self,
        name: str,
        stages: int,
        micro_batches: int,
        schedule: str | None,
        ranks: Communicator,
        balance: str = "time",
        times: int = 1,
        recompute: str | None = None,
    ) -> None:
        keras.utils.set_random_seed(0)
        rows = times * ROWS[name] * micro_batches
        with mock.patch.object(pipeline_model, "world", return_value=ranks):
            self.model = tnt.PipelineModel(
                BUILDERS[name](), stages, micro_batches, schedule, balance, batch_size=rows,
                recompute=None if recompute == "least" else recompute,
            )  # fmt: skip
        self.model.compile(
            keras.optimizers.SGD(1e-3, momentum=0.9),
            keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            metrics=["accuracy"],
        )
        self.model.make_train_function()
        x, y = data_for(name, rows)
        batch = (keras.ops.convert_to_tensor(x), keras.ops.convert_to_tensor(y))
        self._ranks = ranks
        self._batches = self.model._engine.feed.batches(itertools.repeat(batch))

    def step(self) -> None:
        """Trains one batch."""
        self.model.train_function(self._batches)

    def seconds(self, steps: int) -> list[float]:
        """Trains; returns how long each step took on this rank."""
        times = []
        for _ in range(steps):
            start = time.perf_counter()
            self.step()
            times.append(time.perf_counter() - start)
        return times

    def recorded(self, steps: int) -> tuple[float, float, float]:
        """Trains, on all ranks.

        Returns:
            Seconds of a step by the clock, by simulation, and by simulation with free messages.
        """
        recorder, engine = Recorder(steps), self.model._engine
        engine.record(recorder)
        self.seconds(steps)
        engine.record(None)
        measured = gather_steps(recorder.steps, clock_offset(self._ranks), self._ranks)
        clock = statistics.median(step.timeline.step_seconds for step in measured)
        schedule, costs = measured[0].schedule, measured_costs(measured)
        predicted = simulate(schedule, costs)
        free = simulate(schedule, Costs(costs.stages))
        return clock, predicted.step_seconds, free.step_seconds


def compare(
    name: str, micro_batches: int, schedule: str, args: argparse.Namespace
) -> list[str] | None:
    """Times one process and a pipeline in turn; returns a table row on the last rank."""
    ranks, more = world(), (args.balance, args.times)
    last = ranks.rank == ranks.size - 1
    alone = Trainer(name, 1, micro_batches, None, Communicator(), *more) if last else None
    stages = ranks.size * STAGES_PER_RANK.get(schedule, 1)
    pipeline = Trainer(name, stages, micro_batches, schedule, ranks, *more)
    pipeline.seconds(1)
    serial: list[float] = []
    parallel: list[float] = []
    for turn in range(args.rounds + 1):
        ranks.barrier()
        own = alone.seconds(3) if alone is not None else []
        ranks.barrier()
        found = pipeline.seconds(5)
        # The first step of a turn fetches weights that the other has pushed out of the caches.
        serial += own[1:] if turn else []
        parallel += found[1:] if turn else []
    clock, predicted, free = pipeline.recorded(8)
    if alone is None:
        return None
    one, step = statistics.median(serial), statistics.median(parallel)
    bound = bound_of(schedule, pipeline.model.plan, ranks.size)
    return [
        name, str(args.times * ROWS[name]), str(micro_batches), schedule,
        f"{1e3 * one:.1f}", f"{1e3 * step:.1f}", f"{one / step:.2f}", f"{bound:.2f}",
        f"{one / step / bound:.2f}", f"{free / clock:.2f}", f"{1e3 * clock:.1f}",
        f"{1e3 * predicted:.1f}", f"{100 * (predicted / clock - 1):+.1f} %",
    ]  # fmt: skip


def compare_recomputation(
    name: str, micro_batches: int, schedule: str, args: argparse.Namespace
) -> list[str] | None:
    """Times pipelines that recompute in different ways, in turn; a table row on the last rank."""
    ranks = world()
    stages = ranks.size * STAGES_PER_RANK.get(schedule, 1)
    trainers = [
        Trainer(name, stages, micro_batches, schedule, ranks, args.balance, args.times, way)
        for way in args.recompute
    ]
    seconds: list[list[float]] = [[] for _ in trainers]
    for turn in range(args.rounds + 1):
        for trainer, found in zip(trainers, seconds, strict=True):
            ranks.barrier()
            own = trainer.seconds(5)
            found += own[1:] if turn else []
    if ranks.rank < ranks.size - 1:
        return None
    cells = [name, str(args.times * ROWS[name]), str(micro_batches), schedule]
    for trainer, found in zip(trainers, seconds, strict=True):
        memory = [stage.activation_bytes_total / 2**20 for stage in trainer.model.plan.stages]
        cells.append(f"{1e3 * statistics.median(found):.1f}")
        cells.append(" + ".join(f"{size:.1f}" for size in memory))
    return cells


def bound_of(schedule: str, plan: tnt.Plan, ranks: int) -> float:
    """The bound on the speed-up, of equal stages; of a schedule found by playing it."""
    if plan.schedule_text is not None:
        found = lower(Schedule.from_text(plan.schedule_text))
        return simulate(found, Costs.uniform(plan.num_stages)).speed_up
    per_rank = STAGES_PER_RANK.get(schedule, 1)
    bubble = bubble_fraction(schedule, ranks, plan.num_micro_batches, per_rank)
    return ranks * (1 - bubble)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="+", default=list(BUILDERS), choices=BUILDERS)
    parser.add_argument("--micro-batches", nargs="+", type=int, default=[8])
    parser.add_argument("--schedules", nargs="+", default=list(TRAINING_NAMES))
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--balance", default="time", choices=("memory", "time", "flops"))
    parser.add_argument("--times", type=int, default=1, help="rows of a micro-batch: so many more")
    parser.add_argument(
        "--recompute", nargs="+", choices=("none", "least", "all"), help="compare these"
    )
    args = parser.parse_args()
    rows = []
    for name, micro_batches in itertools.product(args.models, args.micro_batches):
        for schedule in args.schedules:
            measure = compare_recomputation if args.recompute else compare
            row = measure(name, micro_batches, schedule, args)
            keras.backend.clear_session()
            if row is not None:
                rows.append(row)
                print(" ".join(row), flush=True)
    if rows:
        Console(width=150).print(table_of(rows, args.recompute))


def table_of(rows: list[list[str]], recompute: list[str] | None) -> Table:
    """The table of some rows."""
    other = "with other recomputation" if recompute else "one process"
    table = Table(title=f"{world().size} ranks, one thread each, against {other}")
    heads = ["1 process ms", "pipeline ms", "speed-up", "bound", "ratio"]
    heads += ["runtime", "recorded ms", "simulated ms", "off"]
    if recompute:
        heads = [head for way in recompute for head in (f"{way} ms", "activations MiB")]
    for head in ("model", "rows", "m", "schedule", *heads):
        table.add_column(head, justify="left" if head in ("model", "schedule") else "right")
    for row in rows:
        table.add_row(*row)
    return table


if __name__ == "__main__":
    main()
