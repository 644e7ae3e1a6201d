"""Simulated steps of plans beside measured ones, on this machine.

    tarantella -n 2 --threads 1 -- benchmarks/planning/predicted.py
    ... benchmarks/planning/predicted.py --models VGG16 GPT --plans ours measured
    ... benchmarks/planning/predicted.py --machine machine.json   # machine.py wrote it

Models of `keras.applications` for small images, and a GPT, are planned for the ranks of the launch
with 1F1B: by us, with as many operations on each stage, or as many parameters; and by us with
measured layers. The plans train a step each in turn, and probes run between the steps,
for a machine is not as fast in each second. A step is simulated from what these probes say.
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
from benchmarks.planning.machine import ComputeProbes, link_of
from benchmarks.planning.machine import machine_of as machine_of_ranks
from benchmarks.planning.rules import even_parts
from benchmarks.planning.shared_cores import shared_step_seconds
from benchmarks.sized_models import gpt
from tarantella_pp.partition.graph.keras_reader import ExtractedModel, extract
from tarantella_pp.partition.plan.hardware_spec import machine_of
from tarantella_pp.partition.plan.plan_simulation import PlanSimulation
from tarantella_pp.runtime.comm.communicator import world

IMAGES = (
    "VGG16", "ResNet50", "ResNet50V2", "InceptionV3", "Xception", "MobileNet", "MobileNetV2",
    "EfficientNetB0", "DenseNet121", "NASNetMobile",
)  # fmt: skip
GPT = "GPT"
SIZE, CLASSES, VOCABULARY = 96, 10, 4000
MICRO_BATCHES, SAMPLES = 4, 4
PLANS = ("ours", "operations", "parameters", "measured")
PROBE_SECONDS, BETWEEN_SECONDS = 2.5, 1.0
"""How long the machine is measured before it is planned for, and before each step."""


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


def planned(
    extracted: ExtractedModel, kind: str, ranks: int, machine: tnt.HardwareSpec
) -> tnt.Plan:
    """A plan of one kind."""
    balance: str | list[int] | None = None
    if kind in ("operations", "parameters"):
        nodes = extracted.graph.nodes
        by = [float(n.parameters) if kind == "parameters" else 1.0 for n in nodes]
        balance = np.bincount(even_parts(np.array(by), ranks)).tolist()
    elif kind == "measured":
        balance = "time"
    plan = tnt.make_plan(
        extracted, ranks, batch_size=MICRO_BATCHES * SAMPLES, num_micro_batches=MICRO_BATCHES,
        num_replicas=1, schedule="1f1b", balance=balance, recompute="none", optimizer="sgd",
        machine=machine,
    )  # fmt: skip
    return tnt.Plan.from_json(world().allgather_json(plan.to_json())[0])


def stepper(name: str, plan: tnt.Plan) -> Callable[[], float]:
    """Returns what trains a step, and tells the seconds on this rank."""
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

    def step() -> float:
        world().barrier()
        begin = time.perf_counter()
        pipeline.train_function(batches)
        world().barrier()
        return time.perf_counter() - begin

    for _ in range(2):
        step()
    return step


class Machine:
    """The machine, from a file or as it is at the moment."""

    def __init__(self, path: str | None) -> None:
        self.given = None if path is None else machine_of(path)
        if path is None:
            self.probes = ComputeProbes(world())
            self.link = link_of(world())

    def now(self) -> tnt.HardwareSpec:
        """What all ranks do now."""
        return self.given or machine_of_ranks(self.probes.measure(PROBE_SECONDS), self.link)

    def rounds(self) -> list[list[float]]:
        """What probes take now, a few times; a first time they come after a step."""
        return [] if self.given else self.probes.rounds(BETWEEN_SECONDS, 2)[1:]

    def of_rounds(self, rounds: Sequence[Sequence[float]]) -> tnt.HardwareSpec:
        """What the probes say of all ranks."""
        return self.given or machine_of_ranks(self.probes.found_in(rounds), self.link)


def predicted(plan: tnt.Plan, machine: tnt.HardwareSpec) -> float:
    """The simulated seconds of a step; of ranks that share fewer cores, played here."""
    simulation = PlanSimulation(plan, machine, plan.schedule, plan.num_micro_batches)
    cores = os.cpu_count() or plan.num_stages
    if plan.num_stages > cores:
        return shared_step_seconds(simulation, cores)
    return simulation.step().step_seconds


def compared(
    plans: dict[str, tnt.Plan], steppers: dict[str, Callable[[], float]], machine: Machine,
    steps: int,
) -> dict[str, tuple[float, float]]:  # fmt: skip
    """Predicted and measured seconds of plans, which train in turn: the machine drifts."""
    rounds, seconds = list[list[float]](), list[dict[str, float]]()
    for _ in range(steps):
        rounds += machine.rounds()
        seconds.append({kind: step() for kind, step in steppers.items()})
    found = machine.of_rounds(rounds)
    return {
        kind: (predicted(plan, found), statistics.median(taken[kind] for taken in seconds))
        for kind, plan in plans.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--machine", help="a file of machine.py; else measured here")
    parser.add_argument("--models", nargs="+", default=[*IMAGES, GPT], metavar="MODEL")
    parser.add_argument("--plans", nargs="+", default=PLANS[:3], choices=PLANS)
    parser.add_argument("--steps", type=int, default=5)
    args = parser.parse_args()
    ranks = world()
    # The launcher shows what the last rank prints.
    tell = functools.partial(print, flush=True) if ranks.rank == ranks.size - 1 else lambda *_: None
    tell(f"| model | {ranks.size} stages by | predicted, ms | measured, ms | off | over the best |")
    tell("| --- | --- | ---: | ---: | ---: | ---: |")
    machine, errors, lost = Machine(args.machine), [], []
    for name in args.models:
        extracted, at_first = extract(build(name)), machine.now()
        plans = {kind: planned(extracted, kind, ranks.size, at_first) for kind in args.plans}
        steppers = {kind: stepper(name, plan) for kind, plan in plans.items()}
        rows = compared(plans, steppers, machine, args.steps)
        best = min(taken for _, taken in rows.values())
        for kind, (expected, taken) in rows.items():
            errors.append(expected / taken - 1)
            over = taken / best - 1
            if kind == "ours":
                lost.append(over)
            tell(
                f"| {name} | {kind} | {1e3 * expected:.0f} | {1e3 * taken:.0f} "
                f"| {errors[-1]:+.1%} | {over:+.1%} |"
            )
        del steppers
        keras.backend.clear_session()
        gc.collect()
    off, signed = statistics.median(map(abs, errors)), statistics.median(errors)
    tell(f"median error {off:.1%}, with sign {signed:+.1%}")
    if lost:
        tell(f"ours over the best: median {statistics.median(lost):.1%}, at most {max(lost):.1%}")


if __name__ == "__main__":
    main()
