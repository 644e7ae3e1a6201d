"""What a model is called with, as the first data that a script gives tell it."""

from __future__ import annotations

import itertools
import types
from collections.abc import Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf

from tarantella_pp.errors import ConfigurationError
from tarantella_pp.keras_internals.data import get_data_adapter
from tarantella_pp.runtime.batch.batch_announcement import READER
from tarantella_pp.runtime.batch.nested_structure import describe
from tarantella_pp.runtime.comm.communicator import Communicator
from tarantella_pp.runtime.one_rank import on_one_rank


def inputs_of_data(data: Any, ranks: Communicator) -> tuple[Any, Any]:
    """Symbolic inputs for data that rank 0 reads; all ranks must call it."""
    whole = [data]

    def read() -> Any:
        if not isinstance(data, types.GeneratorType):
            return _described(data)
        first = next(data, None)
        whole[0] = _chained(first, data)
        return _described(None if first is None else keras.utils.unpack_x_y_sample_weight(first)[0])

    description = on_one_rank(ranks, READER, "find out the shapes of the data", read)
    return _inputs(description), whole[0]


def inputs_of_shape(shape: Any) -> Any:
    """Symbolic inputs of the model's floats."""
    return _inputs(_of_shape(shape))


def _inputs(description: Any, name: str | None = None) -> Any:
    """Makes inputs of a description of tensors, with the names that they have in dicts."""
    kind, *rest = description
    if kind == "tensor":
        return keras.Input(rest[0][1:], dtype=rest[1], name=name)
    if kind == "dict":
        return {key: _inputs(item, str(key)) for key, item in rest[0]}
    return None if kind == "none" else [_inputs(item) for item in rest[0]]


def _of_shape(shape: Any) -> list[Any]:
    if isinstance(shape, dict):
        return ["dict", [[name, _of_shape(part)] for name, part in shape.items()]]
    if any(isinstance(part, Sequence) for part in shape):
        return ["list", [_of_shape(part) for part in shape]]
    return ["tensor", list(shape), keras.config.floatx()]


def _described(data: Any) -> Any:
    """Describes the inputs among the data, as Keras will read them."""
    if data is None:
        raise ConfigurationError("There are no data that a model could be built for.")
    batched = isinstance(data, (keras.utils.PyDataset, tf.data.Dataset))
    adapter = get_data_adapter(data, None, None, None if batched else 1, None)
    found = adapter.get_tf_dataset().element_spec
    alone = isinstance(found, tuple) and (batched or len(found) == 1)
    return describe(found[0] if alone else found)[0]


def _chained(first: Any, others: Iterator[Any]) -> Iterator[Any]:
    yield from itertools.chain([] if first is None else [first], others)
