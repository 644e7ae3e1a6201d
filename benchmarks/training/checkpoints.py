"""How much longer a step of `fit` takes while a checkpoint is written.

    tarantella -n 2 --threads 1 -- benchmarks/training/checkpoints.py FOLDER
    python benchmarks/training/checkpoints.py FOLDER --models mlp --every 30

Steps alternate in one `fit`: a checkpoint is written during some, then none is, and so on. One is
being written until its folder has its name. Printed are the median of the steps without one, and
how much longer the mean of the others is, and of the first of them.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from pathlib import Path

os.environ.setdefault("KERAS_BACKEND", "tensorflow")

import keras
import numpy as np
from rich.console import Console
from rich.table import Table

import tarantella_pp as tnt
from benchmarks.sized_models import BUILDERS, ROWS, data_for


class StepSeconds(keras.callbacks.Callback):
    """Notes the seconds of steps: without a checkpoint, the first with one, all with one."""

    def __init__(self, folder: Path, every: int) -> None:
        super().__init__()
        self._folder = folder
        self._every = every
        self.without: list[float] = []
        self.first: list[float] = []
        self.within: list[float] = []

    def on_train_batch_begin(self, batch: int, logs: object = None) -> None:
        begun = batch // self._every * self._every
        self._kinds = [self.without]
        if begun and not (self._folder / f"step-{begun:08d}").exists():
            self._kinds = [self.within, self.first] if batch == begun else [self.within]
        self._begin = time.perf_counter()

    def on_train_batch_end(self, batch: int, logs: object = None) -> None:
        if batch >= self._every // 2:  # the first ones warm up
            for kind in self._kinds:
                kind.append(time.perf_counter() - self._begin)


def measure(name: str, every: int, micro_batches: int, folder: Path) -> list[str]:
    """Trains a model with five checkpoints; returns a row of the table."""
    stages, rows = tnt.get_size(), ROWS[name] * micro_batches
    model = tnt.PipelineModel(BUILDERS[name](), stages, micro_batches, batch_size=rows)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.Adam(1e-4), loss)
    x, y = (np.concatenate([array] * (6 * every)) for array in data_for(name, rows))
    steps = StepSeconds(folder, every)
    callbacks = [tnt.callbacks.Checkpoint(folder, every=every), steps]
    model.fit(x, y, batch_size=rows, verbose=0, shuffle=False, callbacks=callbacks)
    quiet = statistics.median(steps.without)
    longer = [100 * (statistics.mean(kind) / quiet - 1) for kind in (steps.within, steps.first)]
    counts = [str(len(kind)) for kind in (steps.without, steps.within)]
    return [name, f"{1e3 * quiet:.1f}", *counts, *(f"{each:+.1f} %" for each in longer)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    names = ["mlp", "cnn", "transformer"]
    parser.add_argument("folder", type=Path, help="where checkpoints go, empty")
    parser.add_argument("--models", nargs="+", default=names, choices=names)
    parser.add_argument("--every", type=int, default=60)
    parser.add_argument("--micro-batches", type=int, default=8)
    args = parser.parse_args()
    table = Table(title=f"Steps while a checkpoint is written, {tnt.get_size()} ranks")
    for head in ("model", "step ms", "without", "with", "all with", "the first with"):
        table.add_column(head, justify="left" if head == "model" else "right")
    for name in args.models:
        table.add_row(*measure(name, args.every, args.micro_batches, args.folder / name))
        keras.utils.clear_session(free_memory=True)
    if tnt.is_master_rank():
        Console(width=100).print(table)


if __name__ == "__main__":
    main()
