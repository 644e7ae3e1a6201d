"""Memory of ranks that share a large model: built, wrapped, trained, saved and loaded.

    tarantella -n 4 -- benchmarks/training/large_model.py
    tarantella -n 4 -- benchmarks/training/large_model.py --gigabytes 4 --usual
    tarantella -n 4 -- benchmarks/training/large_model.py --save model.keras
    tarantella -n 4 -- benchmarks/training/large_model.py --load model.keras

Prints the resident memory of the last rank beside its share of the weights, and the largest that it
was while a file was written or read. With --usual the model is built the usual way. With --load
ranks that have had no model yet load that of a file.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import keras
import numpy as np
import psutil
from rich.console import Console
from rich.table import Table

import tarantella_pp as tnt
from benchmarks.sized_models import square_layers

MIB = 2**20
FILE = Path(tempfile.gettempdir()) / f"large-model-{os.getuid()}.weights.h5"


def resident() -> float:
    return psutil.Process().memory_info().rss / MIB


class Watch:
    """What each part of the work took on this rank."""

    def __init__(self) -> None:
        self.rows: list[tuple[str, float, float, float]] = []

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        peak, done = [resident()], threading.Event()

        def sample() -> None:
            while not done.wait(0.005):
                peak[0] = max(peak[0], resident())

        thread = threading.Thread(target=sample)
        start = time.perf_counter()
        thread.start()
        try:
            yield
        finally:
            done.set()
            thread.join()
        self.rows.append((name, time.perf_counter() - start, resident(), peak[0]))


def load(file: Path, units: int) -> Watch:
    watch = Watch()
    with watch.part("imports"):
        tnt.barrier()
    with watch.part("load_model"):
        model = tnt.models.load_model(
            file, num_stages=tnt.get_size(), num_micro_batches=2, balance="memory"
        )
    x = np.zeros((4, units), "float32")
    with watch.part("two steps of SGD"):
        model.fit(x, x, batch_size=4, epochs=2, verbose=0)
    return watch


def run(
    layers: int,
    units: int,
    make: Callable[[Callable[[], keras.Model]], keras.Model],
    whole: Path | None,
) -> Watch:
    watch = Watch()
    keras.utils.set_random_seed(1)
    with watch.part("imports"):
        tnt.barrier()
    with watch.part("build and wrap"):
        model = make(lambda: square_layers(units, layers))
    model.compile("sgd", "mse")
    x = np.zeros((4, units), "float32")
    with watch.part("two steps of SGD"):
        model.fit(x, x, batch_size=4, epochs=2, verbose=0)
    with watch.part("save_weights"):
        model.save_weights(FILE)
    with watch.part("load_weights"):
        model.load_weights(FILE)
    if whole is not None:
        with watch.part("save"):
            model.save(whole)
    if tnt.is_master_rank():
        FILE.unlink()
    return watch


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gigabytes", type=float, default=4.0, help="weights of the model")
    parser.add_argument("--usual", action="store_true", help="build the model the usual way")
    parser.add_argument("--units", type=int, default=4096, help="rows and columns of a layer")
    parser.add_argument("--save", type=Path, help="where to save the model, and leave it")
    parser.add_argument("--load", type=Path, help="load this model, with so many gigabytes")
    options = parser.parse_args()
    units = options.units
    layers = round(options.gigabytes * 1024 * MIB / (4 * units**2))
    ranks = tnt.get_size()

    def make(function: Callable[[], keras.Model]) -> keras.Model:
        model = function() if options.usual else function
        return tnt.PipelineModel(model, num_stages=ranks, num_micro_batches=2, balance="memory")

    watch = load(options.load, units) if options.load else run(layers, units, make, options.save)
    share = layers * 4 * units**2 / MIB / ranks
    table = Table("last rank", "seconds", "resident MiB", "largest MiB", "above the imports")
    start = watch.rows[0][2]
    for name, seconds, after, peak in watch.rows:
        table.add_row(name, f"{seconds:.1f}", f"{after:.0f}", f"{peak:.0f}", f"{peak - start:.0f}")
    if tnt.is_master_rank():
        Console().print(table)
        Console().print(
            f"{layers} layers, {share * ranks:.0f} MiB of weights, share {share:.0f} MiB"
        )


if __name__ == "__main__":
    main()
