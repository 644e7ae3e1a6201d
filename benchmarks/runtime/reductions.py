"""Our sums of gradients against MPI's allreduce: float32, 4 KB to 64 MB, on any number of ranks.

    tarantella -n 2 -- benchmarks/runtime/reductions.py

The `mpiexec` of the MPI in use starts it, too.
All are measured in turns in the same run; the table has the medians of the slowest rank. The last
column says whether the bits of MPI's sum depend on what an array is packed with; ours never do.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from tarantella_pp.runtime.comm.communicator import Communicator, world

SIZES = tuple(4096 << shift for shift in range(0, 15, 2))
TURNS = 3


@dataclass(frozen=True)
class Row:
    """Medians for one size, in seconds."""

    nbytes: int
    mpi: float
    ours: float
    bfloat16: float
    same_bits: bool


def measure(ranks: Communicator, nbytes: int) -> Row:
    from mpi4py import MPI

    comm: Any = MPI.COMM_WORLD
    array = np.random.default_rng(ranks.rank).standard_normal(nbytes // 4).astype(np.float32)
    out = np.empty_like(array)

    def mpi() -> None:
        comm.Iallreduce(array, out).Wait()

    def ours() -> None:
        ranks.start_allreduce(array).wait()

    def bfloat16() -> None:
        ranks.start_allreduce(array, sent_as="bfloat16").wait()

    ways: dict[str, Callable[[], None]] = {"mpi": mpi, "ours": ours, "bfloat16": bfloat16}
    times: dict[str, list[float]] = {name: [] for name in ways}
    repetitions = max(3, min(100, (128 << 20) // nbytes))
    for _ in range(TURNS):
        for name, way in ways.items():
            way()
            for _ in range(repetitions):
                comm.Barrier()
                start = time.perf_counter()
                way()
                times[name].append(time.perf_counter() - start)
            ranks.flush()
    medians = np.array([statistics.median(values) for values in times.values()])
    ranks.allreduce(medians, "max")
    mpi()
    part = array[array.size // 3 :].copy()
    alone = np.empty_like(part)
    comm.Iallreduce(part, alone).Wait()
    same = np.array([int(alone.tobytes() == out[array.size // 3 :].tobytes())])
    ranks.allreduce(same, "min")
    return Row(nbytes, *map(float, medians), bool(same[0]))


def as_table(rows: list[Row], title: str) -> Table:
    table = Table(title=title)
    for heading in ("size", "MPI, ms", "ours, ms", "as bfloat16, ms", "MPI / ours", "MPI's bits"):
        table.add_column(heading, justify="right")
    for row in rows:
        table.add_row(
            f"{row.nbytes >> 10} KiB" if row.nbytes < 1 << 20 else f"{row.nbytes >> 20} MiB",
            f"{row.mpi * 1e3:.3f}",
            f"{row.ours * 1e3:.3f}",
            f"{row.bfloat16 * 1e3:.3f}",
            f"{row.mpi / row.ours:.2f}",
            "same" if row.same_bits else "other",
        )
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, help="also write the rows to this file")
    parser.add_argument("--largest", type=int, default=SIZES[-1], help="in bytes")
    arguments = parser.parse_args()
    ranks = world()
    rows = [measure(ranks, nbytes) for nbytes in SIZES if nbytes <= arguments.largest]
    if ranks.rank == ranks.size - 1:
        from mpi4py import MPI

        library = MPI.Get_library_version().splitlines()[0].split(",")[0]
        title = f"Sums of float32 over {ranks.size} ranks, {library}"
        Console(width=110).print(as_table(rows, title))
        if arguments.json:
            arguments.json.write_text(json.dumps([asdict(row) for row in rows], indent=1))


if __name__ == "__main__":
    main()
