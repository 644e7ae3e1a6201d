"""Memory of each rank as planned, against what it really is: nine models on 1 to 4 stages.

    python benchmarks/planning/memory.py
    python benchmarks/planning/memory.py --models mlp cnn --stages 2 --recompute all
    python benchmarks/planning/memory.py --models unet --stages 2 --replicas 2 --metrics accuracy
    python benchmarks/planning/memory.py --models tied --stages 1 4 --balance memory
    python benchmarks/planning/memory.py --models cnn --micro-batches 8 --plain

With --plain a model is first trained by plain Keras, in one process, on the whole batch. Then lines
say how the peak of the largest rank compares with that.

Each line is of three launches: as many ranks as stages, one thread each, 1F1B, four micro-batches
(of "small" sixteen small ones, whose weight gradients are multiplied in chunks), Adam (of several
replicas each its share of the state), five training steps after a first one that compiles. It is
the launch with the median peak of that rank;
TensorFlow runs operations that could run in any order in another one in each process.
What is measured, on each rank:

* kept: bytes of the variables that are really there (weights of the rank's stage, sums of their
  gradients, slots), plus what the traced stage keeps of a micro-batch times micro-batches in
  flight, plus the planned buffers of messages. No figure for loops, whose graph does not say.
* peak: most bytes at a time that TensorFlow had asked its allocator for, as the allocator tells
  TensorFlow's profiler (it is made to count small tensors, too), less weights of other ranks'
  stages as far as they are still there, plus the most that messages had at a time. Everything
  counts: temporaries of all operations and of the optimizer, the batch, the loss. It is the median
  of the steps: when the system lets a rank wait, the messages to it wait in memory, too.
* resident: how far the resident memory of the process (VmHWM) rises above where it was before
  the model was built, less the weights of other ranks' stages. Graphs, compiled code and what
  allocators round up count as well.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

os.environ.setdefault("KERAS_BACKEND", "tensorflow")

import keras
import numpy as np
import tensorflow as tf
from keras import layers
from rich.console import Console
from rich.table import Table
from tensorflow.tsl.profiler.protobuf import xplane_pb2

from benchmarks.sized_models import gpt, lstm, mlp, plain_cnn, resnet, transformer, unet
from benchmarks.training.largest import keras_model
from tests.zoo.message_memory import MessageMemory

STEP = "training step"


def pooled(x: keras.KerasTensor) -> keras.KerasTensor:
    return layers.Dense(10)(layers.GlobalAveragePooling2D()(x))


class Subject(NamedTuple):
    """What is trained: a model, the samples of a micro-batch, and micro-batches of a step."""

    build: Callable[[], keras.Model]
    rows: int
    micro_batches: int = 4


SUBJECTS = {
    "mlp": Subject(functools.partial(mlp, 1536, 12), 512),
    "small": Subject(functools.partial(mlp, 1536, 12), 64, 16),
    "cnn": Subject(functools.partial(plain_cnn, 48, 10), 48),
    "transformer": Subject(functools.partial(transformer, 128, 384, 6, 6, 0.1), 8),
    "unet": Subject(functools.partial(unet, 64, (24, 48, 96, 192), pooled), 12),
    "language": Subject(functools.partial(lstm, 8000, 48, 256, 4), 48),
    "resnet": Subject(resnet, 16),
    "tied": Subject(functools.partial(gpt, 4000, 32, 256, 4, 4, 0.0, tied=True), 16),
    "residual": Subject(functools.partial(keras_model, "resnet", 23), 64, 8),
}


def status(field: str) -> int:
    """Bytes of a line such as VmHWM in this process' status."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{field}:"):
            return 1024 * int(line.split()[1])
    raise ValueError(field)


def nbytes(variables: Iterable[Any]) -> int:
    return sum(int(np.prod(v.shape)) * np.dtype(v.dtype).itemsize for v in variables)


class Shape(NamedTuple):
    """How a model is trained."""

    stages: int
    replicas: int
    recompute: str
    balance: str | None
    metrics: tuple[str, ...]
    micro_batches: int | None = None

    def arguments(self) -> list[str]:
        """The options that say so."""
        found = ["--stages", str(self.stages), "--replicas", str(self.replicas)]
        found += ["--balance", self.balance] if self.balance else []
        found += ["--micro-batches", str(self.micro_batches)] if self.micro_batches else []
        return [*found, "--recompute", self.recompute, "--metrics", *self.metrics]


def samples(model: keras.Model, batch: int) -> tuple[np.ndarray, np.ndarray]:
    """A batch for a model, and its targets."""
    sizes, integers = model.input_shape[1:], model.inputs[0].dtype.startswith("int")
    rng = np.random.default_rng(0)
    x = rng.integers(0, 100, (batch, *sizes)) if integers else rng.random((batch, *sizes))
    y = rng.integers(0, 10, (batch, *model.output_shape[1:-1]))
    return x.astype("int32" if integers else "float32"), y


