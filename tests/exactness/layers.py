"""All layers of Keras, each in a small model between two dense layers."""

import contextlib
import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase as fnmatch
from typing import Any, NamedTuple

import keras
import numpy as np
from keras import layers, ops

from tarantella_pp.runtime.comm.communicator import world
from tests.exactness import expected
from tests.exactness.trials import ROUNDING, Part, Trial, arguments_of, classes_in, steps, training
from tests.helpers.draws import more_asked_for
from tests.helpers.training import WEIGHTED, Case, floats, integers, sgd
from tests.zoo.models import AddsLoss

NOT_TRIED = {
    "AugMix": "draws with Python's `random` when it is traced, which is refused; takes minutes",
    "Equalization": "Keras itself makes no model with it",
    "FlaxLayer": "needs Flax",
    "InputLayer": "is in every model",
    "InputSpec": "is no layer",
    "JaxLayer": "needs JAX",
    "Layer": "the base class of all layers",
    "RandAugment": "Keras itself cannot train with it in float64",
    "RandomRotation": "Keras itself cannot train with it in float64",
    "TFSMLayer": "needs a SavedModel",
    "TorchModuleWrapper": "needs PyTorch",
    "Wrapper": "the base class of wrappers",
}
Shape = tuple[int, ...]
IMAGE, SEQUENCE, VOLUME, FILM, VECTOR = (6, 6, 3), (5, 3), (4, 4, 4, 2), (2, 3, 3, 3, 2), (6,)
# What a layer is tried with, the first that it takes.
USUAL = {"1D": SEQUENCE, "2D": IMAGE, "3D": VOLUME}
INPUTS = [[s] for s in (IMAGE, SEQUENCE, VOLUME, FILM, VECTOR)] + [[SEQUENCE] * 2, [VECTOR] * 2]

ARGUMENTS: dict[str, Callable[[], Any]] = {
    **dict.fromkeys(("factor", "height_factor", "rate", "stddev", "width_factor"), lambda: 0.3),
    **dict.fromkeys(("axes", "num_key_value_heads"), lambda: 1),
    **dict.fromkeys(("filters", "head_dim", "kernel_size", "n", "num_heads"), lambda: 2),
    **dict.fromkeys(("num_query_heads", "output_size", "pool_size"), lambda: 2),
    **dict.fromkeys(("height", "key_dim", "max_number", "num_bins"), lambda: 3),
    **dict.fromkeys(("output_shape", "units", "width"), lambda: 3),
    "activation": lambda: "tanh",
    "cell": lambda: layers.SimpleRNNCell(3),
    "cells": lambda: [layers.SimpleRNNCell(3), layers.SimpleRNNCell(2)],
    "dims": lambda: (2, 1),
    "equation": lambda: "ab,bc->ac",
    "function": lambda: ops.tanh,
    "input_dim": lambda: 5,
    "layer": lambda: layers.Dense(3),
    "layers": lambda: [layers.Dense(3), layers.Dropout(0.3)],
    "output_dim": lambda: 4,
    "scale": lambda: 0.5,
    "target_shape": lambda: (2, 3),
}
# What needs more than that, or a value of its own for a name that others have.
MADE: dict[str, Callable[[], layers.Layer]] = {
    "Bidirectional": lambda: layers.Bidirectional(layers.SimpleRNN(2)),
    "CategoryEncoding": lambda: layers.CategoryEncoding(num_tokens=5),
    "Discretization": lambda: layers.Discretization([-0.5, 0.5]),
    "GroupNormalization": lambda: layers.GroupNormalization(groups=1),
    "IntegerLookup": lambda: layers.IntegerLookup(vocabulary=[1, 2, 3]),
    "MelSpectrogram": lambda: layers.MelSpectrogram(4, sequence_stride=2, num_mel_bins=2),
    "Normalization": lambda: layers.Normalization(mean=0.1, variance=2.0),
    "RandomCrop": lambda: layers.RandomCrop(6, 6),  # others have no fixed shape in evaluation
    "RandomPosterization": lambda: layers.RandomPosterization(4),
    "STFTSpectrogram": lambda: layers.STFTSpectrogram(frame_length=4, expand_dims=True),
    "StringLookup": lambda: layers.StringLookup(vocabulary=["a", "b"]),
    "TextVectorization": lambda: layers.TextVectorization(
        vocabulary=["a", "b"], output_sequence_length=2
    ),
}
NUMBERS = ("CategoryEncoding", "Embedding", "Hashing", "IntegerLookup", "ReversibleEmbedding")
STRINGS = ("StringLookup", "TextVectorization")
IN_FLOAT32 = ("*Pooling3D", "MelSpectrogram")
"""What TensorFlow has no other kernels for."""


