"""Simulated steps of plans beside measured ones, on this machine.

    tarantella doctor --save machine.json
    tarantella -n 2 --threads 1 -- benchmarks/planning/predicted.py --machine machine.json
    ... benchmarks/planning/predicted.py --machine machine.json --models VGG16 GPT --plans ours

Models of `keras.applications` for small images, and a GPT, are planned for the ranks of the launch
with 1F1B: by us, with as many operations on each stage, or as many parameters. No layer is
measured: a step is simulated from what the doctor says of the machine. Each plan then trains.
"""

from __future__ import annotations

import argparse
import functools
import gc
import itertools
import os
import statistics
import time
from collections.abc import Callable, Sequence

os.environ.setdefault("KERAS_BACKEND", "tensorflow")

import keras
import numpy as np

import tarantella_pp as tnt
from tarantella_pp.errors import TarantellaError
from tarantella_pp.partition.baselines import minimal_maximum
from tarantella_pp.partition.extraction.keras_reader import ExtractedModel, extract
from tarantella_pp.runtime.comm.communicator import world
from tests.zoo.sized_models import gpt

IMAGES = (
    "VGG16", "ResNet50", "ResNet50V2", "InceptionV3", "Xception", "MobileNet", "MobileNetV2",
    "EfficientNetB0", "DenseNet121", "NASNetMobile",
)  # fmt: skip
GPT = "GPT"
SIZE, CLASSES, VOCABULARY = 96, 10, 4000
MICRO_BATCHES, SAMPLES = 4, 4
PLANS = ("ours", "operations", "parameters")


def build(name: str) -> keras.Model:
    """A model without the head of its own number of classes."""
    keras.utils.set_random_seed(0)
    if name == GPT:
        return gpt(VOCABULARY, length=128, width=256, blocks=6, heads=8, dropout=0.0)
    make: Callable[..., keras.Model] = getattr(keras.applications, name)
    options = {"input_shape": (SIZE, SIZE, 3), "classes": CLASSES}
    if name == "NASNetMobile":  # its head is for one size of images only
        body = make(weights=None, include_top=False, pooling="avg", input_shape=(SIZE, SIZE, 3))
        return keras.Model(body.input, keras.layers.Dense(CLASSES)(body.output))
    return make(weights=None, classifier_activation=None, **options)


def counts(graph: ExtractedModel, ranks: int, weights: Sequence[float]) -> list[int]:
    """Numbers of operations of stages that are as equal in these weights as can be."""
    nodes = len(graph.graph.nodes)
    begins = minimal_maximum(np.asarray(weights, float), ranks)
    return [end - begin for begin, end in itertools.pairwise([*begins, nodes])]


def planned(extracted: ExtractedModel, kind: str, ranks: int, machine: str) -> tnt.Plan:
    """A plan of one kind."""
    nodes = extracted.graph.nodes
    balance: list[int] | None = None
    if kind != "ours":
        by = [float(n.parameters) if kind == "parameters" else 1.0 for n in nodes]
        balance = counts(extracted, ranks, by)
    return tnt.make_plan(
        extracted, ranks, batch_size=MICRO_BATCHES * SAMPLES, num_micro_batches=MICRO_BATCHES,
        num_replicas=1, schedule="1f1b", balance=balance, recompute="none", optimizer="sgd",
        machine=machine,
    )  # fmt: skip


def measured(name: str, plan: tnt.Plan, steps: int) -> float:
    """Trains; returns the median seconds of a step on this rank."""
    model = build(name)
    rng = np.random.default_rng(0)
    rows = MICRO_BATCHES * SAMPLES
    shape = model.input_shape[1:]
    x = rng.random((rows, *shape), "float32")
    if name == GPT:
        x = rng.integers(0, VOCABULARY, (rows, *shape), "int32")
    *places, classes = model.output_shape[1:]
    y = rng.integers(0, classes, (rows, *places))
    pipeline = tnt.PipelineModel(model, plan=plan)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    pipeline.compile(keras.optimizers.SGD(1e-3), loss)
    pipeline.make_train_function()
    batch = (keras.ops.convert_to_tensor(x), keras.ops.convert_to_tensor(y))
    batches = pipeline._engine.feed.batches(itertools.repeat(batch))
    seconds = []
    for _ in range(steps + 2):
        world().barrier()
        begin = time.perf_counter()
        pipeline.train_function(batches)
        world().barrier()
        seconds.append(time.perf_counter() - begin)
    return statistics.median(seconds[2:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--machine", required=True, help="a file of tarantella doctor --save")
    parser.add_argument("--models", nargs="+", default=[*IMAGES, GPT], metavar="MODEL")
    parser.add_argument("--plans", nargs="+", default=PLANS, choices=PLANS)
    parser.add_argument("--steps", type=int, default=5)
    args = parser.parse_args()
    ranks = world()
    # The launcher shows what the last rank prints.
    tell = functools.partial(print, flush=True) if ranks.rank == ranks.size - 1 else lambda *_: None
    tell(f"| model | {ranks.size} stages by | predicted, ms | measured, ms | off |")
    tell("| --- | --- | ---: | ---: | ---: |")
    errors = []
    for name in args.models:
        extracted = extract(build(name))
        for kind in args.plans:
            try:
                plan = planned(extracted, kind, ranks.size, args.machine)
            except TarantellaError as error:
                tell(f"| {name} | {kind} | - | - | {str(error).splitlines()[0]} |")
                continue
            found = measured(name, plan, args.steps)
            predicted = plan.step_seconds or 0.0
            errors.append(abs(predicted / found - 1))
            tell(
                f"| {name} | {kind} | {1e3 * predicted:.0f} | {1e3 * found:.0f} "
                f"| {predicted / found - 1:+.1%} |"
            )
            keras.backend.clear_session()
            gc.collect()
    tell(f"median error {statistics.median(errors):.1%}")


if __name__ == "__main__":
    main()
