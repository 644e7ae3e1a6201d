"""Trains a U-Net that takes noise off handwritten digits, in a pipeline of three stages.

    python examples/unet.py                               one process owns all stages
    tarantella -n 3 --threads 1 -- examples/unet.py       three stages on three ranks

Each level of the left half of the U is added to the right half at the same level: tensors that go
around all that lies below. Nothing in the model says where it is cut.
"""

from __future__ import annotations

import argparse
import os

os.environ.setdefault("KERAS_BACKEND", "tensorflow")

import keras
import numpy as np
from keras import layers

import tarantella_pp as tnt
from tarantella_pp.demo import load_data


def convolved(x: keras.KerasTensor, filters: int) -> keras.KerasTensor:
    """Adds two convolutions."""
    for _ in range(2):
        x = layers.Conv2D(filters, 3, padding="same", activation="relu")(x)
    return x


def build_model(filters: int = 16, levels: int = 3) -> keras.Model:
    """Builds a U-Net that turns an image into an image."""
    x = image = keras.Input((8, 8, 1))
    left = []
    for level in range(levels):
        left.append(x := convolved(x, filters * 2**level))
        x = layers.MaxPooling2D(padding="same")(x)
    x = convolved(x, filters * 2**levels)
    for level in reversed(range(levels)):
        x = layers.Conv2DTranspose(filters * 2**level, 2, strides=2)(x)
        x = convolved(layers.Concatenate()([left[level], x]), filters * 2**level)
    return keras.Model(image, layers.Conv2D(1, 1)(x), name="unet")


def parse_arguments() -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--stages", type=int, default=3, help="pipeline stages (default: 3)")
    add("--epochs", type=int, default=10)
    add("--batch-size", type=int, default=64)
    add("--noise", type=float, default=0.3, help="its standard deviation (default: 0.3)")
    return parser.parse_args()


def main() -> None:
    """Trains the network, then tests it."""
    args = parse_arguments()
    keras.utils.set_random_seed(1)
    (x, _), (x_test, _) = load_data()
    draw = np.random.default_rng(1)
    noisy, noisy_test = (clean + draw.normal(0, args.noise, clean.shape) for clean in (x, x_test))

    model = tnt.PipelineModel(build_model(), num_stages=args.stages, num_micro_batches=4)
    model.compile(keras.optimizers.Adam(2e-3), "mse")
    model.fit(noisy, x, batch_size=args.batch_size, epochs=args.epochs)
    loss = model.evaluate(noisy_test, x_test, batch_size=args.batch_size, verbose=0)
    if tnt.is_master_rank():
        print(f"test loss: {loss:.4f} of {np.mean((noisy_test - x_test) ** 2):.4f} of noise")
        print(model.plan)


if __name__ == "__main__":
    main()