def steps(model: keras.Model, batch: int, metrics: Sequence[str], count: int = 5) -> None:
    """Compiles a model and trains it; all steps but the first are traced."""
    x, y = samples(model, batch)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile("adam", loss, metrics=list(metrics))
    model.train_on_batch(x, y)  # compiles, while other ranks wait and messages pile up
    for _ in range(count):
        with tf.profiler.experimental.Trace(STEP):
            model.train_on_batch(x, y)


def train_plain(name: str, metrics: Sequence[str]) -> dict[str, Any]:
    """Trains by plain Keras on the whole batch."""
    build, rows, micro_batches = SUBJECTS[name]
    before = status("VmRSS")
    steps(build(), rows * micro_batches, metrics)
    return {"resident": status("VmHWM") - before, "others": 0, "messages": 0}


def train(name: str, shape: Shape) -> dict[str, Any]:
    """Trains a pipeline; returns what its rank measures but for the peak."""
    import tarantella_pp as tnt

    build, rows, default = SUBJECTS[name]
    micro_batches = shape.micro_batches or default
    keras.utils.set_random_seed(0)
    before = status("VmRSS")
    model, batch = build(), rows * default * shape.replicas
    piped = tnt.PipelineModel(
        model, shape.stages, micro_batches, batch_size=batch, schedule="1f1b",
        recompute=None if shape.recompute == "least" else shape.recompute,
        num_replicas=shape.replicas, balance=shape.balance,
        shard_optimizer=shape.replicas > 1,
    )  # fmt: skip
    memory = MessageMemory()
    steps(piped, batch, shape.metrics)
    stage = tnt.get_rank() % shape.stages
    own = piped._engine.stages[stage]
    weights = {id(v): v for call in own.module.layer.calls for v in call.variables}.values()
    others = nbytes([v for v in model.variables if getattr(v, "_has_memory", True)]) - nbytes(
        weights
    )
    sums = zip(own.module.accumulator.weights, own.module.accumulator._dense, strict=True)
    dense = nbytes(weight for weight, total in sums if total is not None)
    slots = nbytes(v for v in piped.optimizer.variables if len(v.shape))
    plan, residual = piped.plan.stages[stage], own.residual_bytes
    held = plan.in_flight
    kept = None
    if residual is not None:
        kept = nbytes(weights) + dense + slots + held * residual + plan.recomputed_bytes
        kept += plan.buffer_bytes + plan.reduction_bytes
    return {
        "planned": plan.memory_bytes,
        "kept": kept,
        "others": others,
        "messages": memory.most,
        "resident": status("VmHWM") - before - others,
        "state": (plan.state_bytes - plan.reduction_bytes, nbytes(weights) + dense + slots),
        "activations": (plan.activation_bytes, residual),
        "moment": plan.working_bytes,
        "buffers": plan.buffer_bytes + plan.reduction_bytes,
        "in_flight": held,
    }


def peak_requested(trace: Path) -> int:
    """The most bytes in use at a time in a step, the median of all steps that a trace saw."""
    space = xplane_pb2.XSpace()
    space.ParseFromString(next(trace.rglob("*.xplane.pb")).read_bytes())
    changes, begins = [], []
    for plane in space.planes:
        names = {i: data.name for i, data in plane.event_metadata.items()}
        sizes = {i for i, data in plane.stat_metadata.items() if data.name == "requested_bytes"}
        for line in plane.lines:
            for event in line.events:
                name, moment = names[event.metadata_id], 1000 * line.timestamp_ns + event.offset_ps
                if name == STEP:
                    begins.append(moment)
                sign = {"MemoryAllocation": 1, "MemoryDeallocation": -1}.get(name, 0)
                changes += [
                    (moment, sign * (stat.int64_value or stat.uint64_value))
                    for stat in event.stats
                    if sign and stat.metadata_id in sizes
                ]
    changes.sort()
    live = np.cumsum([change for _, change in changes])
    bounds = np.searchsorted([moment for moment, _ in changes], sorted(begins))
    return int(np.median([part.max() for part in np.split(live, bounds)[1:]]))


def measure(name: str, shape: Shape, folder: Path) -> None:
    """Trains on this rank and writes down what it measures."""
    import tarantella_pp as tnt

    rank = tnt.get_rank()
    tf.linalg.matmul(tf.ones((64, 64)), tf.ones((64, 64)))
    trace = folder / f"trace{rank}"
    tf.profiler.experimental.start(str(trace))
    found = train(name, shape) if shape.stages else train_plain(name, shape.metrics)
    tf.profiler.experimental.stop()
    found["peak"] = peak_requested(trace) - found["others"] + found["messages"]
    (folder / f"{rank}.json").write_text(json.dumps(found))


def launch(name: str, shape: Shape) -> list[dict[str, Any]]:
    """Starts the ranks and returns what each measured."""
    ranks = max(1, shape.stages * shape.replicas)
    with tempfile.TemporaryDirectory() as folder:
        command = [
            *(sys.executable, "-m", "tarantella_pp", "-n", str(ranks), "--threads", "1", "--"),
            *(__file__, "--measure", name, "--folder", folder, *shape.arguments()),
        ]
        traced = {"TF_CPU_ALLOCATOR_USE_BFC": "1", "TF_ONEDNN_USE_SYSTEM_ALLOCATOR": "0"}
        environment = {**os.environ, **traced}
        subprocess.run(command, check=True, timeout=600, env=environment)
        return [json.loads((Path(folder) / f"{i}.json").read_text()) for i in range(ranks)]


