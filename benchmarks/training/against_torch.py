"""The same architectures in PyTorch's own pipelines: each framework against its own one process.

    python benchmarks/training/against_torch.py --torch-python TORCH/bin/python

PyTorch has an environment of its own. Its half of this page runs `torch.distributed.pipelining`
(GPipe and 1F1B, gloo) on two processes with one thread each, against one process with one thread
that runs the same micro-batches; the other half is `pipeline.py` beside it. The launches take turns
(A B A B ...). Printed are samples per second, and each one's speed-up over itself.
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
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

ROWS = {"mlp": 64, "cnn": 8, "transformer": 4}
WARM_UP, STEPS = 3, 12
SCHEDULES = ("gpipe", "1f1b")
Seconds = dict[str, list[float]]


def run_torch(name: str, micro_batches: int, rank: int, folder: Path) -> None:
    """One of PyTorch's two processes: alone first, then both schedules."""
    import torch
    import torch.distributed as dist
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
    from torch_models import data_for, stages_of

    torch.set_num_threads(1)
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[rank % len(cores)]})  # as the launcher does with our ranks
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2)
    x, y = data_for(name, ROWS[name] * micro_batches)
    loss = torch.nn.CrossEntropyLoss()
    times: Seconds = {}
    if rank == 0:
        times["one"] = measure(alone(stages_of(name), x, y, micro_batches, loss))
    for kind, make in (("gpipe", ScheduleGPipe), ("1f1b", Schedule1F1B)):
        dist.barrier()
        module = stages_of(name)[rank]
        optimizer = torch.optim.SGD(module.parameters(), lr=1e-3, momentum=0.9)
        stage = PipelineStage(module, rank, 2, torch.device("cpu"))
        schedule = make(stage, n_microbatches=micro_batches, loss_fn=loss)

        def step(schedule=schedule, optimizer=optimizer):
            if rank == 0:
                schedule.step(x)
            else:
                schedule.step(target=y, losses=[])
            optimizer.step()
            optimizer.zero_grad()

        times[kind] = measure(step)
    dist.barrier()
    if rank == 0:
        (folder / "torch.json").write_text(json.dumps(times))
    dist.destroy_process_group()


def alone(stages, x, y, micro_batches: int, loss) -> Callable[[], None]:
    """Returns a step of one process on the same micro-batches."""
    import torch

    model = torch.nn.Sequential(*stages)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)

    def step() -> None:
        for part, target in zip(x.chunk(micro_batches), y.chunk(micro_batches), strict=True):
            (loss(model(part), target) / micro_batches).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def run_ours(name: str, micro_batches: int, folder: Path) -> None:
    """One of our two ranks: alone on the last one first, then both schedules."""
    from benchmarks.training.pipeline import Trainer
    from tarantella_pp.runtime.comm.communicator import Communicator, world

    ranks = world()
    times: Seconds = {}
    if ranks.rank == ranks.size - 1:
        times["one"] = measure(Trainer(name, 1, micro_batches, None, Communicator()).step)
    for schedule in SCHEDULES:
        trainer = Trainer(name, ranks.size, micro_batches, schedule, ranks)
        ranks.barrier()
        times[schedule] = measure(trainer.step)
    ranks.barrier()
    if ranks.rank == ranks.size - 1:
        (folder / "ours.json").write_text(json.dumps(times))


def measure(step: Callable[[], object]) -> list[float]:
    """Returns the seconds of some steps, after the first few."""
    times = []
    for _ in range(WARM_UP + STEPS):
        start = time.perf_counter()
        step()
        times.append(time.perf_counter() - start)
    return times[WARM_UP:]


def run_together(
    commands: Sequence[Sequence[str]], failure: str, variables: Mapping[str, str] | None = None
) -> None:
    """Runs processes with one thread each; ends the program with a message if one fails."""
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "MKL_NUM_THREADS": "1",
        **(variables or {}),
    }
    running = [subprocess.Popen(command, env=environment) for command in commands]
    try:
        codes = [process.wait(timeout=600) for process in running]
    finally:
        for process in running:
            process.kill()
    if any(codes):
        raise SystemExit(f"{failure}: exit codes {codes}")


def launch(whose: str, name: str, micro_batches: int, python: str) -> Seconds:
    """Starts both processes of one framework and returns what they measured."""
    with tempfile.TemporaryDirectory() as folder:
        own = [__file__, "--models", name, "--micro-batches", str(micro_batches)]
        own += ["--folder", folder, "--run", whose]
        if whose == "ours":
            first = [sys.executable, "-m", "tarantella_pp", "-n", "2", "--threads", "1", "--"]
            commands = [[*first, *own]]
        else:
            commands = [[python, *own, "--rank", str(rank)] for rank in range(2)]
        run_together(commands, f"{whose} failed on {name}")
        return json.loads((Path(folder) / f"{whose}.json").read_text())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--torch-python", default=sys.executable, help="a Python with torch")
    parser.add_argument("--models", nargs="+", default=list(ROWS), choices=ROWS)
    parser.add_argument("--micro-batches", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=3)
    for hidden in ("--run", "--folder", "--rank"):
        parser.add_argument(hidden, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.run == "torch":
        run_torch(args.models[0], args.micro_batches, int(args.rank), Path(args.folder))
    elif args.run == "ours":
        run_ours(args.models[0], args.micro_batches, Path(args.folder))
    else:
        report(args)


def report(args: argparse.Namespace) -> None:
    """Measures all models and prints the table."""
    from rich.console import Console
    from rich.table import Table

    table = Table(title="Two processes with one thread each, against one with one thread")
    for head in ("model", "m", "what", "one process", "gpipe", "", "1f1b", ""):
        table.add_column(head, justify="left" if head in ("model", "what") else "right")
    for name in args.models:
        found: dict[str, Seconds] = {}
        for _ in range(args.rounds):
            for whose in ("ours", "torch"):
                for kind, times in launch(
                    whose, name, args.micro_batches, args.torch_python
                ).items():
                    found.setdefault(whose, {}).setdefault(kind, []).extend(times)
        for whose, kinds in found.items():
            samples = ROWS[name] * args.micro_batches
            median = {kind: statistics.median(times) for kind, times in kinds.items()}
            row = [name, str(args.micro_batches), whose, f"{samples / median['one']:.0f}/s"]
            for schedule in SCHEDULES:
                row += [
                    f"{samples / median[schedule]:.0f}/s",
                    f"x {median['one'] / median[schedule]:.2f}",
                ]
            table.add_row(*row)
    Console(width=100).print(table)


if __name__ == "__main__":
    main()
