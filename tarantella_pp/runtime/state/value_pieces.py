"""Large values on their way to a file: a variable of 64 MiB is written in eight pieces."""

from __future__ import annotations

import functools
from typing import Any

import keras

from tarantella_pp.keras_internals.model_files import goes_in_pieces
from tarantella_pp.runtime.comm.communicator import TensorSpec
from tarantella_pp.runtime.comm.tensor_buffers import elements_of, variable_dtype
from tarantella_pp.runtime.state.remote_variables import remote_value
from tarantella_pp.runtime.state.value_stream import ValuePieces


def rows_of(value: Any) -> ValuePieces | None:
    """Returns what reads a large value; `None` for a small one, or one without a variable."""
    if isinstance(value, keras.Variable):
        spec = TensorSpec(tuple(value.shape), variable_dtype(value))
        if not goes_in_pieces(spec.shape, spec.dtype):
            return None
        return remote_value(value) or ValuePieces(spec, functools.partial(elements_of, value))
    if isinstance(value, ValuePieces) and goes_in_pieces(value.shape, value.dtype):
        return value
    return None
