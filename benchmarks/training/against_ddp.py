"""Data parallel training beside PyTorch's: each framework against its own single process.

    python benchmarks/training/against_ddp.py --torch-python TORCH/bin/python

PyTorch has an environment of its own. Its half is `DistributedDataParallel` (gloo) on two processes
with one thread each, against one process with one thread and the whole batch; ours is that of
`data_parallel.py`: `fit` of two replicas against `fit` of plain Keras, one thread each. The same
architectures, optimizer and batch; launches take turns (A B C D A B C D ...). Printed are medians
and how many times as fast two are as one, by them and by the fastest tenths.

`tf.distribute.MultiWorkerMirroredStrategy`, the other way to train Keras models on several hosts,
is not here: with Keras 3.15 and TensorFlow 2.21 `fit` ends with an error, for Keras takes no
`PerReplica` values.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from pathlib import Path

WARM_UP, STEPS = 3, 14
MODELS = ("mlp", "cnn", "transformer")
ONE, TWO = "one thread", "two processes"


def run_torch(name: str, rows: int, rank: int, size: int, folder: Path) -> None:
    """One of PyTorch's processes: trains, and the first one writes down the seconds of batches."""
    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel
    from torch_models import data_for, stages_of

    torch.set_num_threads(1)
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[rank % len(cores)]})  # as the launcher does with our ranks
    model = torch.nn.Sequential(*stages_of(name))
    if size > 1:
        meet = f"file://{folder}/meet"
        dist.init_process_group("gloo", init_method=meet, rank=rank, world_size=size)
        model = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
    loss = torch.nn.CrossEntropyLoss()
    x, y = (part.chunk(size)[rank] for part in data_for(name, rows))
    times = []
    for _ in range(WARM_UP + STEPS):
        start = time.perf_counter()
        loss(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
        times.append(time.perf_counter() - start)
    if rank == 0:
        (folder / "seconds.json").write_text(json.dumps(times[WARM_UP:]))
    if size > 1:
        dist.destroy_process_group()


def launch_torch(name: str, rows: int, size: int, python: str) -> list[float]:
    """Starts PyTorch's processes and returns the seconds of batches."""
    from benchmarks.training.against_torch import run_together

    with tempfile.TemporaryDirectory() as folder:
        own = [python, __file__, "--models", name, "--rows", str(rows)]
        own += ["--folder", folder, "--size", str(size)]
        commands = [[*own, "--rank", str(rank)] for rank in range(size)]
        run_together(commands, f"PyTorch failed on {name}")
        found: list[float] = json.loads((Path(folder) / "seconds.json").read_text())
        return found


def compare(name: str, rows: int | None, rounds: int, python: str) -> list[list[str]]:
    """Measures both frameworks in turn; returns table rows."""
    from benchmarks.sized_models import ROWS
    from benchmarks.training import data_parallel
    from benchmarks.training.against_fit import speeds

    rows = rows or 8 * ROWS[name]
    kinds = {ONE: "Keras, one thread", TWO: "two replicas"}
    times: dict[tuple[str, str], list[float]] = {}
    for _ in range(rounds):
        for label, kind in kinds.items():
            times.setdefault(("ours", label), []).extend(data_parallel.launch(name, rows, kind))
            found = launch_torch(name, rows, 1 + (label == TWO), python)
            times.setdefault(("PyTorch", label), []).extend(found)
    table = []
    for whose in ("ours", "PyTorch"):
        (one, least_one), (two, least_two) = (speeds(times[whose, kind]) for kind in kinds)
        milliseconds = (f"{1e3 * seconds:.0f}" for seconds in (one, two))
        ratios = (f"x {one / two:.2f}", f"x {least_one / least_two:.2f}")
        table.append([name, str(rows), whose, *milliseconds, *ratios])
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--torch-python", default=sys.executable, help="a Python with torch")
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=MODELS)
    parser.add_argument("--rows", type=int, help="of the batch; default: 8 times the usual ones")
    parser.add_argument("--rounds", type=int, default=2)
    for hidden in ("--folder", "--rank", "--size"):
        parser.add_argument(hidden, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.folder:
        run_torch(args.models[0], args.rows, int(args.rank), int(args.size), Path(args.folder))
        return
    from rich.console import Console
    from rich.table import Table

    table = Table(title="Two processes over one, the same global batch")
    for head in ("model", "rows", "whose", ONE, TWO, "ratio", "fastest"):
        table.add_column(head, justify="left" if head in ("model", "whose") else "right")
    for name in args.models:
        for row in compare(name, args.rows, args.rounds, args.torch_python):
            table.add_row(*row)
    Console(width=100).print(table)


if __name__ == "__main__":
    main()
