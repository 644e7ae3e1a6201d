"""What a stage keeps of a micro-batch until its B, and what is left of that until its W.

    python benchmarks/planning/waiting.py

Models of two stages in one process: the first one hands no gradients back, so that its B is empty.
The bytes are read off the traced stages.
"""

from __future__ import annotations

import os

os.environ.setdefault("KERAS_BACKEND", "tensorflow")

import keras
from rich.console import Console
from rich.table import Table

import tarantella_pp as tnt
from tests.zoo.sized_models import BUILDERS, ROWS, data_for

MICRO_BATCHES = 2


def kept(name: str) -> list[tuple[int, int]]:
    """Bytes of each stage before B and before W."""
    rows = MICRO_BATCHES * ROWS[name]
    model = tnt.PipelineModel(BUILDERS[name](), 2, MICRO_BATCHES, "zb-h1", "flops", batch_size=rows)
    model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    model.train_on_batch(*data_for(name, rows))
    stages = model._engine.stages.values()
    return [(stage.residual_bytes or 0, stage.waiting_bytes or 0) for stage in stages]


def main() -> None:
    table = Table(title="Kept of a micro-batch, MiB")
    for heading in ("model", "rows", "stage", "before B", "before W"):
        table.add_column(heading, justify="left" if heading == "model" else "right")
    for name in BUILDERS:
        for stage, sizes in enumerate(kept(name)):
            table.add_row(name, str(ROWS[name]), str(stage), *(f"{x / 2**20:.1f}" for x in sizes))
    Console().print(table)


if __name__ == "__main__":
    main()
