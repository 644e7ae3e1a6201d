"""The models that several benchmarks train: name -> (model builder, data builder)."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import keras
import numpy as np
from keras import layers

Data = tuple[np.ndarray, np.ndarray]


def mlp(width: int = 1024, depth: int = 8) -> keras.Model:
    x = inputs = keras.Input((width,))
    for _ in range(depth):
        x = layers.Dense(width, activation="relu")(x)
    return keras.Model(inputs, layers.Dense(10)(x), name="mlp")


def cnn(filters: int = 64, blocks: int = 6) -> keras.Model:
    inputs = keras.Input((32, 32, 3))
    x = layers.Conv2D(filters, 3, padding="same")(inputs)
    for _ in range(blocks):
        y = layers.ReLU()(layers.LayerNormalization()(x))
        x = layers.Add()([x, layers.Conv2D(filters, 3, padding="same")(y)])
    return keras.Model(inputs, layers.Dense(10)(layers.GlobalAveragePooling2D()(x)), name="cnn")


def transformer(width: int = 256, blocks: int = 4) -> keras.Model:
    x = inputs = keras.Input((128, width))
    for _ in range(blocks):
        y = layers.LayerNormalization()(x)
        x = layers.Add()([x, layers.MultiHeadAttention(4, width // 4)(y, y)])
        y = layers.Dense(4 * width, activation="gelu")(layers.LayerNormalization()(x))
        x = layers.Add()([x, layers.Dense(width)(y)])
    outputs = layers.Dense(10)(layers.GlobalAveragePooling1D()(x))
    return keras.Model(inputs, outputs, name="transformer")


def unet(size: int, filters: Sequence[int]) -> tuple[keras.KerasTensor, keras.KerasTensor]:
    """Ronneberger et al., "U-Net: convolutional networks for biomedical image segmentation".

    Args:
        size: Height and width of the images.
        filters: Of each level, the lowest last.

    Returns:
        The inputs, and the features of each pixel that a head goes on from.
    """

    def block(x: keras.KerasTensor, width: int) -> keras.KerasTensor:
        for _ in range(2):
            x = layers.Conv2D(width, 3, padding="same", activation="relu")(x)
        return x

    x = inputs = keras.Input((size, size, 3))
    skips = []
    for width in filters[:-1]:
        x = block(x, width)
        skips.append(x)
        x = layers.MaxPooling2D()(x)
    x = block(x, filters[-1])
    for width, skip in zip(filters[-2::-1], reversed(skips), strict=True):
        x = layers.Conv2DTranspose(width, 2, strides=2)(x)
        x = block(layers.Concatenate()([skip, x]), width)
    return inputs, x


def unbalanced() -> keras.Model:
    """A first layer that no cut can balance: 60 % of the work in one operation."""
    inputs = keras.Input((2048,))
    x = layers.Dense(3072, activation="relu")(inputs)
    for width in (1024, 512, 512):
        x = layers.Dense(width, activation="relu")(x)
    return keras.Model(inputs, layers.Dense(10)(x), name="unbalanced")


ROWS = {"mlp": 64, "cnn": 8, "transformer": 4, "unbalanced": 64}
BUILDERS: dict[str, Callable[[], keras.Model]] = {
    "mlp": mlp,
    "cnn": cnn,
    "transformer": transformer,
    "unbalanced": unbalanced,
}


def data_for(name: str, rows: int) -> Data:
    """Random inputs and labels."""
    rng = np.random.default_rng(0)
    shape = BUILDERS[name]().input_shape[1:]
    return rng.normal(size=(rows, *shape)).astype("float32"), rng.integers(0, 10, rows)
