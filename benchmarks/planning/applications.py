"""Plans of every model of `keras.applications`, a GPT-like decoder stack and a U-Net.

    python benchmarks/planning/applications.py [MODEL ...] [--stages 2 4 8] [--markdown FILE]

The models have no weights of their own and are planned by memory, for 1F1B, a batch of 32 and
four micro-batches a stage. Seconds are those of the processor; building and reading the model are
not in them.
"""

from __future__ import annotations

import argparse
import functools
import gc
import inspect
import os
import time
from collections.abc import Callable
from pathlib import Path

os.environ.setdefault("KERAS_BACKEND", "tensorflow")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import keras
from keras import layers
from rich.console import Console
from rich.table import Table

from benchmarks.sized_models import gpt, unet
from tarantella_pp.errors import TarantellaError
from tarantella_pp.partition.graph.units import format_bytes
from tarantella_pp.partition.options import PlanOptions
from tarantella_pp.partition.planner import Planner


def two_classes(x: keras.KerasTensor) -> keras.KerasTensor:
    return layers.Conv2D(2, 1)(x)


def builders() -> dict[str, Callable[[], keras.Model]]:
    """All models by name."""
    found: dict[str, Callable[[], keras.Model]] = {}
    for name, value in sorted(vars(keras.applications).items()):
        if inspect.isfunction(value):
            found[name] = functools.partial(application, value)
    return {
        **found,
        "GPT": gpt,
        "GPT, tied": functools.partial(gpt, tied=True),
        "UNet": functools.partial(unet, 256, (64, 128, 256, 512, 1024), two_classes),
    }


def application(build: Callable[..., keras.Model]) -> keras.Model:
    """A model of `keras.applications`, for images of its own size, or of 224 x 224 for any size."""
    model = build(weights=None)
    if None in model.input_shape[1:]:
        model = build(weights=None, input_shape=(224, 224, 3))
    return model


def row(name: str, build: Callable[[], keras.Model], stages: list[int]) -> list[str]:
    """Plans a model for each number of stages; the last cell has the seconds of all of them."""
    try:
        planner = Planner.of(build())
    except (TarantellaError, ImportError, ValueError) as error:
        return [name, str(error).split(".")[0]]
    cells, start = [], time.process_time()
    for count in stages:
        options = PlanOptions(
            num_stages=count, batch_size=32, num_micro_batches=min(32, 4 * count),
            num_replicas=1, schedule="1f1b", balance="memory", memory_limit=None,
        ).settled()  # fmt: skip
        proof = planner.solve(options).certificate
        gap = "" if proof.optimal else f", {100 * (proof.gap or 0.0):.2g} %"
        cells.append(format_bytes(proof.value) + gap)
    return [name, *cells, f"{time.process_time() - start:.1f}"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("models", nargs="*", metavar="MODEL")
    parser.add_argument("--stages", nargs="+", type=int, default=[2, 4, 8])
    parser.add_argument("--markdown", type=Path, help="put the table into this page as well")
    args = parser.parse_args()
    known = builders()
    heads = ["model", *(f"{n} stages" for n in args.stages), "seconds"]
    table = Table(*heads)
    lines = [f"| {' | '.join(heads)} |", f"| {' | '.join(['---'] * len(heads))} |"]
    for name in args.models or known:
        cells = row(name, known[name], args.stages)
        table.add_row(*cells)
        lines.append(f"| {' | '.join(cells)} |")
        print(lines[-1], flush=True)
        keras.backend.clear_session()
        gc.collect()
    if args.markdown:
        text = args.markdown.read_text(encoding="utf-8").partition("| model |")[0]
        args.markdown.write_text(text + "\n".join(lines) + "\n", encoding="utf-8")
    Console().print(table)


if __name__ == "__main__":
    main()
