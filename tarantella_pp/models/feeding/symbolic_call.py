"""Models without a graph of operations, called symbolically to get one."""

from __future__ import annotations

from typing import Any

import keras

from tarantella_pp.errors import ConfigurationError, UnsupportedModelError
from tarantella_pp.keras_internals.functional import network_of, runs_its_graph


def has_no_graph(model: Any) -> bool:
    """Says whether a model hides its operations: a subclassed one, or an unbuilt Sequential."""
    is_model = isinstance(model, keras.Model)
    return is_model and not (network_of(model) is not None and runs_its_graph(model))


def graph_of(model: Any, inputs: Any) -> keras.Model:
    """Returns a model whose operations are known: calls of a subclassed one are one operation."""
    if not has_no_graph(model):
        raise ConfigurationError(
            f"Model '{model.name}' knows its inputs. Received: inputs={inputs!r}. Leave them out; "
            "they are for subclassed models and for Sequential ones that are not built."
        )
    try:
        outputs = model(inputs)
    except Exception as error:  # whatever `call` may raise
        raise UnsupportedModelError(
            f"Model '{model.name}' cannot be called with inputs={inputs!r}, which have shapes and "
            f"no values: {type(error).__name__}: {error}"
        ) from error
    if not has_no_graph(model):
        return model  # a Sequential, which is built now
    return keras.Model(inputs, outputs, name=model.name)
