"""How deep a model may be in the same memory: plain Keras, this library and PyTorch.

    python benchmarks/training/largest.py --torch-path FOLDER
    python benchmarks/training/largest.py --models gpt --systems plain --at 5
    python benchmarks/training/largest.py --models resnet-wide --systems "ours 4" --at 100 \
        --limit 2560 --group /sys/fs/cgroup/memory

Each depth trains twice in processes of its own with one thread each, on the same batch: plain Keras
takes it whole or in 8 parts ("accumulated"), the others in 8 micro-batches. The peak of the largest
process counts, beyond what it held after a small model of the same kind had trained in it. Printed
are the MiB that a block more takes, by four blocks a process and by about as many as take half of
the limit; the depth where that straight line meets the limit (`--at` tries a depth out); planned
bytes; and seconds of the second step for each block.
"Again" recomputes: `recompute="all"`, or `torch.utils.checkpoint` for each block. Pipelines are
1F1B, PyTorch's with equal stages. PyTorch comes from the folder, or its rows are left out. A block
of a U-Net is five layers, one at each place; "wide" is with four times the activations. With
`--group` the kernel keeps all processes of a trial, from their start, below their limits together;
this library finds it there, and plans with it.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import functools
import gc
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

MIB = 2**20
MICRO_BATCHES = 8
VOCABULARY, LENGTH, FILTERS = 256, 128, 32
KERAS = ("plain", "accumulated", "ours 1", "ours 1 again", "ours 4", "ours 4 again")
TORCH = ("torch 1", "torch 4", "torch 4 again")
# If asked for; V schedules have two stages on each rank.
OTHERS = ("ours 2", "ours 2 again", "ours 4 v-half", "ours 4 v-min", "torch 2", "torch 2 again")


class Subject(NamedTuple):
    """What is trained."""

    rows: int  # samples of a micro-batch
    shape: tuple[int, ...]  # of a sample, channels last
    labels: tuple[int, ...]  # shape of its labels
    width: int

    @property
    def dims(self) -> int:
        """Of an image."""
        return len(self.shape) - 1


SUBJECTS = {
    "gpt": Subject(32, (LENGTH,), (LENGTH,), 64),
    "gpt-wide": Subject(32, (LENGTH,), (LENGTH,), 256),
    "resnet": Subject(16, (32, 32, 3), (), FILTERS),
    "resnet-wide": Subject(64, (32, 32, 3), (), FILTERS),
    "unet-2d": Subject(8, (64, 64, 3), (64, 64), FILTERS),
    "unet-3d": Subject(8, (16, 16, 16, 3), (16, 16, 16), FILTERS),
}


class Memory:
    """What this process holds beyond what it holds now."""

    def __init__(self) -> None:
        gc.collect()
        ctypes.CDLL("libc.so.6").malloc_trim(0)
        Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
        self._before = self._read("VmRSS")

    def peak(self) -> int:
        return self._read("VmHWM") - self._before

    def _read(self, field: str) -> int:
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(1024 * int(line.split()[1]) for line in lines if line.startswith(field))


def samples(name: str, rows: int) -> tuple[Any, Any]:
    import numpy as np

    subject, rng = SUBJECTS[name], np.random.default_rng(0)
    rows *= MICRO_BATCHES
    y = rng.integers(0, 10, (rows, *subject.labels))
    if name.startswith("gpt"):
        return rng.integers(0, VOCABULARY, (rows, *subject.shape)), y
    return rng.normal(size=(rows, *subject.shape)).astype("float32"), y


def keras_model(name: str, depth: int) -> Any:
    import keras
    from keras import layers

    from benchmarks.sized_models import gpt

    sys.setrecursionlimit(10_000)  # for Keras, which follows a model's layers by recursion
    subject = SUBJECTS[name]
    width = subject.width
    if name.startswith("gpt"):
        return gpt(VOCABULARY, LENGTH, width, depth, width // 32, dropout=0.0)

    def of_dims(kind: str) -> Any:
        return getattr(layers, f"{kind}{subject.dims}D")

    def normalized(x: Any, filters: int = width) -> Any:
        x = of_dims("Conv")(filters, 3, padding="same", use_bias=False)(x)
        return layers.BatchNormalization()(x)

    def level(x: Any, filters: int) -> Any:
        for _ in range(depth + 1):
            x = layers.ReLU()(normalized(x, filters))
        return x

    x = inputs = keras.Input(subject.shape)
    if name.startswith("resnet"):
        x = layers.ReLU()(normalized(inputs))
        for _ in range(depth):
            y = normalized(layers.ReLU()(normalized(x)))
            x = layers.ReLU()(layers.Add()([y, x]))
        return keras.Model(inputs, layers.Dense(10)(layers.GlobalAveragePooling2D()(x)))
    skips = []
    for filters in (width, 2 * width):
        skips.append(level(x, filters))
        x = of_dims("MaxPooling")(2)(skips[-1])
    x = level(x, 2 * width)
    while skips:
        x = layers.Concatenate()([of_dims("UpSampling")(2)(x), skips.pop()])
        x = level(x, width)
    return keras.Model(inputs, of_dims("Conv")(10, 1)(x))


def train_keras(system: str, name: str, depth: int, rows: int) -> dict[str, Any]:
    import keras

    import tarantella_pp as tnt

    keras.utils.set_random_seed(0)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    x, y = samples(name, rows)
    rows, planned = len(x), None
    model = keras_model(name, depth)
    if system.startswith("ours"):
        schedule = next((word for word in system.split() if word.startswith("v-")), "1f1b")
        model = tnt.PipelineModel(
            model, tnt.get_size() * (1 + (schedule != "1f1b")), MICRO_BATCHES, batch_size=rows,
            schedule=schedule, recompute="all" if "again" in system else None,
        )  # fmt: skip
        planned = max(model.plan.rank_bytes(tnt.get_size()))
        model.compile("adam", loss)
    else:
        parts = MICRO_BATCHES if system == "accumulated" else None
        # XLA's compiler, which Keras would take, needs more memory than the step.
        optimizer = keras.optimizers.Adam(gradient_accumulation_steps=parts)
        model.compile(optimizer, loss, jit_compile=False)
        rows //= parts or 1

    def step() -> None:
        for i in range(0, len(x), rows):
            model.train_on_batch(x[i : i + rows], y[i : i + rows])

    return {"planned": planned, "seconds": second(step)}


def second(step: Callable[[], None]) -> float:
    """Runs a step twice, and returns the seconds of the second time."""
    step()
    start = time.perf_counter()
    step()
    return time.perf_counter() - start


def run_keras(system: str, name: str, depth: int) -> tuple[int, dict[str, Any]]:
    import keras

    import tarantella_pp as tnt

    train_keras(system, name, tnt.get_size(), 1)
    keras.backend.clear_session()
    tnt.barrier()
    memory = Memory()
    found = train_keras(system, name, depth, SUBJECTS[name].rows)
    return tnt.get_rank(), {**found, "peak": memory.peak()}


def run_torch(system: str, name: str, depth: int, rank: int, folder: Path) -> dict[str, Any]:
    import torch
    import torch.distributed as dist

    size = processes(system)
    torch.set_num_threads(1)
    torch.manual_seed(0)
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[rank % len(cores)]})  # as the launcher does with our ranks
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=size)
    train_torch(system, name, size, 1, rank, size)
    dist.barrier()
    memory = Memory()
    found = train_torch(system, name, depth, SUBJECTS[name].rows, rank, size)
    dist.barrier()
    return {**found, "peak": memory.peak()}


def train_torch(
    system: str, name: str, depth: int, rows: int, rank: int, size: int
) -> dict[str, Any]:
    import torch
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B
    from torch_models import Stage, gpt_parts, residual_parts, unet_parts

    x, y = map(torch.from_numpy, samples(name, rows))
    subject = SUBJECTS[name]
    if name.startswith("gpt"):
        parts = gpt_parts(depth, VOCABULARY, subject.width, subject.width // 32)
    else:
        x = x.movedim(-1, 1).contiguous()
        more = {"dims": subject.dims} if name.startswith("unet") else {}
        parts = (unet_parts if more else residual_parts)(depth, subject.width, **more)
    cuts = [round(i * len(parts) / size) for i in range(size + 1)]
    module = Stage(parts[cuts[rank] : cuts[rank + 1]], "again" in system)
    del parts
    loss = torch.nn.CrossEntropyLoss()
    optimizer = torch.optim.Adam(module.parameters())
    if size > 1:
        stage = PipelineStage(module, rank, size, torch.device("cpu"))
        schedule = Schedule1F1B(stage, n_microbatches=MICRO_BATCHES, loss_fn=loss)

    def step() -> None:
        if size == 1:
            for part, target in zip(x.chunk(MICRO_BATCHES), y.chunk(MICRO_BATCHES), strict=True):
                (loss(module(part), target) / MICRO_BATCHES).backward()
        else:
            last = {"target": y, "losses": []} if rank == size - 1 else {}
            schedule.step(*([x] if rank == 0 else []), **last)
        optimizer.step()
        optimizer.zero_grad()

    return {"seconds": second(step)}


class Trial(NamedTuple):
    """What a depth took."""

    peak: float
    planned: float
    seconds: float


def processes(system: str) -> int:
    return int(system.split()[1]) if " " in system else 1


@contextlib.contextmanager
def within(groups: str, limit: float) -> Iterator[list[str]]:
    """What to put before commands that a control group (version 1) keeps below a limit."""
    if not groups:
        yield []
        return
    group = Path(groups, f"largest-{os.getpid()}")
    group.mkdir()
    (group / "memory.limit_in_bytes").write_text(str(int(limit)))
    try:
        yield ["sh", "-c", f'echo 0 > {group}/cgroup.procs; exec "$@"', "sh"]
    finally:
        while (group / "cgroup.procs").read_text():  # some have not ended yet
            time.sleep(0.1)
        group.rmdir()


def launch(system: str, name: str, depth: int, torch_path: str, groups: str, limit: float) -> Trial:
    """Trains on as many processes as the system has; the largest one counts."""
    from against_torch import run_together

    size = processes(system)
    with tempfile.TemporaryDirectory() as folder, within(groups, size * limit) as before:
        own = [__file__, "--run", system, "--models", name, "--depth", str(depth)]
        own += ["--folder", folder]
        variables = {}
        if system.startswith("torch"):
            variables["PYTHONPATH"] = torch_path
            commands = [[sys.executable, *own, "--rank", str(rank)] for rank in range(size)]
        else:
            first = [sys.executable, "-m", "tarantella_pp", "-n", str(size), "--threads", "1"]
            commands = [[*first, "--", *own]]
        commands = [[*before, *command] for command in commands]
        run_together(commands, f"{system} failed on {name} of depth {depth}", variables)
        found = [json.loads(path.read_text()) for path in Path(folder).glob("*.json")]
    return Trial(*(max(each.get(key) or 0 for each in found) for key in Trial._fields))


def measured(attempt: Callable[[int], Trial], size: int, limit: float) -> str:
    """A straight line through two depths, the depth where it meets the limit, and what is there."""
    few = 4 * size
    first = attempt(few)
    many = max(2 * few, int(few * limit / first.peak / 2))  # small models are all but their blocks
    second = attempt(many)
    slope = (second.peak - first.peak) / (many - few)
    depth = int(many + (limit - second.peak) / slope)
    line = f"{slope / MIB:5.1f} MiB a block, {depth:4} deep"
    planned = f"planned {second.planned / MIB:.0f} of {second.peak / MIB:.0f} MiB at {many}"
    return f"{line}; {planned}; {second.seconds / many:.2f} s a block"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--torch-path", default="", help="a folder that torch is installed in")
    parser.add_argument("--models", nargs="+", default=list(SUBJECTS), choices=SUBJECTS)
    parser.add_argument("--systems", nargs="+", choices=(*KERAS, *TORCH, *OTHERS))
    parser.add_argument("--limit", type=float, default=2048, help="MiB for each process")
    parser.add_argument("--at", type=int, help="measure this depth alone")
    parser.add_argument("--group", default="", help="where to make a control group of this limit")
    for hidden in ("--run", "--folder"):
        parser.add_argument(hidden, help=argparse.SUPPRESS)
    for hidden in ("--rank", "--depth"):
        parser.add_argument(hidden, type=int, default=0, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if not args.run:
        report(args)
        return
    rank, name = args.rank, args.models[0]
    if args.run.startswith("torch"):
        found = run_torch(args.run, name, args.depth, rank, Path(args.folder))
    else:
        rank, found = run_keras(args.run, name, args.depth)
    (Path(args.folder) / f"{rank}.json").write_text(json.dumps(found))


def report(args: argparse.Namespace) -> None:
    """Measures all and prints what is found as it comes."""
    limit = args.limit * MIB
    given = {"torch_path": args.torch_path, "groups": args.group, "limit": limit}
    for name in args.models:
        for system in args.systems or (*KERAS, *(TORCH if args.torch_path else ())):
            if args.at:
                found = launch(system, name, args.at, **given)
                line = f"{found.peak / MIB:.0f} MiB at {args.at}, {found.seconds:.1f} s"
            else:
                attempt = functools.partial(launch, system, name, **given)
                line = measured(attempt, processes(system), limit)
            print(f"{name:12}{system:16}{line}", flush=True)


if __name__ == "__main__":
    main()
