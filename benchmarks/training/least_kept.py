"""What a stage keeps, and how long a step takes: all that gradients read, and the least.

    python benchmarks/training/least_kept.py

Forward and backward passes of one stage on one core, float32, both ways in turn; medians of the
processor's time. The gradients must be the same, bit for bit.
"""

import os
import statistics
import time

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
os.environ.setdefault("KERAS_BACKEND", "tensorflow")
os.environ.setdefault("CUDA_VISIBLE_DEVICES", "-1")

import keras
import numpy as np
import tensorflow as tf
from keras import layers
from rich.console import Console
from rich.table import Table

from tarantella_pp.partition.graph.keras_reader import extract
from tarantella_pp.partition.graph.least_kept import FLOPS_PER_BYTE
from tarantella_pp.runtime.stage.graph_functions import unoptimized
from tarantella_pp.runtime.stage.stage import Stage
from tarantella_pp.runtime.stage.stage_boundary import stage_boundaries

TURNS = 25


def gpt(x):
    y = layers.LayerNormalization()(x)
    x += layers.Dropout(0.1)(layers.MultiHeadAttention(4, 64)(y, y, use_causal_mask=True))
    y = layers.Dense(1024, "gelu")(layers.LayerNormalization()(x))
    return x + layers.Dropout(0.1)(layers.Dense(256)(y))


def residual(x):
    y = layers.Conv2D(64, 3, padding="same", use_bias=False)(x)
    y = layers.ReLU()(layers.BatchNormalization()(y))
    y = layers.Conv2D(64, 3, padding="same", use_bias=False)(y)
    return layers.ReLU()(layers.BatchNormalization()(y) + x)


def convnext(x):
    y = layers.LayerNormalization()(layers.DepthwiseConv2D(7, padding="same")(x))
    return x + layers.Dense(64)(layers.Dense(256, "gelu")(y))


def efficient(x):
    y = layers.Conv2D(128, 1, use_bias=False)(x)
    y = layers.Activation("silu")(layers.BatchNormalization()(y))
    y = layers.DepthwiseConv2D(3, padding="same", use_bias=False)(y)
    y = layers.Activation("silu")(layers.BatchNormalization()(y))
    z = layers.Dense(8, "silu")(layers.GlobalAveragePooling2D(keepdims=True)(y))
    y = layers.Conv2D(32, 1, use_bias=False)(y * layers.Dense(128, "sigmoid")(z))
    return x + layers.BatchNormalization()(y)


MODELS = {
    "two GPT blocks, 256 wide": (gpt, 2, (4, 128, 256)),
    "three residual blocks with batch normalization": (residual, 3, (8, 32, 32, 64)),
    "three ConvNeXt blocks": (convnext, 3, (2, 32, 32, 64)),
    "three EfficientNet blocks": (efficient, 3, (2, 32, 32, 32)),
}


class Pass:
    """A whole model as one stage."""

    def __init__(self, model: keras.Model, flops_per_byte: float, x: tf.Tensor) -> None:
        extracted = extract(model)
        (boundary,) = stage_boundaries(extracted.graph, [0] * len(extracted.calls), 1)
        prices = [flops_per_byte] * len(extracted.calls)
        self.stage, self._x = Stage(boundary, extracted.calls, prices), x

    def run(self) -> list[np.ndarray]:
        outputs, _ = self.stage.forward(0, [self._x])
        self.stage.backward(0, [tf.zeros([0]), *map(tf.ones_like, outputs)])
        sums = self.stage.module.accumulator
        gradients = [sums.gradient(i, {}) for i in range(len(sums.weights))]
        self.stage.clear()
        return [value.numpy() for value in (*outputs, *gradients)]

    def seconds(self) -> float:
        start = time.process_time()
        self.run()
        return time.process_time() - start


def compare(block, times: int, shape: tuple[int, ...]) -> list[str]:
    keras.utils.set_random_seed(1)
    x = inputs = keras.Input(shape[1:])
    for _ in range(times):
        x = block(x)
    model = keras.Model(inputs, x)
    before = [(v, v.numpy()) for v in model.non_trainable_variables]
    both = [Pass(model, worth, tf.random.normal(shape)) for worth in (0.0, FLOPS_PER_BYTE)]
    both[1]._x = both[0]._x
    found = []
    for one in both:
        for variable, value in before:
            variable.assign(value)
        found.append(one.run())
    for kept, again in zip(*found, strict=True):
        np.testing.assert_array_equal(kept, again)
    seconds = [[one.seconds() for one in both] for _ in range(TURNS)]
    every, least = map(statistics.median, zip(*seconds, strict=True))
    sizes = [f"{one.stage.residual_bytes / 2**20:.1f} MiB" for one in both]
    return [*sizes, f"{100 * (least / every - 1):+.1f} %"]


def main() -> None:
    tf.config.threading.set_intra_op_parallelism_threads(1)
    tf.config.threading.set_inter_op_parallelism_threads(1)
    table = Table("one stage", "all that gradients read", "the least", "step")
    with unoptimized("arithmetic_optimization"):
        for name, (block, times, shape) in MODELS.items():
            table.add_row(name, *compare(block, times, shape))
    Console(width=120).print(table)


if __name__ == "__main__":
    main()
