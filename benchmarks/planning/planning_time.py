"""How long `make_plan` takes for large models, everything but the number of stages left open.

    python benchmarks/planning/planning_time.py [--models resnet101 unet gpt NASNetLarge]
        [--stages 2 4 8 16 32] [--machine a100]

Seconds of the processor, in one thread, after the model has been read; and how good the plan is.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable
from functools import partial

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
os.environ.setdefault("KERAS_BACKEND", "tensorflow")

import keras

import tarantella_pp as tnt
from benchmarks.planning.published_models import resnet101, unet
from benchmarks.sized_models import gpt
from tarantella_pp.models.deferred_init import only_shapes
from tarantella_pp.partition.graph.keras_reader import extract

MODELS: dict[str, tuple[Callable[[], keras.Model], int]] = {
    "resnet101": (resnet101, 256),
    "unet": (partial(unet, 48, 160), 256),
    "gpt": (partial(gpt, 50257, 1024, 12288, 96, 96, 0.0), 64),
    "NASNetLarge": (partial(keras.applications.NASNetLarge, weights=None), 256),
}
"""The models, and samples of a batch: the U-Net has 15.8 billion parameters, the GPT 175."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="+", default=[*MODELS], choices=MODELS)
    parser.add_argument("--stages", nargs="+", type=int, default=[2, 4, 8, 16, 32])
    parser.add_argument("--machine", default="a100")
    args = parser.parse_args()
    make_plan = tnt.make_plan  # loads what it needs
    print("| model | operations | stages | CPU s | plan | off the optimum, at most |")
    print("| --- | ---: | ---: | ---: | --- | ---: |")
    for name in args.models:
        build, samples = MODELS[name]
        with only_shapes():
            extracted = extract(build())
        nodes = len(extracted.graph.nodes)
        for stages in args.stages:
            begun = time.process_time()
            plan = make_plan(extracted, stages, batch_size=samples, machine=args.machine)
            seconds = time.process_time() - begun
            found = plan.certificate
            gap = "optimal" if found.optimal else f"{found.gap or 0.0:.2%}"
            kind = f"{plan.schedule}, {plan.balance}, {plan.num_micro_batches} micro-batches"
            print(f"| {name} | {nodes} | {stages} | {seconds:.1f} | {kind} | {gap} |", flush=True)


if __name__ == "__main__":
    main()
