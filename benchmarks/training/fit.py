"""What metrics and callbacks cost in `fit`, of a pipeline on two ranks and of plain Keras.

    tarantella -n 2 --threads 1 -- benchmarks/training/fit.py
    ... benchmarks/training/fit.py --models mlp language --micro-batches 8 --rounds 6

All train the same batches through `fit`, in one launch and in turn (A B C A B C ...): a pipeline
without metrics, with `metrics=["accuracy"]`, and with these and callbacks; and on the last rank,
while the others sleep, plain Keras without metrics and with them. What counts is the time from the
end of one batch to the end of the next. Printed are medians, and how much longer a step is than the
same one without metrics.
"""

from __future__ import annotations

import argparse
import functools
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

os.environ.setdefault("KERAS_BACKEND", "tensorflow")

import keras
import numpy as np
from rich.console import Console
from rich.table import Table

import tarantella_pp as tnt
from benchmarks.sized_models import BUILDERS, ROWS, data_for, gpt
from tarantella_pp.runtime.comm.communicator import world

BATCHES = 8
VOCABULARY, LENGTH = 8000, 64


def subject(name: str, micro_batches: int) -> tuple[Callable[[], keras.Model], int, Any, Any]:
    """A model, the samples of a batch, and data for an epoch."""
    if name == "language":
        rows = 4 * micro_batches
        ids = np.random.default_rng(0).integers(0, VOCABULARY, (rows * BATCHES, LENGTH))
        build = functools.partial(gpt, VOCABULARY, LENGTH, 256, 3, 4, 0.0)
        return build, rows, ids, np.roll(ids, -1, axis=1)
    rows = ROWS[name] * micro_batches
    return BUILDERS[name], rows, *data_for(name, rows * BATCHES)


class BatchSeconds(keras.callbacks.Callback):
    """Measures how long batches take, from end to end; the first of an epoch does not count."""

    def __init__(self) -> None:
        super().__init__()
        self.seconds: list[float] = []
        self._last = 0.0

    def on_train_batch_end(self, batch: int, logs: object = None) -> None:
        now = time.perf_counter()
        if batch:
            self.seconds.append(now - self._last)
        self._last = now


class Fit:
    """A model that is trained by `fit` again and again.

    Args:
        model: Plain or a pipeline.
        metrics: What it is compiled with.
        callbacks: Makes the callbacks of a training, beside that which measures.
    """

    def __init__(
        self,
        model: keras.Model,
        metrics: Sequence[str] = (),
        callbacks: Callable[[], list[keras.callbacks.Callback]] = list,
    ) -> None:
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(keras.optimizers.SGD(1e-3, momentum=0.9), loss, metrics=list(metrics) or None)
        self._model = model
        self._callbacks = callbacks
        self.seconds: list[float] = []

    def run(self, x: Any, y: Any, rows: int, counts: bool) -> None:
        """Trains one epoch; notes the seconds of its steps if they count."""
        measured = BatchSeconds()
        callbacks = [*self._callbacks(), measured]
        self._model.fit(x, y, batch_size=rows, verbose=0, shuffle=False, callbacks=callbacks)
        if counts:
            self.seconds += measured.seconds


def usual_callbacks(folder: str) -> list[keras.callbacks.Callback]:
    """Callbacks as users have them."""
    return [
        keras.callbacks.EarlyStopping("accuracy", patience=1000),
        keras.callbacks.ReduceLROnPlateau("loss", patience=1000),
        keras.callbacks.TerminateOnNaN(),
        keras.callbacks.CSVLogger(Path(folder) / "log.csv", append=True),
    ]


def compare(name: str, micro_batches: int, rounds: int, folder: str) -> list[list[str]]:
    """Trains all kinds in turn; returns table rows on the last rank."""
    ranks = world()
    build, rows, x, y = subject(name, micro_batches)

    def pipeline() -> keras.Model:
        return tnt.PipelineModel(
            build(), ranks.size, micro_batches, "1f1b", "flops", batch_size=rows
        )

    accuracy = ["accuracy"]
    kinds = {
        "pipeline": Fit(pipeline()),
        "pipeline, metrics": Fit(pipeline(), accuracy),
        "pipeline, metrics, callbacks": Fit(pipeline(), accuracy, lambda: usual_callbacks(folder)),
    }
    alone = {"keras": Fit(build()), "keras, metrics": Fit(build(), accuracy)}
    for turn in range(rounds + 1):
        for kind in kinds.values():
            ranks.barrier()
            kind.run(x, y, rows, counts=turn > 0)
        for kind in alone.values():
            ranks.barrier()
            if ranks.rank == ranks.size - 1:
                kind.run(x, y, rows, counts=turn > 0)
        ranks.barrier()
    found = []
    for what, kind in {**kinds, **alone}.items():
        base = alone["keras"] if what in alone else kinds["pipeline"]
        if kind.seconds:
            step, bare = statistics.median(kind.seconds), statistics.median(base.seconds)
            longer = f"{100 * (step / bare - 1):+.1f} %"
            found.append([name, str(rows), str(micro_batches), what, f"{1e3 * step:.1f}", longer])
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    names = ["mlp", "cnn", "transformer", "language"]
    parser.add_argument("--models", nargs="+", default=names, choices=names)
    parser.add_argument("--micro-batches", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    table = Table(title=f"Steps of fit on {world().size} ranks, and of Keras on one of them")
    for head in ("model", "rows", "m", "what", "step ms", "longer"):
        table.add_column(head, justify="left" if head in ("model", "what") else "right")
    with tempfile.TemporaryDirectory() as folder:
        for name in args.models:
            for row in compare(name, args.micro_batches, args.rounds, folder):
                table.add_row(*row)
            keras.utils.clear_session(free_memory=True)
    if tnt.is_master_rank():
        Console(width=100).print(table)


if __name__ == "__main__":
    main()
