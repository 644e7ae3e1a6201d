"""Models as large as people train them, of any width and depth; `BUILDERS` names the usual ones."""

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


def unbalanced() -> keras.Model:
    """A first layer that no cut can balance: 60 % of the work in one operation."""
    inputs = keras.Input((2048,))
    x = layers.Dense(3072, activation="relu")(inputs)
    for width in (1024, 512, 512):
        x = layers.Dense(width, activation="relu")(x)
    return keras.Model(inputs, layers.Dense(10)(x), name="unbalanced")


def square_layers(units: int, depth: int) -> keras.Model:
    """Weights of a size that is easy to count: `depth` matrices of `units` x `units`."""
    x = inputs = keras.Input((units,))
    for _ in range(depth):
        x = layers.Dense(units, activation="tanh", use_bias=False)(x)
    return keras.Model(inputs, x)


def cnn(filters: int = 64, blocks: int = 6) -> keras.Model:
    """Convolutions with skips, normalized."""
    inputs = keras.Input((32, 32, 3))
    x = layers.Conv2D(filters, 3, padding="same")(inputs)
    for _ in range(blocks):
        y = layers.ReLU()(layers.LayerNormalization()(x))
        x = layers.Add()([x, layers.Conv2D(filters, 3, padding="same")(y)])
    return keras.Model(inputs, layers.Dense(10)(layers.GlobalAveragePooling2D()(x)), name="cnn")


def plain_cnn(filters: int, depth: int) -> keras.Model:
    """Convolutions one after the other."""
    x = inputs = keras.Input((32, 32, 3))
    for _ in range(depth):
        x = layers.Conv2D(filters, 3, padding="same", activation="relu")(x)
    return keras.Model(inputs, layers.Dense(10)(layers.GlobalAveragePooling2D()(x)))


def resnet() -> keras.Model:
    """He et al., "Deep residual learning for image recognition": six bottleneck blocks."""
    x = inputs = keras.Input((64, 64, 3))
    x = layers.Conv2D(32, 3, padding="same")(x)
    for filters, strides in ((64, 1), (64, 1), (128, 2), (128, 1), (256, 2), (256, 1)):
        y = layers.BatchNormalization()(layers.Conv2D(filters // 2, 1, strides=strides)(x))
        y = layers.BatchNormalization()(layers.Conv2D(filters // 2, 3, padding="same")(y))
        y = layers.BatchNormalization()(layers.Conv2D(filters, 1)(layers.ReLU()(y)))
        x = layers.Conv2D(filters, 1, strides=strides)(x)
        x = layers.ReLU()(layers.Add()([x, y]))
    return keras.Model(inputs, layers.Dense(10)(layers.GlobalAveragePooling2D()(x)))


def unet(
    size: int, filters: Sequence[int], head: Callable[[keras.KerasTensor], keras.KerasTensor]
) -> keras.Model:
    """Ronneberger et al., "U-Net: convolutional networks for biomedical image segmentation"."""

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
    return keras.Model(inputs, head(x), name="UNet")


def lstm(vocabulary: int, length: int, units: int, depth: int) -> keras.Model:
    """Texts, read by recurrent layers."""
    ids = keras.Input((length,), dtype="int32")
    x = layers.Embedding(vocabulary, units)(ids)
    for _ in range(depth):
        x = layers.LSTM(units, return_sequences=True)(x)
    return keras.Model(ids, layers.Dense(10)(layers.GlobalAveragePooling1D()(x)))


def transformer(
    length: int = 128, width: int = 256, blocks: int = 4, heads: int = 4, dropout: float = 0.0
) -> keras.Model:
    """An encoder of vectors."""
    x = inputs = keras.Input((length, width))
    for _ in range(blocks):
        x = _attention_block(x, heads, dropout)
    outputs = layers.Dense(10)(layers.GlobalAveragePooling1D()(x))
    return keras.Model(inputs, outputs, name="transformer")


def gpt(
    vocabulary: int = 50257,
    length: int = 1024,
    width: int = 768,
    blocks: int = 12,
    heads: int = 12,
    dropout: float = 0.1,
    tied: bool = False,
) -> keras.Model:
    """A decoder stack, by default of GPT-2's smallest size; its head may have the first weights."""
    ids = keras.Input((length,), dtype="int32")
    table = (layers.ReversibleEmbedding if tied else layers.Embedding)(vocabulary, width)
    x = table(ids)
    for _ in range(blocks):
        x = _attention_block(x, heads, dropout, use_causal_mask=True)
    x = layers.LayerNormalization()(x)
    x = table(x, reverse=True) if tied else layers.Dense(vocabulary)(x)
    return keras.Model(ids, x, name="GPT")


def _attention_block(
    x: keras.KerasTensor, heads: int, dropout: float, **options: bool
) -> keras.KerasTensor:
    """Attention and two wide layers, each normalized before and added to what came in."""
    width = x.shape[-1]
    y = layers.LayerNormalization()(x)
    y = layers.MultiHeadAttention(heads, width // heads, dropout=dropout)(y, y, **options)
    x = layers.Add()([x, y])
    y = layers.Dense(4 * width, activation="gelu")(layers.LayerNormalization()(x))
    y = layers.Dense(width)(y)
    return layers.Add()([x, layers.Dropout(dropout)(y) if dropout else y])


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
