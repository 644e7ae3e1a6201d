"""Trains a network on the digits 0 to 4, then only its last layer on a few of the digits 5 to 9.

    python examples/transfer.py                      one process does everything
    tarantella -n 2 -- examples/transfer.py          two stages on two ranks

The network is saved, loaded as a plain Keras model, and frozen. The frozen stage of the second
pipeline has no gradients, no optimizer state and no backward pass.
"""

from __future__ import annotations

import argparse
import os

os.environ.setdefault("KERAS_BACKEND", "tensorflow")

import keras
from keras import layers

import tarantella_pp as tnt
from tarantella_pp.demo import load_data


def build_model(filters: int = 32) -> keras.Model:
    """Builds a convolutional network with five outputs, one for each digit."""
    x = image = keras.Input((8, 8, 1))
    for level in range(3):
        x = layers.Conv2D(filters * 2**level, 3, padding="same", activation="relu")(x)
        x = layers.LayerNormalization()(x)
    x = layers.Flatten()(layers.AveragePooling2D(4)(x))
    return keras.Model(image, layers.Dense(5)(x), name="pretrained")


def pipeline(model: keras.Model) -> keras.Model:
    """Makes two stages of a model."""
    model = tnt.PipelineModel(model, num_stages=2, num_micro_batches=4)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.Adam(3e-3), loss, metrics=["accuracy"])
    return model


def parse_arguments() -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--epochs", type=int, default=4, help="ten times as many on the few images (default: 4)")
    add("--few", type=int, default=64, help="images of the last five digits (default: 64)")
    add("--file", default="pretrained.keras", help="of the network that is frozen")
    return parser.parse_args()


def main() -> None:
    """Trains a network, saves it, and trains a new last layer."""
    args = parse_arguments()
    keras.utils.set_random_seed(1)
    (x, y), (x_test, y_test) = load_data()

    model = pipeline(build_model())
    model.fit(x[y < 5], y[y < 5], batch_size=64, epochs=args.epochs)
    model.save(args.file)

    pretrained = keras.models.load_model(args.file, compile=False)
    pretrained.trainable = False
    logits = layers.Dense(5)(pretrained.layers[-2].output)
    model = pipeline(keras.Model(pretrained.input, logits, name="transfer"))
    x, y, x_test, y_test = x[y > 4], y[y > 4] - 5, x_test[y_test > 4], y_test[y_test > 4] - 5
    model.fit(x[: args.few], y[: args.few], batch_size=32, epochs=10 * args.epochs, verbose=0)
    loss, accuracy = model.evaluate(x_test, y_test, batch_size=64, verbose=0)
    if tnt.is_master_rank():
        print(f"test loss: {loss:.4f}")
        print(f"test accuracy: {accuracy:.4f} after {args.few} images")
        print(model.plan)


if __name__ == "__main__":
    main()
