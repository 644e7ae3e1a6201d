"""Which Keras models can be cut into stages; everything else is refused by name."""

from __future__ import annotations

from typing import Any

import keras

from tarantella_pp.errors import UnsupportedModelError
from tarantella_pp.keras_internals.functional import (
    input_layer_of,
    network_of,
    runs_its_graph,
    sublayers,
)

_REMEDY = "Build it with keras.Model(inputs, outputs) or keras.Sequential([keras.Input(...), ...])."


def supported_network(model: Any) -> Any:
    """Returns the Functional whose operations make up a model."""
    if not isinstance(model, keras.Model):
        raise UnsupportedModelError(
            f"Expected a Keras model. {_REMEDY} Received: model={model!r} (of type {type(model)})"
        )
    network = network_of(model)
    if isinstance(model, keras.Sequential) and network is None:
        raise UnsupportedModelError(
            f"Sequential model '{model.name}' is not built, so its layers are not connected yet. "
            "Begin it with a keras.Input, or call model.build(input_shape) with one tensor's shape."
        )
    if network is None or not runs_its_graph(model):
        raise UnsupportedModelError(
            f"Model '{model.name}' is a subclassed model (class {type(model).__name__} defines "
            f"call()): its operations cannot be seen, so it cannot be cut. {_REMEDY} Data parallel "
            "it need not be cut: tnt.Model(model, inputs=keras.Input(...))."
        )
    return network


def check_input(tensor: Any) -> None:
    """Refuses an input of the model that cannot be given to a stage."""
    layer = input_layer_of(tensor)
    if getattr(layer, "optional", False):
        raise UnsupportedModelError(
            f"Input '{tensor.name}' is optional; stages need every input. "
            "Make it a normal keras.Input and pass zeros where there is no value."
        )
    _check_dense(tensor, f"Input '{tensor.name}'")


def check_result(tensor: Any, node: Any, name: str) -> None:
    """Refuses a result that cannot travel between stages."""
    # Keras marks a dense tensor times a number, and what follows from that, as sparse, too
    makes_sparse = isinstance(node.operation, keras.layers.Layer) and not any(
        given.sparse for given in node.input_tensors
    )
    if makes_sparse or not tensor.sparse:
        _check_dense(tensor, f"Result '{name}'")


def _check_dense(tensor: Any, what: str) -> None:
    if tensor.sparse or tensor.ragged:
        kind = "sparse" if tensor.sparse else "ragged"
        raise UnsupportedModelError(
            f"{what} is a {kind} tensor; only dense tensors can be sent between stages. "
            "Make it dense in the data pipeline."
        )
    if tensor.dtype == "string":
        raise UnsupportedModelError(
            f"{what} is a string tensor; strings cannot be sent between stages. "
            "Turn them into numbers in the data pipeline, e.g. dataset.map(lookup_layer)."
        )


def check_operation(operation: Any) -> None:
    """Refuses an operation that micro-batches would break."""
    for layer in sublayers(operation):
        if isinstance(layer, keras.layers.RNN) and layer.stateful:
            raise UnsupportedModelError(
                f"Layer '{layer.name}' is stateful: its state has one row per sample of a whole "
                "batch, so a batch cannot be cut into micro-batches. Build it with stateful=False."
            )
