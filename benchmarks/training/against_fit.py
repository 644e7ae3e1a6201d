"""A pipeline on two ranks against what one would run otherwise: stock `keras.Model.fit`.

    python benchmarks/training/against_fit.py
    python benchmarks/training/against_fit.py --models mlp --micro-batches 8 --rounds 5

The same model, the same batch and the same optimizer: plain Keras in one process, which takes all
cores of the machine, and a pipeline of two ranks with a share of them each. Both train by `fit`,
each in launches of its own, in turn (A B A B ...). What counts is the time from the end of one
batch to the end of the next, in all epochs but the first one, in which functions are compiled. The
first batch of an epoch does not count either: before it TensorFlow stops the iterator of the epoch
before, which takes up to a second in both, and the epochs here are short. Printed are the medians,
and the fastest tenth: on a machine that other programs share, batches can only be too slow.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

os.environ.setdefault("KERAS_BACKEND", "tensorflow")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import keras
from rich.console import Console
from rich.table import Table

import tarantella_pp as tnt
from benchmarks.sized_models import BUILDERS, ROWS, data_for

BALANCED = ("mlp", "cnn", "transformer")
BATCHES, EPOCHS = 12, 4


class BatchSeconds(keras.callbacks.Callback):
    """Measures how long batches take, from end to end."""

    def __init__(self) -> None:
        super().__init__()
        self.seconds: list[float] = []
        self._epoch = 0
        self._last = 0.0

    def on_epoch_begin(self, epoch: int, logs: object = None) -> None:
        self._epoch = epoch

    def on_train_batch_end(self, batch: int, logs: object = None) -> None:
        now = time.perf_counter()
        if self._epoch and batch:
            self.seconds.append(now - self._last)
        self._last = now


def train(name: str, rows: int, micro_batches: int, schedule: str | None, path: Path) -> None:
    """Trains, as a pipeline if there is a schedule, and writes down the seconds of batches."""
    model = BUILDERS[name]()
    x, y = data_for(name, rows * BATCHES)
    if schedule is not None:
        model = tnt.PipelineModel(
            model, tnt.get_size(), micro_batches, schedule, batch_size=rows, balance="flops"
        )
    model.compile(
        keras.optimizers.SGD(1e-3, momentum=0.9),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    )
    measured = BatchSeconds()
    model.fit(x, y, batch_size=rows, epochs=1 + EPOCHS, verbose=0, callbacks=[measured])
    if schedule is None or tnt.is_master_rank():
        path.write_text(json.dumps(measured.seconds))


def launch(name: str, rows: int, micro_batches: int, schedule: str | None) -> list[float]:
    """Starts one training and returns the seconds of its batches."""
    ranks = ["-m", "tarantella_pp", "-n", "2", "--"] if schedule is not None else []
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "seconds.json"
        command = [sys.executable, *ranks, __file__, "--models", name, "--train", str(path)]
        command += ["--rows", str(rows), "--micro-batches", str(micro_batches), "--schedules"]
        command += [schedule] if schedule is not None else []
        subprocess.run(command, check=True, timeout=600)
        return json.loads(path.read_text())


def compare(
    name: str, rows: int | None, micro_batches: int, schedules: list[str], rounds: int
) -> list[list[str]]:
    """Measures plain Keras and all schedules in turn; returns table rows."""
    samples = ROWS[name] * micro_batches if rows is None else rows
    kinds = [None, *schedules]
    times: dict[str | None, list[float]] = {kind: [] for kind in kinds}
    for _ in range(rounds):
        for kind in kinds:
            times[kind] += launch(name, samples, micro_batches, kind)
    found = []
    for kind in kinds:
        (usual, least), (own, best) = map(speeds, (times[None], times[kind]))
        label = "keras.Model.fit" if kind is None else f"pipeline, {kind}"
        found.append(
            [
                name, str(samples), str(micro_batches), label, f"{samples / own:.0f}",
                f"{usual / own:.2f}", f"{samples / best:.0f}", f"{least / best:.2f}",
            ]
        )  # fmt: skip
    return found


def speeds(seconds: list[float]) -> tuple[float, float]:
    """The median of some times, and the median of their fastest tenth."""
    fastest = sorted(seconds)[: max(1, len(seconds) // 10)]
    return statistics.median(seconds), statistics.median(fastest)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="+", default=list(BALANCED), choices=BUILDERS)
    parser.add_argument("--micro-batches", type=int, default=8)
    parser.add_argument("--rows", type=int, help="of the batch; default: those of pipeline.py")
    parser.add_argument("--schedules", nargs="*", default=["1f1b", "zb-auto"])
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--train", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.train:
        schedule = args.schedules[0] if args.schedules else None
        train(args.models[0], args.rows, args.micro_batches, schedule, args.train)
        return
    table = Table(title="Two ranks against plain Keras on all cores, the same batch")
    for head in ("model", "rows", "m", "what", "samples/s", "ratio", "fastest", "ratio"):
        table.add_column(head, justify="left" if head in ("model", "what") else "right")
    for name in args.models:
        rows = compare(name, args.rows, args.micro_batches, args.schedules, args.rounds)
        for row in rows:
            table.add_row(*row)
    Console(width=100).print(table)


if __name__ == "__main__":
    main()
