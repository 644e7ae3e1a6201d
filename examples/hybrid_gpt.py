"""Trains a small GPT on the sources of Python's standard library: two replicas of two stages.

It reads and writes single characters. Its text comes with Python: nothing is downloaded.

    python examples/hybrid_gpt.py                                   one process does everything
    tarantella -n 2 -- examples/hybrid_gpt.py                       a pipeline of two stages
    tarantella -n 4 --threads 1 -- examples/hybrid_gpt.py           two replicas of it (hybrid)
    tarantella -n 4 --threads 1 -- examples/hybrid_gpt.py --stages 1      four replicas of one stage

Ranks that are left over when there is one for each stage become further replicas, each of which
trains on its share of every batch. All start from the same loss and end with the same one, to
rounding. The first stage looks characters up in the table that the last stage multiplies with: it
is trained on both, as one. Three lines make it hybrid; each is marked with an arrow.
"""

from __future__ import annotations

import argparse
import math
import os
import re
import sysconfig
import time
from pathlib import Path

os.environ.setdefault("KERAS_BACKEND", "tensorflow")

import keras
import numpy as np
from keras import layers

import tarantella_pp as tnt  # <-- 1

CHARACTERS = "\n" + "".join(map(chr, range(32, 127)))
CONTEXT = 64
PROMPT = "def "


def block(x: keras.KerasTensor, width: int, heads: int) -> keras.KerasTensor:
    """Adds attention to earlier characters, then a perceptron for each character."""
    y = layers.LayerNormalization()(x)
    y = layers.MultiHeadAttention(heads, width // heads)(y, y, use_causal_mask=True)
    x = layers.Add()([x, y])
    y = layers.Dense(4 * width, activation="gelu")(layers.LayerNormalization()(x))
    return layers.Add()([x, layers.Dense(width)(y)])


def build_model(width: int = 64, blocks: int = 4, heads: int = 4) -> keras.Model:
    """Builds a GPT that says for each character of a text which one comes next."""
    text = keras.Input((CONTEXT,), dtype="int32")
    table = layers.ReversibleEmbedding(
        len(CHARACTERS), width, embeddings_initializer="random_normal"
    )
    places = keras.ops.cumsum(keras.ops.ones_like(text), axis=1) - 1
    x = layers.Add()([table(text), layers.Embedding(CONTEXT, width)(places)])
    for _ in range(blocks):
        x = block(x, width, heads)
    x = layers.LayerNormalization()(x)
    return keras.Model(text, table(x, reverse=True), name="gpt")


def load_text() -> tuple[np.ndarray, np.ndarray]:
    """Returns the sources in numbers: most of them to train on, the last ones to test on."""
    folder = Path(sysconfig.get_path("stdlib"))
    sources = [path.read_text(encoding="utf-8") for path in sorted(folder.glob("*.py"))]
    text = re.sub(r"[^\n -~]", "", "".join(sources))
    numbers = encode(text)
    end = len(numbers) * 9 // 10
    return numbers[:end], numbers[end:]


def encode(text: str) -> np.ndarray:
    """Turns characters into numbers."""
    codes = np.frombuffer(text.encode("ascii"), np.uint8).astype("int32")
    return np.where(codes == ord("\n"), 0, codes - 31).astype("int32")


def windows(text: np.ndarray, count: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Draws pieces of a text, and for each of their characters the one that follows."""
    starts = np.random.default_rng(seed).integers(0, len(text) - CONTEXT - 1, count)
    pieces = text[starts[:, np.newaxis] + np.arange(CONTEXT + 1)]
    return pieces[:, :-1], pieces[:, 1:]


def write(gpt: keras.Model, length: int, seed: int, temperature: float = 0.7) -> str:
    """Lets a model go on with a text, one character after the other."""
    draw = np.random.default_rng(seed)
    text = PROMPT
    for _ in range(length):
        seen = encode(text)[-CONTEXT:]
        padded = np.pad(seen, (0, CONTEXT - len(seen)))[np.newaxis]
        logits = keras.ops.convert_to_numpy(gpt(padded))[0, len(seen) - 1] / temperature
        odds = np.exp(logits.astype("float64") - logits.max())
        text += CHARACTERS[draw.choice(len(CHARACTERS), p=odds / odds.sum())]
    return text


def make_optimizer(steps: int) -> keras.optimizers.Optimizer:
    """Returns AdamW with a rate that rises over the first steps and falls to 0 at the last."""
    rising = max(1, steps // 10)
    rate = keras.optimizers.schedules.CosineDecay(
        0.0, max(1, steps - rising), warmup_target=4e-3, warmup_steps=rising
    )
    return keras.optimizers.AdamW(rate, weight_decay=1e-2)


def parse_arguments() -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add(
        "--stages",
        type=int,
        default=2,
        help="pipeline stages; other ranks are replicas (default: 2)",
    )
    add(
        "--micro-batches",
        type=int,
        help="parts of a replica's share (default: the library's choice)",
    )
    add("--steps", type=int, default=400, help="batches to train on (default: 400)")
    add("--batch-size", type=int, default=32, help="of all replicas together (default: 32)")
    add("--write", type=int, default=240, help="characters to write at the end (default: 240)")
    add("--seed", type=int, default=1)
    return parser.parse_args()


def main() -> None:
    """Trains the model, tests it, and lets it write."""
    args = parse_arguments()
    keras.utils.set_random_seed(args.seed)
    text, test_text = load_text()
    x, y = windows(text, args.steps * args.batch_size, args.seed)
    test = windows(test_text, 512, args.seed)

    gpt = build_model()
    model = tnt.PipelineModel(  # <-- 2
        gpt,
        num_stages=args.stages,
        num_micro_batches=args.micro_batches,
        batch_size=args.batch_size,
    )
    model.compile(
        optimizer=make_optimizer(args.steps),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    )
    if tnt.is_master_rank():
        print(model.plan)  # <-- 3
    before = model.evaluate(*test, batch_size=args.batch_size, verbose=0)
    start = time.perf_counter()
    model.fit(x, y, batch_size=args.batch_size)
    seconds = time.perf_counter() - start
    after = model.evaluate(*test, batch_size=args.batch_size, verbose=0)
    model.get_weights()  # brings the weights of all stages to every rank
    if tnt.is_master_rank():
        speed = len(x) / seconds
        print(f"test loss: {before:.4f} before, {after:.4f} after training")
        print(f"bits for a character: {before / math.log(2):.2f} before, {after / math.log(2):.2f}")
        print(
            f"training: {speed:.0f} samples/s, {CONTEXT * speed:.0f} characters/s, with compilation"
        )
        print(f"it writes:\n{write(gpt, args.write, args.seed)}")


if __name__ == "__main__":
    main()
