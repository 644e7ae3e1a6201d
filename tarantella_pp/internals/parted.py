"""Layers that are cut by columns into several, for stages of their own, and variables in parts.

    logits = head(x)   ->   head/1of3(x) --.           kernel of the user's layer (512, 900)
                            head/2of3(x) ---+-- joined   value: put together, if all can be read
                            head/3of3(x) --'             assign: each part takes its (512, 300)

No sum runs over columns, so each number is computed as before. Vocabulary parallelism
(Yeung et al., 2024, arXiv:2411.05288) cuts a head in this way, and its loss besides. A table whose
rows are also such columns, of the head that goes back to words, is cut by rows: a part looks up its
own words and gives zeros for others, which are added up.
"""

from __future__ import annotations

import itertools
import math
import re
import weakref
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from keras.src.backend.common.stateless_scope import in_stateless_scope

from tarantella_pp.errors import ConfigurationError
from tarantella_pp.internals import state
from tarantella_pp.internals.functional import set_mask

# What a layer's configuration calls what it is cut along.
_COLUMNS: dict[type, str] = {
    keras.layers.Dense: "units",
    keras.layers.Embedding: "output_dim",
    keras.layers.ReversibleEmbedding: "input_dim",
}
# Parts that a stage's share of the work has, so that stages can be even.
PARTS_PER_SHARE = 4
# Bytes of weights below which the messages between parts are not worth it.
LEAST_BYTES = 1 << 20


class Columns:
    """Some columns of what a variable begins with, or rows where that is the axis."""

    def __init__(self, whole: Any, begin: int, end: int, axis: int = -1) -> None:
        self.whole, self.begin, self.end, self.axis = whole, begin, end, axis

    def __call__(self, shape: Any, dtype: Any = None) -> Any:
        """Draws all of it, so that its bits are what they are in one process."""
        drawn = state.initializer_of(self.whole)(tuple(self.whole.shape), dtype=dtype)
        return self.of(drawn)

    def of(self, value: Any) -> Any:
        """Takes them from a value of the whole."""
        own = slice(self.begin, self.end)
        return value[..., own] if self.axis else value[own]

    def key(self, number: int) -> str:
        """What files call them, given the number of the whole."""
        return f"{number}/{'' if self.axis else _ROWS}{self.begin}:{self.end}"

    @classmethod
    def named(cls, text: str) -> Columns:
        """Those that the end of a key says."""
        begin, end = (int(number) for number in text.removeprefix(_ROWS).split(":"))
        return cls(None, begin, end, 0 if text.startswith(_ROWS) else -1)


_ROWS = "rows "  # in keys


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
    return Columns.named(columns).of(value) if columns else value


def put_together(values: Mapping[str, np.ndarray[Any, Any]]) -> np.ndarray[Any, Any]:
    """Makes a whole of columns that the ends of keys say, which say none of a whole."""
    if "" in values:
        return values[""]
    parts = {text: Columns.named(text) for text in values}
    ordered = sorted(values, key=lambda text: parts[text].begin)
    return np.concatenate([values[text] for text in ordered], parts[ordered[0]].axis)


def part_variable(whole: Any, parts: Sequence[Any]) -> None:
    """Lets parts hold the value of a variable from now on, whose own is given back."""
    plain = next(kind for kind in type(whole).__mro__ if kind.__module__.startswith("keras."))
    whole._parts = tuple(parts)
    state.become(whole, _Parted, plain)
    whole.trainable = whole._trainable
    if whole._value is not None:
        state.drop_value(whole)


class _Parted(keras.Variable):  # type: ignore[misc]
    """A variable whose value is in parts."""

    _parts: tuple[Any, ...] = ()

    @property
    def value(self) -> Any:
        """The value, put together for whoever asks."""
        if in_stateless_scope():  # which may have another one
            return super().value
        axis = self._parts[0]._columns.axis
        value = tf.concat([part.value for part in self._parts], axis)
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
        if state.needs_only_shapes() or tuple(np.shape(value)) != tuple(self.shape):
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


def _kind_of(layer: Any) -> Any:
    """The kind of layers that can be cut, which a layer is, perhaps under another name."""
    kind, *others = type(layer).__mro__
    while kind not in _COLUMNS and not any(map(callable, vars(kind).values())):
        kind, *others = others
    return kind if kind in _COLUMNS else None


def goes_back(arguments: Any) -> bool:
    """Whether a call goes from numbers to words, not from words to numbers."""
    return bool(arguments.kwargs == {"reverse": True})


def can_be_cut(layer: Any, arguments: Any) -> bool:
    """Whether a call can be cut by columns: plain, of one tensor, of weights that are free."""
    kind, given = _kind_of(layer), keras.tree.flatten(arguments.kwargs)
    says_which = goes_back(arguments) or arguments.kwargs == {"reverse": False}
    either_way = kind is keras.layers.ReversibleEmbedding and says_which
    return (
        kind is not None
        and layer.built
        and len(keras.tree.flatten(arguments.args)) == len(arguments.args) == 1
        and (either_way or not given)
        and layer.activity_regularizer is None
        and layer.quantization_mode is None
        and not layer.lora_enabled
        and layer._remat_mode is None
        and not layer._layers  # an activation with weights, say
        and bytes_of(layer.variables) >= LEAST_BYTES
        and all(_is_free(variable) for variable in layer.variables)
    )


