"""All layers of Keras, each in a small model between two dense layers."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase as fnmatch
from typing import Any

import keras
import numpy as np
from keras import layers, ops

from tests.exactness.classes import arguments_of, classes_in
from tests.exactness.trials import EVENLY, ROUNDING, Trial, models_together, predicting
from tests.helpers.draws import more_asked_for
from tests.helpers.training import SAMPLES, Case, floats, integers, sgd

NOT_BUILT = {
    "FlaxLayer": "needs Flax",
    "InputLayer": "is in every model",
    "InputSpec": "is no layer",
    "JaxLayer": "needs JAX",
    "Layer": "the base class of all layers",
    "TFSMLayer": "needs a SavedModel",
    "TorchModuleWrapper": "needs PyTorch",
    "Wrapper": "the base class of wrappers",
}
NOT_TRIED = NOT_BUILT | {
    "AugMix": "draws with Python's `random` when it is traced, which is refused; takes minutes",
    "Equalization": "Keras itself makes no model with it",
    "RandAugment": "Keras itself cannot train with it in float64",
    "RandomRotation": "Keras itself cannot train with it in float64",
}

Shape = tuple[int, ...]
IMAGE, SEQUENCE, VOLUME, FILM, VECTOR = (6, 6, 3), (5, 3), (4, 4, 4, 2), (2, 3, 3, 3, 2), (6,)
# What a layer is tried with, the first that it takes.
USUAL = {"1D": SEQUENCE, "2D": IMAGE, "3D": VOLUME}
INPUTS = [[s] for s in (IMAGE, SEQUENCE, VOLUME, FILM, VECTOR)] + [[SEQUENCE] * 2, [VECTOR] * 2]

ARGUMENTS: dict[str, Callable[[], Any]] = {
    "activation": lambda: "tanh",
    "axes": lambda: 1,
    "cell": lambda: layers.LSTMCell(3),
    "cells": lambda: [layers.GRUCell(3), layers.LSTMCell(3)],
    "dims": lambda: (2, 1),
    "equation": lambda: "ab,bc->ac",
    "factor": lambda: 0.3,
    "filters": lambda: 2,
    "function": lambda: ops.tanh,
    "head_dim": lambda: 2,
    "height": lambda: 3,
    "height_factor": lambda: 0.3,
    "input_dim": lambda: 5,
    "kernel_size": lambda: 2,
    "key_dim": lambda: 3,
    "layer": lambda: layers.Dense(3),
    "layers": lambda: [layers.Dense(3), layers.Dropout(0.3)],
    "max_number": lambda: 3,
    "n": lambda: 2,
    "num_bins": lambda: 3,
    "num_heads": lambda: 2,
    "num_key_value_heads": lambda: 1,
    "num_query_heads": lambda: 2,
    "output_dim": lambda: 4,
    "output_shape": lambda: 3,
    "output_size": lambda: 2,
    "pool_size": lambda: 2,
    "rate": lambda: 0.3,
    "scale": lambda: 0.5,
    "stddev": lambda: 0.3,
    "target_shape": lambda: (2, 3),
    "units": lambda: 3,
    "width": lambda: 3,
    "width_factor": lambda: 0.3,
}
# What needs more than that, or a value of its own for a name that others have.
MADE: dict[str, Callable[[], layers.Layer]] = {
    "Bidirectional": lambda: layers.Bidirectional(layers.LSTM(2)),
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


class AddsLoss(layers.Layer):
    """Adds a loss of what passes it."""

    def __init__(self, formula: Callable[[Any], Any]):
        super().__init__()
        self.formula = formula

    def call(self, x):
        self.add_loss(self.formula(x))
        return x


VARIANTS: dict[str, Callable[[], layers.Layer]] = {
    "add_loss of a mean": lambda: AddsLoss(lambda x: ops.mean(ops.square(x))),
    "add_loss of a sum": lambda: AddsLoss(lambda x: 0.1 * ops.sum(ops.square(x))),
    "Attention(dropout)": lambda: layers.Attention(dropout=0.3),
    "BatchNormalization(synchronized)": lambda: layers.BatchNormalization(synchronized=True),
    "BatchNormalization(trainable=False)": lambda: layers.BatchNormalization(trainable=False),
    "Dense(activity_regularizer)": lambda: layers.Dense(3, activity_regularizer="l2"),
    "Dense(kernel_constraint)": lambda: layers.Dense(3, kernel_constraint="max_norm"),
    "Dense(kernel_regularizer)": lambda: layers.Dense(3, kernel_regularizer="l2"),
    "GRU(dropout)": lambda: layers.GRU(3, dropout=0.3, recurrent_dropout=0.3),
    "Lambda over all samples": lambda: layers.Lambda(lambda x: x - ops.mean(x, 0)),
    "LSTM(return_state)": lambda: layers.LSTM(3, return_sequences=True, return_state=True),
    "LSTM(unroll)": lambda: layers.LSTM(3, unroll=True),
    "MultiHeadAttention(dropout)": lambda: layers.MultiHeadAttention(2, 3, dropout=0.3),
}


def kinds() -> dict[str, Callable[[], layers.Layer]]:
    """All layers that Keras has, and some with other arguments than the default ones."""
    found = classes_in(layers, NOT_TRIED)
    return {name: MADE.get(name, functools.partial(make, found[name])) for name in found} | VARIANTS


def make(kind: type) -> layers.Layer:
    """Makes a layer; a cell is put into a recurrent layer."""
    layer = kind(**arguments_of(kind, ARGUMENTS))
    return layers.RNN(layer) if kind.__name__.endswith(("Cell", "Cells")) else layer


FORMS = (
    lambda layer, x: layer(x[0] if len(x) == 1 else x),
    lambda layer, x: layer(*x),
)


@dataclass(frozen=True)
class Middle:
    """How a layer is put into the middle of a model.

    Attributes:
        make: Makes the layer.
        shapes: Shapes of its inputs.
        dtype: Their type. Floats come from a dense layer, so that gradients flow through the
            layer; others are inputs of the model, which then has a branch beside the layer.
        policy: In which type the layer computes.
        form: Calls it.
    """

    make: Callable[[], layers.Layer]
    shapes: Sequence[Shape]
    dtype: str
    policy: str
    form: Callable[[layers.Layer, list[Any]], Any]

    def build(self) -> keras.Model:
        """Makes the model."""
        inputs = given = [keras.Input(shape, dtype=self.dtype) for shape in self.shapes]
        if self.dtype == "float64":
            given = [layers.Dense(x.shape[-1])(x) for x in inputs]
        results = keras.tree.flatten(self.form(self.layer(), given))
        parts = [layers.Flatten()(ops.cast(result, "float64")) for result in results]
        if self.dtype != "float64":
            inputs = [*inputs, keras.Input((4,))]
            parts.append(layers.Dense(4, activation="tanh")(inputs[-1]))
        x = layers.Concatenate()(parts) if len(parts) > 1 else parts[0]
        x = layers.Dense(4, activation="tanh")(x)
        return keras.Model(inputs, layers.Dense(2)(x))

    def layer(self) -> layers.Layer:
        """Makes the layer."""
        keras.config.set_dtype_policy(self.policy)
        try:
            return self.make()
        finally:
            keras.config.set_dtype_policy("float64")

    def check(self) -> None:
        """Raises an exception unless the layer takes symbols and numbers, and gives the same."""
        values = [ops.convert_to_tensor(v[:2]) for v in self.data()[: len(self.shapes)]]
        symbols = [keras.KerasTensor(value.shape, value.dtype) for value in values]
        found = [keras.tree.flatten(self.form(self.layer(), given)) for given in (symbols, values)]
        shapes = [[tuple(result.shape) for result in results] for results in found]
        if shapes[0] != shapes[1]:
            raise ValueError(f"Symbols give {shapes[0]}, numbers {shapes[1]}")

    def data(self) -> list[Any]:
        """Inputs for the model."""
        if self.dtype == "float64":
            return [floats(*shape, seed=i) for i, shape in enumerate(self.shapes)]
        values = [integers(5, *shape, seed=i) for i, shape in enumerate(self.shapes)]
        if self.dtype == "string":
            values = [np.array(list("abcab"))[v] for v in values]
        return [*values, floats(4)]


def ways_of(name: str) -> Iterator[tuple[Sequence[Shape], str, str]]:
    """Shapes, their dtype and the precision that a layer is tried with, in this order."""
    if name in NUMBERS:
        yield [(5,)], "int32", "float64"
    elif name == "HashedCrossing":
        yield [(1,), (1,)], "int32", "float64"
    elif name in STRINGS:
        yield [(1,)], "string", "float64"
    else:
        likely = USUAL.get(name[-2:])
        shapes_of = [[likely], *INPUTS] if likely else INPUTS
        for policy, shapes in itertools.product(("float64", "float32"), shapes_of):
            yield shapes, "float64", policy


def middle_of(name: str, make: Callable[[], layers.Layer]) -> Middle:
    """The first way in which Keras runs a layer."""
    errors: list[Exception] = []
    for way, form in itertools.product(ways_of(name), FORMS):
        middle = Middle(make, *way, form)
        try:
            middle.check()
        except Exception as error:
            errors.append(error)
        else:
            return middle
    raise ExceptionGroup(f"Keras cannot run {name}", errors)


ON_DEMAND = ("*1D", "*1DTranspose", "*3D", "*3DTranspose", "Random*")
USUALLY = ("RandomBrightness", "RandomCrop", "RandomErasing", "RandomFlip")
"""Of layers that differ in dimensions only, or in what they draw, the others are left out."""

Y = floats(2, seed=5)
WEIGHTS = {"sample_weight": np.random.default_rng(4).uniform(0.2, 2, size=SAMPLES)}


def trials() -> dict[str, Callable[[], Trial]]:
    """What makes the trial of each layer, which takes time; those `ON_DEMAND` only then."""
    return {
        name: functools.partial(trial, name, make)
        for name, make in kinds().items()
        if more_asked_for() or name in USUALLY or not any(fnmatch(name, p) for p in ON_DEMAND)
    }


def trial(name: str, make: Callable[[], layers.Layer]) -> Trial:
    """A layer in a model of its own."""
    middle = middle_of(name, make)
    case = Case(
        middle.build, middle.data(), Y, lambda: {"optimizer": sgd(), "loss": "mse"}, WEIGHTS
    )
    limit = ROUNDING if middle.policy == "float64" else 1e-5
    run = functools.partial(predicting, rows=EVENLY)
    return Trial(name, case, run, limit, family=limit, join=models_together)
