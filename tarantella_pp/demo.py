"""Trains a small residual network on handwritten digits, in a pipeline of several stages.

    tarantella demo                          two stages on two ranks
    tarantella demo -n 4 -- --stages 4       four stages on four ranks
    python -m tarantella_pp.demo             one process owns all stages

All of them train the same network to the same numbers. In float64, as here by default, rounding
stays invisible over hundreds of steps; `--dtype float32` is faster, and rounding, which differs
between numbers of threads and stages, then grows as in any training. Three lines make it a
pipeline; each is marked with an arrow.

The 1,797 images of 8 x 8 pixels come with the package, so nothing is downloaded: the test set of
"Optical Recognition of Handwritten Digits" (E. Alpaydin and C. Kaynak, UCI Machine Learning
Repository, 1998, CC BY 4.0), in which every fifth image is held out for testing.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

os.environ.setdefault("KERAS_BACKEND", "tensorflow")

import keras
import numpy as np
from keras import layers

import tarantella_pp as tnt  # <-- 1


def residual_block(x: keras.KerasTensor, filters: int) -> keras.KerasTensor:
    """Adds two convolutions to what goes past them.

    Layers are normalised, not batches: a pipeline works on micro-batches, and only what treats
    each sample by itself comes to the same for every number of them.
    """
    shortcut = x
    for _ in range(2):
        x = layers.LayerNormalization()(x)
        x = layers.Activation("relu")(x)
        x = layers.Conv2D(filters, 3, padding="same", use_bias=False)(x)
    return layers.Add()([shortcut, x])


def build_model(
    image_shape: tuple[int, ...] = (8, 8, 1), filters: int = 16, blocks: int = 4
) -> keras.Model:
    """Builds a residual network of two levels of blocks with ten outputs, one for each digit."""
    image = keras.Input(image_shape)
    x = layers.Conv2D(filters, 3, padding="same")(image)
    for _ in range(blocks):
        x = residual_block(x, filters)
    x = layers.Conv2D(2 * filters, 2, strides=2)(x)
    for _ in range(blocks):
        x = residual_block(x, 2 * filters)
    x = layers.LayerNormalization()(x)
    x = layers.Activation("relu")(x)
    x = layers.GlobalAveragePooling2D()(x)
    return keras.Model(image, layers.Dense(10)(x), name="digits")


def load_data() -> tuple[tuple[np.ndarray, np.ndarray], tuple[np.ndarray, np.ndarray]]:
    """Returns the images, from 0 to 1, and the digits on them, for training and for testing."""
    with np.load(Path(__file__).with_name("digits.npz")) as file:
        x, x_test = (
            (file[name][..., np.newaxis] / 16.0).astype(keras.config.floatx())
            for name in ("x", "x_test")
        )
        return (x, file["y"].astype("int32")), (x_test, file["y_test"].astype("int32"))


def make_optimizer(steps: int) -> keras.optimizers.Optimizer:
    """Returns AdamW with a rate that rises over the first steps and falls to 0 at the last."""
    rising = steps // 6
    rate = keras.optimizers.schedules.CosineDecay(
        0.0, steps - rising, warmup_target=3e-3, warmup_steps=rising
    )
    return keras.optimizers.AdamW(rate, weight_decay=1e-2)


def parse_arguments() -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--stages", type=int, default=2, help="pipeline stages (default: 2)")
    add("--micro-batches", type=int, default=4, help="parts of a batch (default: 4)")
    add("--schedule", help="gpipe, 1f1b, ... (default: the library's choice)")
    add("--epochs", type=int, default=12)
    add("--batch-size", type=int, default=64)
    add("--seed", type=int, default=1)
    add("--dtype", choices=("float32", "float64"), default="float64")
    return parser.parse_args()


def main() -> None:
    """Trains the network, then tests it."""
    args = parse_arguments()
    keras.config.set_floatx(args.dtype)
    keras.utils.set_random_seed(args.seed)
    (x, y), (x_test, y_test) = load_data()

    model = build_model(x.shape[1:])
    model = tnt.PipelineModel(  # <-- 2
        model, num_stages=args.stages, num_micro_batches=args.micro_batches, schedule=args.schedule
    )
    steps = args.epochs * -(-len(x) // args.batch_size)
    model.compile(
        optimizer=make_optimizer(steps),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )
    model.fit(x, y, batch_size=args.batch_size, epochs=args.epochs)
    loss, accuracy = model.evaluate(x_test, y_test, batch_size=args.batch_size, verbose=0)
    if tnt.is_master_rank():
        print(f"test loss: {loss:.6f}")
        print(f"test accuracy: {accuracy:.4f}\n")
        print(model.plan)  # <-- 3


if __name__ == "__main__":
    main()
