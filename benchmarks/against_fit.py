"""A pipeline on two ranks against what one would run otherwise: stock `keras.Model.fit`.

    python benchmarks/against_fit.py
    python benchmarks/against_fit.py --models mlp --micro-batches 8 --rounds 5

The same model, the same batch and the same optimizer: plain Keras in one process, which takes all
cores of the machine, and a pipeline of two ranks with a share of them each. Both train by `fit`,
each in launches of its own, in turn (A B A B ...); an epoch takes some seconds, and the first one,
in which functions are compiled, does not count. Printed are the medians of all other epochs, and
the fastest ones: on a machine that other programs share, epochs can only be too slow.
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
import numpy as np
from models import BUILDERS, ROWS, data_for
from rich.console import Console
from rich.table import Table

import tarantella_pp as tnt

BALANCED = ("mlp", "cnn", "transformer")
BATCHES, EPOCHS = 12, 4


class EpochSeconds(keras.callbacks.Callback):
    """Measures how long epochs take."""

    def __init__(self) -> None:
        super().__init__()
        self.seconds: list[float] = []
        self._start = 0.0

    def on_epoch_begin(self, epoch: int, logs: object = None) -> None:
        self._start = time.perf_counter()

    def on_epoch_end(self, epoch: int, logs: object = None) -> None:
        self.seconds.append(time.perf_counter() - self._start)


def train(name: str, micro_batches: int, schedule: str | None, path: Path) -> None:
    """Trains, as a pipeline if there is a schedule, and writes down the seconds of each epoch."""
    model = BUILDERS[name]()
    rows = ROWS[name] * micro_batches
    x, y = data_for(name, rows * BATCHES)
    if schedule is not None:
        model = tnt.PipelineModel(
            model, None, micro_batches, schedule, batch_size=rows, balance="flops"
        )
    model.compile(
        keras.optimizers.SGD(1e-3, momentum=0.9),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    )
    measured = EpochSeconds()
    model.fit(x, y, batch_size=rows, epochs=1 + EPOCHS, verbose=0, callbacks=[measured])
    if schedule is None or tnt.is_master_rank():
        path.write_text(json.dumps(measured.seconds[1:]))


def launch(name: str, micro_batches: int, schedule: str | None) -> list[float]:
    """Starts one training and returns the seconds of its epochs."""
    ranks = ["-m", "tarantella_pp", "-n", "2", "--"] if schedule is not None else []
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "seconds.json"
        command = [sys.executable, *ranks, __file__, "--models", name, "--train", str(path)]
        command += ["--micro-batches", str(micro_batches), "--schedules", *filter(None, [schedule])]
        subprocess.run(command, check=True, timeout=600)
        return json.loads(path.read_text())


def compare(name: str, micro_batches: int, schedules: list[str], rounds: int) -> list[list[str]]:
    """Measures plain Keras and all schedules in turn; returns table rows."""
    kinds = [None, *schedules]
    times: dict[str | None, list[float]] = {kind: [] for kind in kinds}
    for _ in range(rounds):
        for kind in kinds:
            times[kind] += launch(name, micro_batches, kind)
    samples = ROWS[name] * micro_batches * BATCHES
    rows = []
    for kind in kinds:
        seconds, least = statistics.median(times[kind]), min(times[kind])
        ratios = [statistics.median(times[None]) / seconds, min(times[None]) / least]
        label = "keras.Model.fit" if kind is None else f"pipeline, {kind}"
        spread = (np.max(times[kind]) - np.min(times[kind])) / seconds
        rows.append(
            [
                name, str(micro_batches), label, f"{samples / seconds:.0f}", f"{ratios[0]:.2f}",
                f"{samples / least:.0f}", f"{ratios[1]:.2f}", f"{spread:.0%}",
            ]
        )  # fmt: skip
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="+", default=list(BALANCED), choices=BUILDERS)
    parser.add_argument("--micro-batches", type=int, default=8)
    parser.add_argument("--schedules", nargs="*", default=["1f1b", "zb-h1"])
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--train", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.train:
        schedule = args.schedules[0] if args.schedules else None
        train(args.models[0], args.micro_batches, schedule, args.train)
        return
    table = Table(title="Two ranks against plain Keras on all cores, the same batch")
    for head in ("model", "m", "what", "samples/s", "ratio", "fastest", "ratio", "spread"):
        table.add_column(head, justify="left" if head in ("model", "what") else "right")
    for name in args.models:
        for row in compare(name, args.micro_batches, args.schedules, args.rounds):
            table.add_row(*row)
    Console(width=100).print(table)


if __name__ == "__main__":
    main()
