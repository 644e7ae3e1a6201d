"""Layers that are cut by columns into several, for stages of their own, and variables in parts.

    logits = head(x)   ->   head/1of3(x) --.           kernel of the user's layer (512, 900)
                            head/2of3(x) ---+-- joined   value: put together, if all can be read
                            head/3of3(x) --'             assign: each part takes its (512, 300)

No sum runs over columns, so each number is computed as before. Vocabulary parallelism
(Yeung et al., 2024, arXiv:2411.05288) cuts a head in this way, and its loss besides.
"""

from __future__ import annotations

import itertools
import math
import re
import weakref
from collections.abc import Iterable, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from keras.src.backend.common.stateless_scope import in_stateless_scope

from tarantella_pp.errors import ConfigurationError
from tarantella_pp.internals.state import (
    drop_value,
    initializer_of,
    name_by_path,
    needs_only_shapes,
    variables_without_values,
)

# What a layer's configuration calls its columns.
_COLUMNS: dict[type, str] = {keras.layers.Dense: "units", keras.layers.Embedding: "output_dim"}
# Parts that a stage's share of the work has, so that stages can be even.
PARTS_PER_SHARE = 4
# Bytes of weights below which the messages between parts are not worth it.
LEAST_BYTES = 1 << 20


class Columns:
    """Some columns of what a variable begins with."""

    def __init__(self, whole: Any, begin: int, end: int) -> None:
        self.whole, self.begin, self.end = whole, begin, end

    def __call__(self, shape: Any, dtype: Any = None) -> Any:
        """Draws all of it, so that its bits are what they are in one process."""
        drawn = initializer_of(self.whole)(tuple(self.whole.shape), dtype=dtype)
        return self.of(drawn)

    def of(self, value: Any) -> Any:
        """Takes them from a value of the whole."""
        return value[..., self.begin : self.end]

    def key(self, number: int) -> str:
        """What files call them, given the number of the whole."""
        return f"{number}/{self.begin}:{self.end}"


def columns_of(variable: Any) -> Columns | None:
    """Which columns a variable is; `None` for a whole one."""
    return getattr(variable, "_columns", None)


def whole_of(variable: Any) -> Any:
    """The variable of the user's model that another one is a part of, or is."""
    columns = columns_of(variable)
    return variable if columns is None else columns.whole


def wholes(variables: Iterable[Any]) -> list[Any]:
    """The variables of the user's model that some are, or are parts of; each once."""
    return list({id(whole): whole for whole in map(whole_of, variables)}.values())


def parts_of(variable: Any) -> tuple[Any, ...]:
    """The variables that hold its value: its parts, or itself."""
    return variable._parts if isinstance(variable, _Parted) else (variable,)


def in_parts(variables: Iterable[Any]) -> list[Any]:
    """All variables that hold the values of some."""
    return [part for variable in variables for part in parts_of(variable)]


def keys_of(variables: Iterable[Any]) -> list[str]:
    """What files call variables: the numbers that the user's model gives them, and columns."""
    keys: list[str] = []
    numbers: dict[int, int] = {}
    for variable in variables:
        number = numbers.setdefault(id(whole_of(variable)), len(numbers))
        columns = columns_of(variable)
        keys.append(columns.key(number) if columns else str(number))
    return keys


def columns_in(value: Any, columns: str) -> Any:
    """Takes from a value the columns that the end of a key says; all if it says none."""
    begin, end = (int(text) for text in columns.split(":")) if columns else (None, None)
    return value[..., begin:end] if columns else value


def part_variable(whole: Any, parts: Sequence[Any]) -> None:
    """Lets parts hold the value of a variable from now on, whose own is given back."""
    plain = next(kind for kind in type(whole).__mro__ if kind.__module__.startswith("keras."))
    if plain not in _KINDS:
        _KINDS[plain] = type(plain.__name__, (_Parted, plain), {})
    whole._parts = tuple(parts)
    whole.__class__ = _KINDS[plain]
    whole.trainable = whole._trainable
    if whole._value is not None:
        drop_value(whole)


