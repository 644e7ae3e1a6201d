"""Trains a GPT that is larger than the memory of a process: each rank has its share of it only.

    python examples/oversized.py                                   fails: 700 MB are not enough
    tarantella -n 4 --threads 1 -- examples/oversized.py           trains, saves and goes on
    tarantella -n 4 --threads 1 -- examples/oversized.py --width 768 --limit 1200

No process may take more than so many megabytes beyond what it has once its libraries are loaded.
The model is given as the function that builds it, so that no rank ever has all weights. It is the
one of hybrid_gpt.py, and so is its text.
"""

from __future__ import annotations

import argparse
import logging
import os
import resource
import shutil
import sys
import tempfile
import warnings
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import hybrid_gpt
import keras
import numpy as np

import tarantella_pp as tnt

MEGABYTE = 10**6


def memory() -> int:
    """Returns the bytes of memory that this process may write to."""
    status = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in status if line.startswith("VmData"))


def limit_memory(megabytes: int) -> int:
    """Lets this process have so many megabytes more; returns the bytes that it has now."""
    before = memory()
    resource.setrlimit(resource.RLIMIT_DATA, (before + megabytes * MEGABYTE, -1))
    return before


def build_model(width: int = 512, blocks: int = 8) -> keras.Model:
    """Builds the GPT."""
    return hybrid_gpt.build_model(width, blocks, heads=8)


def parse_arguments() -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--width", type=int, default=512, help="numbers for each character (default: 512)")
    add("--blocks", type=int, default=8, help="attention and perceptron (default: 8)")
    add("--limit", type=int, default=700, help="megabytes for each process (default: 700)")
    add("--steps", type=int, default=8, help="batches to train on, twice (default: 8)")
    add("--batch-size", type=int, default=8, help="pieces of text (default: 8)")
    return parser.parse_args()


def compiled(model: keras.Model) -> keras.Model:
    """Gives a model what it is trained with."""
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.AdamW(1e-3), loss)
    return model


def load_data(args: argparse.Namespace) -> tuple[np.ndarray, np.ndarray]:
    """Returns what the model is trained on."""
    text, _ = hybrid_gpt.load_text()
    return hybrid_gpt.windows(text, args.steps * args.batch_size, seed=1)


def train(args: argparse.Namespace, folder: Path) -> list[float]:
    """Trains an epoch, loads what it came to into a new model, and goes on from the checkpoint."""
    x, y = load_data(args)
    quiet = {"batch_size": args.batch_size, "verbose": 0}

    def new_model() -> keras.Model:
        keras.utils.set_random_seed(1)
        return compiled(
            tnt.PipelineModel(
                lambda: build_model(args.width, args.blocks),
                num_stages=tnt.get_size(),
                num_micro_batches=4,
                batch_size=args.batch_size,
                balance="memory",
            )
        )

    def fit(model: keras.Model, epochs: int) -> None:
        own = tnt.callbacks.Checkpoint(folder / "run")
        model.fit(x, y, epochs=epochs, shuffle=False, callbacks=[own], **quiet)

    model = new_model()
    if tnt.is_master_rank():
        print(model.plan)
        needs = 16 * model.count_params() // MEGABYTE
        print(f"weights, gradients and AdamW's state: {needs} MB; limit: {args.limit} MB a process")
    fit(model, epochs=1)
    losses = [model.evaluate(x, y, **quiet)]
    model.save_weights(folder / "trained.weights.h5")
    del model
    keras.backend.clear_session()

    model = new_model()
    model.load_weights(folder / "trained.weights.h5")
    losses.append(model.evaluate(x, y, **quiet))
    fit(model, epochs=2)
    losses.append(model.evaluate(x, y, **quiet))
    return losses


def main() -> None:
    """Trains the model, each process with a limit to its memory, and prints its losses."""
    args = parse_arguments()
    # As in plain Keras, an optimizer that has not made a step yet loads no state.
    warnings.filterwarnings("ignore", message=".* keeps its state")
    logging.getLogger("tarantella_pp").setLevel(logging.ERROR)  # it goes on from a checkpoint
    folder = Path(tempfile.gettempdir()) / f"oversized-{os.getuid()}"
    if tnt.is_master_rank():
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
    tnt.barrier()
    before = limit_memory(args.limit)
    losses = train(args, folder)
    if tnt.is_master_rank():
        shutil.rmtree(folder)
        told = ", ".join(f"{loss:.4f}" for loss in losses)
        print(f"loss: trained, loaded, trained on: {told}")
        print(f"this process took {(memory() - before) // MEGABYTE} MB of {args.limit}")


if __name__ == "__main__":
    main()
