"""Two replicas with one thread each against plain Keras: on one thread, and on all cores.

    python benchmarks/training/data_parallel.py
    python benchmarks/training/data_parallel.py --models cnn --rounds 5

The same model, optimizer, metric and global batch, of which each replica has one half. All train by
`fit`, each in launches of its own, in turn (A B C A B C ...): two ranks with one thread each; plain
Keras with one thread, started by the same launcher, so that it has a core of its own as well; and
plain Keras started by `python` alone, which takes all cores. What counts are the seconds of batches
as in `against_fit.py`. Printed are medians and, behind them, the fastest tenth; and what two ranks
are over each of the others. Two ranks that lose nothing are twice as fast as one thread.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

os.environ.setdefault("KERAS_BACKEND", "tensorflow")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import keras
from rich.console import Console
from rich.table import Table

import tarantella_pp as tnt
from benchmarks.sized_models import BUILDERS, ROWS, data_for
from benchmarks.training.against_fit import BALANCED, BatchSeconds, speeds

BATCHES, EPOCHS = 8, 2
LAUNCHERS = {
    "two replicas": ["-m", "tarantella_pp", "-n", "2", "--threads", "1", "--"],
    "Keras, one thread": ["-m", "tarantella_pp", "-n", "1", "--threads", "1", "--"],
    "Keras, all cores": [],
}


def train(name: str, rows: int, replicas: bool, path: Path) -> None:
    """Trains, and writes down the seconds of batches."""
    model = BUILDERS[name]()
    x, y = data_for(name, rows * BATCHES)
    if replicas:
        model = tnt.Model(model, batch_size=rows)
    model.compile(
        keras.optimizers.SGD(1e-3, momentum=0.9),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )
    measured = BatchSeconds()
    model.fit(x, y, batch_size=rows, epochs=1 + EPOCHS, verbose=0, callbacks=[measured])
    if not replicas or tnt.is_master_rank():
        path.write_text(json.dumps(measured.seconds))


def launch(name: str, rows: int, kind: str) -> list[float]:
    """Starts one training and returns the seconds of its batches."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "seconds.json"
        command = [sys.executable, *LAUNCHERS[kind], __file__, "--models", name]
        command += ["--rows", str(rows), "--train", str(path)]
        command += ["--replicas"] if kind == "two replicas" else []
        subprocess.run(command, check=True, timeout=600)
        return json.loads(path.read_text())


def compare(name: str, rows: int, rounds: int) -> list[list[str]]:
    """Measures all kinds in turn; returns table rows."""
    times: dict[str, list[float]] = {kind: [] for kind in LAUNCHERS}
    for _ in range(rounds):
        for kind in LAUNCHERS:
            times[kind] += launch(name, rows, kind)
    own, best = speeds(times["two replicas"])
    found = []
    for kind in LAUNCHERS:
        usual, least = speeds(times[kind])
        found.append(
            [
                name, str(rows), kind, f"{1e3 * usual:.0f}", f"{rows / usual:.0f}",
                f"x {usual / own:.2f}", f"{1e3 * least:.0f}", f"x {least / best:.2f}",
            ]
        )  # fmt: skip
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="+", default=list(BALANCED), choices=BUILDERS)
    parser.add_argument("--rows", type=int, help="of the batch; default: 8 times the usual ones")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--replicas", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--train", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.train:
        train(args.models[0], args.rows, args.replicas, args.train)
        return
    table = Table(title="Two replicas over each, the same global batch")
    for head in ("model", "rows", "what", "ms", "samples/s", "ratio", "fastest", "ratio"):
        table.add_column(head, justify="left" if head in ("model", "what") else "right")
    for name in args.models:
        for row in compare(name, args.rows or 8 * ROWS[name], args.rounds):
            table.add_row(*row)
    Console(width=100).print(table)


if __name__ == "__main__":
    main()
