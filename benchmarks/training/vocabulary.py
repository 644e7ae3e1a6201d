"""A language model with a large vocabulary, its head on one stage or cut by columns over several.

    tarantella -n 2 --threads 1 -- benchmarks/training/vocabulary.py
    tarantella -n 4 --threads 1 -- benchmarks/training/vocabulary.py --width 128

Both pipelines train in the same launch, in turn (A B A B ...), with Adam; medians of the seconds of
a step, the seconds that their plans simulate, and the largest stage's share of the work, below
which no step comes.
"""

import argparse
import os
import statistics
import time

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
os.environ.setdefault("KERAS_BACKEND", "tensorflow")

import keras
import numpy as np
from keras import layers
from rich.console import Console
from rich.table import Table

import tarantella_pp as tnt
from tarantella_pp.runtime.comm.communicator import world

TOKENS, TURNS = 64, 9


def language_model(vocabulary: int, width: int, blocks: int) -> keras.Model:
    x = inputs = keras.Input((TOKENS,), dtype="int32")
    x = layers.Embedding(vocabulary, width)(x)
    for _ in range(blocks):
        y = layers.LayerNormalization()(x)
        x += layers.MultiHeadAttention(4, width // 4)(y, y, use_causal_mask=True)
        y = layers.Dense(4 * width, "gelu")(layers.LayerNormalization()(x))
        x += layers.Dense(width)(y)
    return keras.Model(inputs, layers.Dense(vocabulary, use_bias=False, name="head")(x))


def pipeline(args: argparse.Namespace, is_cut: bool) -> tnt.PipelineModel:
    keras.utils.set_random_seed(0)
    model = language_model(args.vocabulary, args.width, args.blocks)
    # An optimizer that looks at whole weights has the plan leave them whole.
    plan = tnt.make_plan(
        model, num_stages=world().size, batch_size=args.batch, num_micro_batches=args.micro_batches,
        schedule="1f1b", balance="flops",
        optimizer=keras.optimizers.Adam() if is_cut else keras.optimizers.Lamb(),
    )  # fmt: skip
    parallel = tnt.PipelineModel(model, plan=plan)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    parallel.compile(keras.optimizers.Adam(1e-4), loss)
    return parallel


def main() -> None:
    parser = argparse.ArgumentParser()
    for name, value in (("vocabulary", 32_000), ("width", 256), ("blocks", 4), ("batch", 16)):
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--micro-batches", type=int, default=4)
    args = parser.parse_args()
    both = [pipeline(args, is_cut) for is_cut in (False, True)]
    rng = np.random.default_rng(0)
    x, y = rng.integers(0, args.vocabulary, (2, args.batch, TOKENS))
    seconds: list[list[float]] = [[], []]
    for turn in range(1 + TURNS):
        for model, found in zip(both, seconds, strict=True):
            start = time.perf_counter()
            model.train_on_batch(x, y)
            if turn:
                found.append(time.perf_counter() - start)
    if world().rank == world().size - 1:
        table = Table("head", "parts", "a step", "simulated", "largest stage")
        for name, model, found in zip(("whole", "cut"), both, seconds, strict=True):
            plan = model.plan
            parts = max(1, sum("of" in node for node in plan.node_names))
            work = [stage.flops for stage in plan.stages]
            table.add_row(
                name, str(parts), f"{1000 * statistics.median(found):.0f} ms",
                f"{1000 * plan.step_seconds:.0f} ms", f"{100 * max(work) / sum(work):.1f} %",
            )  # fmt: skip
        Console(width=100).print(table)


if __name__ == "__main__":
    main()