VARIANTS: dict[str, Callable[[], layers.Layer]] = {
    "add_loss of a mean": lambda: AddsLoss(lambda x: ops.mean(ops.square(x))),
    "add_loss of a sum": lambda: AddsLoss(lambda x: 0.1 * ops.sum(ops.square(x))),
    "Attention(dropout)": lambda: layers.Attention(dropout=0.3),
    "BatchNormalization(synchronized)": lambda: layers.BatchNormalization(synchronized=True),
    "BatchNormalization(trainable=False)": lambda: layers.BatchNormalization(trainable=False),
    "Dense(activity_regularizer)": lambda: layers.Dense(3, activity_regularizer="l2"),
    "Dense(kernel_constraint)": lambda: layers.Dense(3, kernel_constraint="max_norm"),
    "Dense(kernel_regularizer)": lambda: layers.Dense(3, kernel_regularizer="l2"),
    "Lambda over all samples": lambda: layers.Lambda(lambda x: x - ops.mean(x, 0)),
    "MultiHeadAttention(dropout)": lambda: layers.MultiHeadAttention(2, 3, dropout=0.3),
    "SimpleRNN(dropout)": lambda: layers.SimpleRNN(3, dropout=0.3, recurrent_dropout=0.3),
    "SimpleRNN(return_state)": lambda: layers.SimpleRNN(
        3, return_sequences=True, return_state=True
    ),
    "SimpleRNN(unroll)": lambda: layers.SimpleRNN(3, unroll=True),
}


def kinds() -> dict[str, Callable[[], layers.Layer]]:
    """All layers that Keras has, and some with other arguments than the default ones."""
    found = classes_in(layers, NOT_TRIED)
    return {name: MADE.get(name, functools.partial(make, found[name])) for name in found} | VARIANTS


def make(kind: type) -> layers.Layer:
    layer = kind(**arguments_of(kind, ARGUMENTS))
    return layers.RNN(layer) if kind.__name__.endswith(("Cell", "Cells")) else layer


FORMS = (lambda layer, x: layer(x[0] if len(x) == 1 else x), lambda layer, x: layer(*x))


class Source(NamedTuple):
    """An input of a model; floats pass a dense layer, so that gradients flow through others."""

    shape: Shape
    dtype: str
    seed: int

    def data(self) -> Any:
        if self.dtype == "float64":
            return floats(*self.shape, seed=self.seed)
        values = integers(5, *self.shape, seed=self.seed)
        return np.array(list("abcab"))[values] if self.dtype == "string" else values


BESIDE = Source((4,), "float64", 9)
"""Of a branch that is trained in front of layers which take no gradients."""


@dataclass(frozen=True)
class Middle:
    """How a layer is put into the middle of a model: made, given its inputs, and called."""

    make: Callable[[], layers.Layer]
    sources: Sequence[Source]
    policy: str
    form: Callable[[layers.Layer, list[Any]], Any]

    def results(self, given: list[Any]) -> list[Any]:
        keras.config.set_dtype_policy(self.policy)
        try:
            layer = self.make()
        finally:
            keras.config.set_dtype_policy("float64")
        return keras.tree.flatten(self.form(layer, given))

    def check(self) -> None:
        """Raises an exception unless the layer takes symbols and numbers, and gives the same."""
        values = [ops.convert_to_tensor(source.data()[:2]) for source in self.sources]
        symbols = [keras.KerasTensor(value.shape, value.dtype) for value in values]
        shapes = [[tuple(r.shape) for r in self.results(given)] for given in (symbols, values)]
        if shapes[0] != shapes[1]:
            raise ValueError(f"Symbols give {shapes[0]}, numbers {shapes[1]}")