def median(launches: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """What a rank measured in the launch with the median peak, and how far apart the peaks are."""
    ordered = sorted(launches, key=lambda found: found["peak"])
    found = ordered[len(ordered) // 2]
    spread = (ordered[-1]["peak"] - ordered[0]["peak"]) / found["peak"]
    return {**found, "spread": spread}


def mega(value: float | None) -> str:
    return "-" if value is None else f"{value / 2**20:.0f}"


def error(found: dict[str, Any]) -> float:
    return 100 * (found["planned"] / found["peak"] - 1)


def row(name: str, stages: int, rank: int, found: dict[str, Any]) -> list[str]:
    states, residuals = found["state"], found["activations"]
    return [
        name, str(stages), str(rank), mega(found["planned"]), mega(found["peak"]),
        f"{error(found):+.1f} %", mega(found["resident"]), mega(found["kept"]),
        f"{mega(states[0])}/{mega(states[1])}",
        f"{found['in_flight']} x {mega(residuals[0])}/{mega(residuals[1])}",
        mega(found["moment"]), f"{mega(found['buffers'])}/{mega(found['messages'])}",
    ]  # fmt: skip


def summary(name: str, stages: int, ranks: Sequence[dict[str, Any]]) -> str:
    """A line of the table in docs/partition.md."""
    both = ", ".join(f"{mega(found['planned'])} / {mega(found['peak'])}" for found in ranks)
    errors = ", ".join(f"{error(found):+.1f} %" for found in ranks)
    spread = max(found["spread"] for found in ranks)
    return f"| {name} | {stages} | {both} | {errors} | {100 * spread:.0f} % |"


def beside_plain(name: str, shape: Shape, ranks: Sequence[dict[str, Any]], plain: int) -> str:
    """A line of the table in docs/performance.md."""
    largest = max(found["peak"] for found in ranks)
    over = 100 * (shape.stages * largest / plain - 1)
    return (
        f"| {name} | {mega(plain)} | {shape.stages} | {shape.micro_batches} | {shape.recompute} "
        f"| {mega(largest)} | {mega(plain / shape.stages)} | {over:+.0f} % |"
    )


HEADS = (
    *("model", "stages", "rank", "planned", "peak", "error", "resident", "kept"),
    *("state", "activations", "moment", "messages"),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="+", default=list(SUBJECTS), choices=SUBJECTS)
    parser.add_argument("--stages", nargs="+", type=int, default=[1, 2, 3, 4])
    parser.add_argument("--replicas", type=int, default=1)
    parser.add_argument("--metrics", nargs="*", default=[])
    parser.add_argument("--micro-batches", type=int, help="to cut the same batch in")
    parser.add_argument("--plain", action="store_true", help="plain Keras on the batch first")
    parser.add_argument("--recompute", default="least", choices=("least", "none", "all"))
    parser.add_argument("--balance", choices=("memory", "flops"), help="default: the fastest")
    parser.add_argument("--launches", type=int, default=3)
    parser.add_argument("--measure", help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    options = args.recompute, args.balance, tuple(args.metrics), args.micro_batches
    shapes = [Shape(stages, args.replicas, *options) for stages in args.stages]
    if args.measure:
        measure(args.measure, shapes[0], args.folder)
        return
    table = Table(title="Memory of a rank in MiB; where there are two figures: planned/measured")
    for head in HEADS:
        table.add_column(head, justify="left" if head == "model" else "right", no_wrap=True)
    lines = ["| model | stages | planned / measured of each rank, MiB | error | launches |"]
    lines.append("| --- | ---: | --- | --- | ---: |")
    errors: list[float] = []
    besides = []
    for name in args.models:
        serial = shapes[0]._replace(stages=0)
        plain = [launch(name, serial)[0]["peak"] for _ in range(args.launches * args.plain)]
        for shape in shapes:
            launches = [launch(name, shape) for _ in range(args.launches)]
            ranks = [median(each) for each in zip(*launches, strict=True)]
            for rank, found in enumerate(ranks):
                table.add_row(*row(name, shape.stages, rank, found))
            lines.append(summary(name, shape.stages, ranks))
            errors += [abs(error(found)) for found in ranks]
            print(lines[-1], flush=True)
            if plain:
                besides.append(beside_plain(name, shape, ranks, sorted(plain)[len(plain) // 2]))
    console = Console(width=120)
    console.print(table)
    print("\n".join([*lines, *besides]))
    close = sum(each <= 10 for each in errors)
    print(f"{close} of {len(errors)} ranks within 10 %, {np.mean(errors):.1f} % off in the mean")


if __name__ == "__main__":
    main()