def bytes_of(variables: Iterable[Any]) -> int:
    """The bytes of some variables."""
    return sum(math.prod(v.shape) * tf.as_dtype(v.dtype).size for v in variables)


def _is_free(variable: Any) -> bool:
    """Whether a weight may be in parts: no pipeline trains it whole, each number is by itself."""
    trained_whole = hasattr(variable, "_used_here") or getattr(variable, "_clocks", None)
    return not trained_whole and variable.regularizer is None and variable.constraint is None


def number_of_parts(layer: Any, share: float) -> int:
    """How many parts a layer is cut into that makes up more than a stage's share of a model."""
    columns: int = getattr(layer, _COLUMNS[_kind_of(layer)])
    return min(math.ceil(share * PARTS_PER_SHARE), columns)


def parts_named(names: Iterable[str], path: str) -> int:
    """How many parts a plan with some names of nodes cuts a layer into; 1 for none."""
    found = (re.fullmatch(re.escape(path) + r"/1of(\d+)", name) for name in names)
    return next((int(match[1]) for match in found if match), 1)


def cut(layer: Any, given: Any, parts: int, *, back: bool = False) -> Any:
    """A Functional that computes what a layer does, in as many parts; the same one each time."""
    known = _CUT.setdefault(layer, {})
    if parts not in known:
        known[parts] = _parts(layer, given, parts), {}
    own, networks = known[parts]
    if back not in networks:
        networks[back] = _network(layer, own, given, back)
    return networks[back]


# By layer and number of parts: these, and what computes with them, either way.
_CUT: weakref.WeakKeyDictionary[Any, dict[int, tuple[list[Any], dict[bool, Any]]]]
_CUT = weakref.WeakKeyDictionary()


class _Rows(keras.layers.ReversibleEmbedding):  # type: ignore[misc]
    """Some rows of a table: words in other rows are zeros."""

    def __init__(self, begin: int, total: int, masks: bool, **config: Any) -> None:
        super().__init__(**config)
        self._begin, self._total = begin, total
        self.supports_masking = masks

    def call(self, inputs: Any, reverse: bool = False) -> Any:
        """Looks words up in these rows, or goes back from numbers to the words that they have."""
        if reverse:
            return super().call(inputs, reverse=True)
        words = inputs if inputs.dtype in ("int32", "int64") else keras.ops.cast(inputs, "int32")
        # As in Keras, negative ones count from the end. The last part refuses what has no row.
        words = keras.ops.where(words < 0, words + self._total, words)
        words = keras.ops.where(words < 0, self._total, words) - self._begin
        here = words >= 0
        if self._begin + self.input_dim < self._total:
            here &= words < self.input_dim
        rows = super().call(keras.ops.where(here, words, 0))
        rows = keras.ops.where(here[..., None], rows, 0)
        if self.supports_masking:
            set_mask(rows, keras.ops.not_equal(inputs, 0))
        return rows


def _parts(layer: Any, given: Any, parts: int) -> list[Any]:
    """The layers that a layer is cut into, whose weights have no values yet."""
    kind, config = _kind_of(layer), layer.get_config()
    columns = _COLUMNS[kind]
    total = config[columns]
    config |= {name: "zeros" for name in config if name.endswith("_initializer")}
    config |= {"activation": "linear"} if "activation" in config else {}
    if kind is keras.layers.ReversibleEmbedding:
        config |= {"total": total, "masks": config["mask_zero"], "mask_zero": False}
        kind = _Rows
    ends = [total * i // parts for i in range(parts + 1)]
    made: list[Any] = []
    unset: list[Any] = []
    with state.variables_without_values(unset):
        for i, (begin, end) in enumerate(itertools.pairwise(ends), 1):
            place = {"begin": begin} if kind is _Rows else {}
            own = {**config, **place, columns: end - begin, "name": f"{i}of{parts}"}
            made.append(kind.from_config(own))
            made[-1].build(given.shape)
            for whole, variable in zip(layer.variables, made[-1].variables, strict=True):
                axis = -1 if variable.shape[-1] < whole.shape[-1] else 0
                variable._initializer = variable._columns = Columns(whole, begin, end, axis)
                variable.trainable = whole.trainable
                state.name_by_path(variable, whole.path)  # by which optimizers know it
    return made


def _network(layer: Any, parts: Sequence[Any], given: Any, back: bool) -> Any:
    inputs = keras.Input(batch_shape=given.shape, dtype=given.dtype, name="given")
    looks_up = isinstance(parts[0], _Rows) and not back
    join = (keras.layers.Add if looks_up else keras.layers.Concatenate)(name="joined")
    joined = join([part(inputs, **({"reverse": True} if back else {})) for part in parts])
    if getattr(layer, "activation", keras.activations.linear) != keras.activations.linear:
        joined = keras.layers.Activation(layer.activation, name="activation")(joined)
    return keras.Model(inputs, joined, name=layer.name)