def sources_of(middles: Sequence[Middle]) -> list[Source]:
    return list(dict.fromkeys([s for middle in middles for s in middle.sources] + [BESIDE]))


def model_of(middles: Sequence[Middle]) -> keras.Model:
    inputs = {
        source: keras.Input(source.shape, dtype=source.dtype) for source in sources_of(middles)
    }
    given = {
        source: layers.Dense(x.shape[-1])(x) if source.dtype == "float64" else x
        for source, x in inputs.items()
    }
    results = [r for middle in middles for r in middle.results([given[s] for s in middle.sources])]
    parts = [layers.Flatten()(ops.cast(result, "float64")) for result in results]
    x = layers.Concatenate()([*parts, given[BESIDE]])
    # Pixels are large; tanh would be flat there, and gradients nothing but rounding.
    x = layers.Dense(4, activation="softsign")(x)
    return keras.Model(list(inputs.values()), layers.Dense(2)(x))


def ways_of(name: str) -> Iterator[list[Source]]:
    """What a layer is tried with, in this order."""
    dtype, shapes = "float64", INPUTS
    if name in NUMBERS:
        dtype, shapes = "int32", [[(5,)]]
    elif name == "HashedCrossing":
        dtype, shapes = "int32", [[(1,), (1,)]]
    elif name in STRINGS:
        dtype, shapes = "string", [[(1,)]]
    elif name[-2:] in USUAL:
        shapes = [[USUAL[name[-2:]]], *INPUTS]
    for some in shapes:
        yield [Source(shape, dtype, seed) for seed, shape in enumerate(some)]


def policy_of(name: str) -> str:
    return "float32" if any(fnmatch(name, pattern) for pattern in IN_FLOAT32) else "float64"


def middles_of(part: Part) -> list[Middle]:
    ways = itertools.product(ways_of(part.name), FORMS)
    return [Middle(part.value, sources, policy_of(part.name), form) for sources, form in ways]


def first_that_runs(middles: Sequence[Middle]) -> int:
    """The place of the first way in which Keras runs a layer."""
    for place, middle in enumerate(middles):
        with contextlib.suppress(Exception):
            middle.check()
            return place
    raise ValueError(f"Keras cannot run any of {middles}")


ON_DEMAND = ("*1D", "*1DTranspose", "*3D", "*3DTranspose", "*Cell", "Random*")
USUALLY = ("RandomBrightness", "RandomCrop")
"""Of layers that differ in dimensions only, or in what they draw, the others are left out; RNN,
GRU and SimpleRNN run the cells."""

Y = floats(2, seed=5)


def parts() -> list[Part]:
    """Each layer; those `ON_DEMAND` only then."""
    return [
        Part(name, make, policy_of(name))
        for name, make in kinds().items()
        if more_asked_for() or name in USUALLY or not any(fnmatch(name, p) for p in ON_DEMAND)
    ]


def trial(parts: Sequence[Part]) -> Trial:
    """Layers in one model. What draws random numbers in training must not do so later."""
    ways, ranks = [middles_of(part) for part in parts], world()  # each looks for those of some
    found = ranks.allgather_json([first_that_runs(w) for w in ways[ranks.rank :: ranks.size]])
    middles = [way[found[i % ranks.size][i // ranks.size]] for i, way in enumerate(ways)]
    data = [source.data() for source in sources_of(middles)]
    build = functools.partial(model_of, middles)
    case = Case(build, data, Y, lambda: {"optimizer": sgd(), "loss": "mse"}, WEIGHTED)
    limit = ROUNDING if middles[0].policy == "float64" else 1e-5
    random = expected.outcome("layers", parts[0].name) == expected.BY_MICRO_BATCH
    return Trial(case, steps if random else training, limit, not random, in_parts=training)
