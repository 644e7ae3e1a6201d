"""Models of published tables, layer by layer as torchgpipe has them in sequence.

A layer's name begins with its place in the sequence, `l12_conv`, so that numbers of layers as in
torchgpipe's benchmarks (Apache-2.0) name the same stages. They are meant to be built with shapes
alone.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
from keras import layers

Tensor = Any


class _Sequence:
    """Names layers by their place; `layer` begins the next place, `part` adds to this one."""

    def __init__(self) -> None:
        self.place = -1
        self._parts = 0

    def layer(self, kind: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        self.place += 1
        self._parts = 0
        return kind(*arguments, name=f"l{self.place}", **options)

    def part(self, kind: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        self._parts += 1
        return kind(*arguments, name=f"l{self.place}_{self._parts}", **options)


def resnet101() -> keras.Model:
    """370 layers; a residual connection is one, with the convolution that may be on it."""
    row = _Sequence()
    x = inputs = keras.Input((224, 224, 3))
    x = row.layer(layers.Conv2D, 64, 7, 2, "same", use_bias=False)(x)
    x = _normalized(row, x)
    x = row.layer(layers.MaxPooling2D, 3, 2, "same")(x)
    for stage, (width, blocks) in enumerate(((64, 3), (128, 4), (256, 23), (512, 3))):
        for block in range(blocks):
            stride = 2 if stage and not block else 1
            x = _bottleneck(row, x, width, stride, project=not block)
    x = row.layer(layers.GlobalAveragePooling2D)(x)
    x = row.layer(layers.Flatten)(x)
    return keras.Model(inputs, row.layer(layers.Dense, 1000)(x), name="resnet101")


def _normalized(row: _Sequence, x: Tensor) -> Tensor:
    x = row.layer(layers.BatchNormalization)(x)
    return row.layer(layers.ReLU)(x)


def _bottleneck(row: _Sequence, x: Tensor, width: int, stride: int, *, project: bool) -> Tensor:
    skip = x = row.layer(layers.Identity)(x)
    for size, kernel, step in ((width, 1, 1), (width, 3, stride)):
        x = row.layer(layers.Conv2D, size, kernel, step, "same", use_bias=False)(x)
        x = _normalized(row, x)
    x = row.layer(layers.Conv2D, 4 * width, 1, use_bias=False)(x)
    x = row.layer(layers.BatchNormalization)(x)
    add = row.layer(layers.Add)
    if project:
        skip = row.part(layers.Conv2D, 4 * width, 1, stride, use_bias=False)(skip)
        skip = row.part(layers.BatchNormalization)(skip)
    return row.layer(layers.ReLU)(add([x, skip]))


def unet(convolutions: int, channels: int, depth: int = 5) -> keras.Model:
    """A simplified U-Net (B, C) for images of 3 x 192 x 192."""
    row = _Sequence()

    def cell(x: Tensor, width: int, out: int) -> Tensor:
        for last in [False] * (convolutions - 1) + [True]:
            size = out if last else width
            x = row.layer(layers.Conv2D, size, 3, padding="same", use_bias=False)(x)
            x = row.layer(layers.SpatialDropout2D, 0.1)(x)
            x = row.layer(layers.GroupNormalization, -1, center=False, scale=False)(x)
            x = row.layer(layers.LeakyReLU, 0.01)(x)
        return x

    x = inputs = keras.Input((192, 192, 3))
    skips = []
    for level in range(depth):
        x = cell(x, channels * 2**level, channels * 2**level)
        skips.append(x := row.layer(layers.Identity)(x))
        x = row.layer(layers.MaxPooling2D, 2)(x)
    x = cell(x, channels * 2**depth, channels * 2 ** (depth - 1))
    for level in reversed(range(depth)):
        x = row.layer(layers.UpSampling2D, 2)(x)
        x = row.layer(layers.Concatenate)([x, skips[level]])
        width = int(channels * 2 ** (level - 1))
        x = cell(x, width, width)
    x = row.layer(layers.Conv2D, 1, 1, use_bias=False)(x)
    return keras.Model(inputs, x, name=f"unet_{convolutions}_{channels}")


Operation = Callable[[_Sequence, Tensor, int, int], Tensor]
"""From a tensor, a number of channels and a stride to another tensor."""


def _convolved(
    row: _Sequence, x: Tensor, channels: int, kernel: Any = 1, stride: Any = 1
) -> Tensor:
    x = row.part(layers.ReLU)(x)
    x = row.part(layers.Conv2D, channels, kernel, stride, "same", use_bias=False)(x)
    return row.part(layers.BatchNormalization)(x)


def _reduced(row: _Sequence, x: Tensor, channels: int) -> Tensor:
    """Halves height and width by two convolutions, the second of the image moved by a pixel."""
    x = row.part(layers.ReLU)(x)
    moved = row.part(layers.ZeroPadding2D, ((0, 1), (0, 1)))(
        row.part(layers.Cropping2D, ((1, 0), (1, 0)))(x)
    )
    halves = [
        row.part(layers.Conv2D, channels // 2, 1, 2, use_bias=False)(image) for image in (x, moved)
    ]
    return row.part(layers.BatchNormalization)(row.part(layers.Concatenate)(halves))


def _nothing(row: _Sequence, x: Tensor, channels: int, stride: int) -> Tensor:
    return x if stride == 1 else _reduced(row, x, channels)


def _average(row: _Sequence, x: Tensor, channels: int, stride: int) -> Tensor:
    return row.part(layers.AveragePooling2D, 3, stride, "same")(x)


def _largest(row: _Sequence, x: Tensor, channels: int, stride: int) -> Tensor:
    return row.part(layers.MaxPooling2D, 2, stride)(x)


def _one(row: _Sequence, x: Tensor, channels: int, stride: int) -> Tensor:
    return _convolved(row, x, channels, 1, stride)


def _three(row: _Sequence, x: Tensor, channels: int, stride: int) -> Tensor:
    x = _convolved(row, x, channels // 4)
    x = _convolved(row, x, channels // 4, 3, stride)
    return _convolved(row, x, channels)


def _seven(row: _Sequence, x: Tensor, channels: int, stride: int) -> Tensor:
    x = _convolved(row, x, channels // 4)
    x = _convolved(row, x, channels // 4, (1, 7), (1, stride))
    x = _convolved(row, x, channels // 4, (7, 1), (stride, 1))
    return _convolved(row, x, channels)


NORMAL: tuple[tuple[int, Operation], ...] = (
    *((1, _one), (1, _average), (1, _nothing), (0, _seven), (0, _one)),
    *((0, _seven), (2, _average), (2, _nothing), (1, _average), (5, _one)),
)
REDUCTION: tuple[tuple[int, Operation], ...] = (
    *((0, _largest), (0, _average), (2, _nothing), (1, _three), (2, _seven)),
    *((2, _average), (3, _nothing), (1, _largest), (2, _average), (3, _one)),
)
"""States that operations read, in pairs that are added up, and the operations; torchgpipe's
`max_pool_3x3` averages."""


def amoebanet(depth: int, filters: int) -> keras.Model:
    """AmoebaNet-D (L, D) for images of 3 x 224 x 224: L + 6 layers, each a cell but three."""
    row = _Sequence()
    inputs = keras.Input((224, 224, 3))
    channels = filters // 4
    x = row.layer(layers.ReLU)(inputs)
    x = row.part(layers.Conv2D, channels, 3, 2, "same", use_bias=False)(x)
    x = before = row.part(layers.BatchNormalization)(x)
    reduced = False
    normal = [False] * (depth // 3)
    for reduction in (True, True, *normal, True, *normal, True, *normal):
        channels *= 1 + reduction
        x, before = _cell(row, x, before, channels, reduction, reduced), x
        reduced = reduction
    x = row.layer(layers.AveragePooling2D, 7)(x)
    x = row.part(layers.Dense, 1000)(row.part(layers.Flatten)(x))
    return keras.Model(inputs, x, name=f"amoebanet_{depth}_{filters}")


def _cell(
    row: _Sequence, x: Tensor, before: Tensor, channels: int, reduction: bool, reduced: bool
) -> Tensor:
    relu = row.layer(layers.ReLU)(x)
    first = row.part(layers.Conv2D, channels, 1, use_bias=False)(relu)
    states = [row.part(layers.BatchNormalization)(first), before]
    if reduced:
        states[1] = _reduced(row, before, channels)
    elif before.shape[-1] != channels:
        states[1] = _convolved(row, before, channels)
    operations = REDUCTION if reduction else NORMAL
    for pair in zip(operations[::2], operations[1::2], strict=True):
        terms = [
            operation(row, states[source], channels, 2 if reduction and source < 2 else 1)
            for source, operation in pair
        ]
        states.append(row.part(layers.Add)(terms))
    kept = (4, 5, 6) if reduction else (0, 3, 4, 6)
    return row.part(layers.Concatenate)([states[i] for i in kept])
