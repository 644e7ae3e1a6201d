"""Trains a residual network on handwritten digits, with more samples at once on more ranks.

The data are the 1,797 digits of 8 x 8 pixels that come with the package: nothing is downloaded.

    python examples/data_parallel_resnet.py                         one process
    tarantella -n 2 -- examples/data_parallel_resnet.py             two replicas, twice the batch
    tarantella -n 4 -- examples/data_parallel_resnet.py             four times the batch

Each rank has the whole network and trains on its share of every batch (data parallelism). The batch
grows with the ranks, and the learning rate with the batch: the linear scaling rule of Goyal et al.,
"Accurate, Large Minibatch SGD: Training ImageNet in 1 Hour" (2017). As there, the rate
rises to this over the first epochs, then falls to a tenth of it again and again; the last
normalization of each block begins with 0; biases and normalizations have no weight decay; and batch
statistics are those of a rank's own samples, as many on each rank however many there are.
"""

from __future__ import annotations

import argparse
import os
import time

os.environ.setdefault("KERAS_BACKEND", "tensorflow")

import keras
from keras import layers

import tarantella_pp as tnt
from tarantella_pp.demo import load_data

DECAY = 1e-4


def convolution(x: keras.KerasTensor, filters: int, size: int, strides: int) -> keras.KerasTensor:
    """Adds a convolution without bias, which the normalization behind it has."""
    return layers.Conv2D(
        filters,
        size,
        strides=strides,
        padding="same",
        use_bias=False,
        kernel_initializer="he_normal",
        kernel_regularizer=keras.regularizers.L2(DECAY),
    )(x)


def block(x: keras.KerasTensor, filters: int, strides: int) -> keras.KerasTensor:
    """Adds two convolutions to what goes past them; at first, they add nothing."""
    shortcut = x
    if strides > 1 or x.shape[-1] != filters:
        shortcut = layers.BatchNormalization()(convolution(x, filters, 1, strides))
    x = layers.ReLU()(layers.BatchNormalization()(convolution(x, filters, 3, strides)))
    x = layers.BatchNormalization(gamma_initializer="zeros")(convolution(x, filters, 3, 1))
    return layers.ReLU()(layers.Add()([shortcut, x]))


def build_model(filters: int = 16, blocks: int = 2, levels: int = 3) -> keras.Model:
    """Builds a residual network with ten outputs, one for each digit."""
    image = keras.Input((8, 8, 1))
    x = layers.ReLU()(layers.BatchNormalization()(convolution(image, filters, 3, 1)))
    for level in range(levels):
        for i in range(blocks):
            x = block(x, filters * 2**level, strides=2 if level and not i else 1)
    x = layers.GlobalAveragePooling2D()(x)
    return keras.Model(image, layers.Dense(10)(x), name="resnet")


@keras.saving.register_keras_serializable("examples")
class WarmUpAndSteps(keras.optimizers.schedules.LearningRateSchedule):
    """A rate that rises with each step, and later falls to a tenth of itself, and again.

    Args:
        start: The rate at first, that of a single rank.
        scaled: The rate at the end of the rise.
        rising: Number of steps of the rise.
        falls: After which steps the rate falls.
    """

    def __init__(self, start: float, scaled: float, rising: int, falls: list[int]) -> None:
        self.start, self.scaled, self.rising, self.falls = start, scaled, rising, falls

    def __call__(self, step: keras.KerasTensor) -> keras.KerasTensor:
        """Returns the rate of a step."""
        step = keras.ops.cast(step, "float32")
        risen = keras.ops.minimum(step / max(1, self.rising), 1.0)
        fallen = sum(keras.ops.cast(step >= fall, "float32") for fall in self.falls)
        return (self.start + risen * (self.scaled - self.start)) * 0.1**fallen

    def get_config(self) -> dict[str, object]:
        """Returns what makes the schedule again."""
        return {name: getattr(self, name) for name in ("start", "scaled", "rising", "falls")}


def parse_arguments() -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--epochs", type=int, default=18)
    add("--batch-size", type=int, default=32, help="samples of a batch for each rank (default: 32)")
    add("--rate", type=float, default=0.05, help="learning rate of a single rank (default: 0.05)")
    add("--warm-up", type=int, default=3, help="epochs in which the rate rises (default: 3)")
    add("--seed", type=int, default=1)
    return parser.parse_args()


def main() -> None:
    """Trains the network, then tests it."""
    args = parse_arguments()
    keras.utils.set_random_seed(args.seed)
    (x, y), (x_test, y_test) = load_data()

    ranks = tnt.get_size()
    batch_size = args.batch_size * ranks
    model = tnt.Model(build_model(), num_micro_batches=1, batch_size=batch_size)
    steps = -(-len(x) // batch_size)  # of an epoch
    falls = [steps * args.epochs * part // 9 for part in (6, 8)]
    rate = WarmUpAndSteps(args.rate, args.rate * ranks, steps * args.warm_up, falls)
    model.compile(
        optimizer=keras.optimizers.SGD(rate, momentum=0.9, nesterov=True),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )
    if tnt.is_master_rank():
        print(model.plan)
        print(f"batches of {batch_size}, learning rate {args.rate:g} to {args.rate * ranks:g}")
    before, _ = model.evaluate(x_test, y_test, batch_size=batch_size, verbose=0)
    start = time.perf_counter()
    model.fit(x, y, batch_size=batch_size, epochs=args.epochs)
    seconds = time.perf_counter() - start
    after, accuracy = model.evaluate(x_test, y_test, batch_size=batch_size, verbose=0)
    if tnt.is_master_rank():
        print(f"test loss: {before:.4f} before, {after:.4f} after training")
        print(f"test accuracy: {accuracy:.4f}")
        print(f"training: {args.epochs * len(x) / seconds:.0f} samples/s, {steps} steps an epoch")


if __name__ == "__main__":
    main()