class _Parted(keras.Variable):  # type: ignore[misc]
    """A variable whose value is in parts."""

    _parts: tuple[Any, ...] = ()

    @property
    def value(self) -> Any:
        """The value, put together for whoever asks."""
        if in_stateless_scope():  # which may have another one
            return super().value
        value = tf.concat([part.value for part in self._parts], -1)
        value._unique_id = getattr(self._value, "_unique_id", self.path)  # for optimizers
        return value

    @property
    def handle(self) -> Any:
        """Refuses: gradients would reach none of the parts."""
        raise ConfigurationError(
            f"Stages have weight '{self.path}' in parts, which the model by itself cannot train. "
            "Train the PipelineModel, or a model that was loaded from what it saves."
        )

    def assign(self, value: Any) -> Any:
        """Gives each part its columns."""
        if needs_only_shapes() or tuple(np.shape(value)) != tuple(self.shape):
            return super().assign(value)  # which takes note of it, or names what does not fit
        for part in self._parts:
            part.assign(part._columns.of(value))
        return value

    @property
    def trainable(self) -> bool:
        """Whether training changes it."""
        return bool(self._trainable)

    @trainable.setter
    def trainable(self, value: bool) -> None:
        self._trainable = bool(value)
        for part in self._parts:
            part.trainable = value


_KINDS: dict[type, type] = {}  # the class of variables in parts of each class of variables


def can_be_cut(layer: Any, arguments: Any) -> bool:
    """Whether a call can be cut by columns: plain, of one tensor, of weights that are free."""
    name, given = _COLUMNS.get(type(layer)), (arguments.args, arguments.kwargs)
    return (
        name is not None
        and layer.built
        and len(keras.tree.flatten(given)) == len(arguments.args) == 1
        and layer.activity_regularizer is None
        and layer.quantization_mode is None
        and not layer.lora_enabled
        and layer._remat_mode is None
        and not layer._layers  # an activation with weights, say
        and bytes_of(layer) >= LEAST_BYTES
        and all(_is_free(variable) for variable in layer.variables)
    )


def bytes_of(layer: Any) -> int:
    """The bytes of a layer's weights."""
    return sum(math.prod(v.shape) * tf.as_dtype(v.dtype).size for v in layer.variables)


def _is_free(variable: Any) -> bool:
    """Whether a weight may be in parts: no pipeline trains it whole, each number is by itself."""
    trained_whole = hasattr(variable, "_used_here") or getattr(variable, "_clocks", None)
    return not trained_whole and variable.regularizer is None and variable.constraint is None


def number_of_parts(layer: Any, share: float) -> int:
    """How many parts a layer is cut into that makes up more than a stage's share of a model."""
    columns: int = getattr(layer, _COLUMNS[type(layer)])
    return min(math.ceil(share * PARTS_PER_SHARE), columns)


def parts_named(names: Iterable[str], path: str) -> int:
    """How many parts a plan with some names of nodes cuts a layer into; 1 for none."""
    found = (re.fullmatch(re.escape(path) + r"/1of(\d+)", name) for name in names)
    return next((int(match[1]) for match in found if match), 1)


def cut(layer: Any, given: Any, parts: int) -> Any:
    """A Functional that computes what a layer does, in as many parts; the same one each time."""
    known = _CUT.setdefault(layer, {})
    if parts not in known:
        known[parts] = _network(layer, given, parts)
    return known[parts]


_CUT: weakref.WeakKeyDictionary[Any, dict[int, Any]] = weakref.WeakKeyDictionary()


def _network(layer: Any, given: Any, parts: int) -> Any:
    columns, config = _COLUMNS[type(layer)], layer.get_config()
    ends = [config[columns] * i // parts for i in range(parts + 1)]
    simple = {name: "zeros" for name in config if name.endswith("_initializer")}
    simple |= {"activation": "linear"} if "activation" in config else {}
    made: list[Any] = []
    inputs = keras.Input(batch_shape=given.shape, dtype=given.dtype, name="given")
    outputs = []
    with variables_without_values(made):
        for i, (begin, end) in enumerate(itertools.pairwise(ends), 1):
            own = {**config, **simple, columns: end - begin, "name": f"{i}of{parts}"}
            part = type(layer).from_config(own)
            outputs.append(part(inputs))
            for whole, variable in zip(layer.variables, part.variables, strict=True):
                variable._initializer = variable._columns = Columns(whole, begin, end)
                variable.trainable = whole.trainable
                name_by_path(variable, whole.path)  # by which optimizers know it
        joined = keras.layers.Concatenate(name="joined")(outputs)
        if config.get("activation", "linear") != "linear":
            joined = keras.layers.Activation(layer.activation, name="activation")(joined)
        return keras.Model(inputs, joined, name=layer.name)
